"""``ds_zipccl bench codec`` on tiny sizes: its rows, its verification, its data, its refusals (C19, C22 seen by the user)."""
import argparse
import json
import re
import struct

import pytest
import torch

from ds_zipccl.cli import bench_codec, bench_data, bench_timing
from ds_zipccl.cli.main import main
from ds_zipccl.codec.codec import Codec
from ds_zipccl.codec.dtypes import TABLE
from tests.helpers.bits import gaussian
from zipscape.errors import ZipScapeError


def bench(tmp_path, *arguments, expected: int = 0) -> list[dict]:
    file = tmp_path / "rows.json"
    assert main(["bench", "codec", "--device", "cpu", "--repeat", "1", "--json", str(file), *arguments]) == expected
    return json.loads(file.read_text())["rows"]


def test_rows(tmp_path, capsys):
    """design.md section 1: meta and rows; two rows a case, every number plausible, nothing wrong."""
    rows = bench(tmp_path, "--size", "128K,64K", "--dtype", "bf16,fp32", "--dist", "normal,random_bits", "--impl", "cpu,reference")
    document = json.loads((tmp_path / "rows.json").read_text())
    assert set(document) == {"meta", "settings", "rows"} and {"machine", "versions", "command", "date"} <= set(document["meta"])
    assert document["settings"]["statistic"] == "median" and document["settings"]["seed"] == 1
    assert [(r["op"], r["impl"], r["dtype"], r["dist"], r["bytes"]) for r in rows] == [
        (op, impl, dtype, dist, size) for dist in ("normal", "random_bits") for dtype in ("bf16", "fp32") for size in (1 << 17, 1 << 16)
        for impl in ("cpu", "reference") for op in ("compress", "decompress")]
    for row in rows:
        assert row["wrong"] == 0 and row["window"] == "block"
        assert row["time_us"] >= row["time_us_min"] > 0 and row["floor_percent"] > 0
        assert row["algbw"] == pytest.approx(row["bytes"] / row["time_us"] / 1e3)
        assert row["ratio"] == pytest.approx(row["bytes"] / row["wire_bytes"]) and row["ratio"] <= row["needed_ratio"]
    by = {(r["impl"], r["dtype"], r["dist"], r["bytes"]): r for r in rows}
    plain, noise = by["cpu", "bf16", "normal", 1 << 17], by["cpu", "bf16", "random_bits", 1 << 17]
    assert plain["path"] == "zipped" and 1.40 < plain["ratio"] < plain["needed_ratio"]
    assert plain["needed_ratio"] <= plain["best_window_ratio"] < plain["shannon_ratio"]
    assert 2.5 < plain["entropy_bits"] < 2.6 and 2 < plain["escapes_percent"] < 3.1
    assert noise["path"] == "raw" and 0.99 < noise["ratio"] < 1 and noise["entropy_bits"] > 7.9
    for key in ("wire_bytes", "needed_ratio", "escapes_percent"):
        assert plain[key] == by["reference", "bf16", "normal", 1 << 17][key]
    printed = capsys.readouterr().out
    assert "comp GB/s" in printed and "random_bits" in printed and "…" not in printed


def test_levels(tmp_path, capsys):
    """Level 2 where dtype, kernels and window have it; smaller, and exact."""
    rows = bench(tmp_path, "--size", "128K", "--dtype", "bf16,fp16", "--dist", "normal", "--impl", "cpu", "--level", "1,2", "--window",
                 "both")
    assert [(r["level"], r["dtype"], r["window"]) for r in rows[::2]] == [
        (1, "bf16", "block"), (1, "bf16", "sigma"), (2, "bf16", "block"), (1, "fp16", "block"), (1, "fp16", "sigma")]
    one, two = rows[0], rows[4]
    assert two["ratio"] > 1.04 * one["ratio"] and two["needed_ratio"] > 1.48 and 0.6 < two["stream_bits"] < 0.8
    assert not any(row["wrong"] for row in rows)
    with pytest.raises(ZipScapeError, match="--level.*3"):
        bench_codec.run(argument_parser().parse_args(["--device", "cpu", "--level", "1,3"]))


def argument_parser():
    parser = argparse.ArgumentParser()
    bench_codec.add_arguments(parser)
    return parser


def test_wrong_elements_are_counted_and_fail(tmp_path, monkeypatch, capsys):
    decode = Codec.decode

    def broken(self, frames, rows, skip=-1):
        decode(self, frames, rows, skip)
        rows[0, 100:103] *= -1

    monkeypatch.setattr(Codec, "decode", broken)
    rows = bench(tmp_path, "--size", "64K", "--dtype", "bf16", "--dist", "normal", "--impl", "cpu", expected=1)
    assert [row["wrong"] for row in rows] == [3, 3]
    assert "6 elements" in capsys.readouterr().err


def test_windows(tmp_path):
    rows = bench(tmp_path, "--size", "128K", "--dtype", "bf16", "--dist", "normal,lognormal_rows", "--impl", "cpu", "--window", "both")
    ratio = {(r["dist"], r["window"]): r["needed_ratio"] for r in rows}
    assert ratio["normal", "sigma"] == pytest.approx(ratio["normal", "block"], rel=0.005)
    assert ratio["lognormal_rows", "sigma"] < ratio["lognormal_rows", "block"]              # why the block mean is the default


def test_files(tmp_path):
    """A state dict with things that are no tensors, a safetensors file written by hand, a folder of both, gradients."""
    torch.save({"model": {"a": gaussian(30000, 1), "step": torch.tensor(3), "names": ["x"]}, "list": [gaussian(5000, 2, torch.float32)]},
               tmp_path / "model.pt")
    half = gaussian(4000, 3, torch.float16)
    entries = {"__metadata__": {"format": "pt"}, "w": {"dtype": "F16", "shape": [4000], "data_offsets": [3, 8003]},
               "i": {"dtype": "I8", "shape": [3], "data_offsets": [0, 3]}}
    head = json.dumps(entries).encode()
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "x.safetensors").write_bytes(struct.pack("<Q", len(head)) + head + bytes(3) + bytes(half.view(torch.uint8).tolist()))
    assert torch.equal(bench_data.load_tensors(str(folder))[0], half)
    assert [t.numel() for t in bench_data.load_tensors(str(tmp_path))] == [4000, 30000, 5000]
    rows = bench(tmp_path, "--file", str(tmp_path / "model.pt"), "--gradients", str(folder), "--dtype", "bf16", "--size", "64K,1M",
                 "--impl", "cpu")
    assert [(r["dist"], r["bytes"]) for r in rows[::2]] == [
        ("weights:model.pt", 1 << 16), ("weights:model.pt", 70000), ("gradients:folder", 8000)]
    assert all(row["wrong"] == 0 and row["ratio"] > 1.15 for row in rows[:4])


def test_samples_take_part_of_every_tensor():
    tensors = [torch.full((1000,), 1.0), torch.full((10, 10), 2.0), torch.full((3,), 3.0)]
    for numel in (1, 50, 400, 1103, 5000):
        x = bench_data.sample(tensors, torch.bfloat16, numel, "cpu")
        assert x.numel() == min(numel, 1103) and x.dtype == torch.bfloat16
        if numel >= 400:
            assert set(x.tolist()) == {1.0, 2.0, 3.0}


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_distributions_are_what_their_names_say(row):
    for name in bench_data.DISTRIBUTIONS:
        x = bench_data.synthetic(name, row.torch_dtype, 40000, "cpu", 5)
        again = bench_data.synthetic(name, row.torch_dtype, 40000, "cpu", 5)
        other = bench_data.synthetic(name, row.torch_dtype, 40000, "cpu", 6)
        assert x.dtype == row.torch_dtype and x.shape == (40000,)
        assert torch.equal(x.view(torch.uint8), again.view(torch.uint8)) and not torch.equal(x.view(torch.uint8), other.view(torch.uint8))
    zeros = (bench_data.synthetic("zeros10", row.torch_dtype, 40000, "cpu", 5) == 0).float().mean()
    assert 0.09 < zeros < 0.11
    assert 0.018 < bench_data.synthetic("normal", row.torch_dtype, 40000, "cpu", 5).float().std() < 0.022


@pytest.mark.parametrize("arguments, words", [
    (["--size", "0"], "--size.*64K"), (["--size", "many"], "--size.*many"), (["--dist", "cauchy"], "--dist.*cauchy.*normal"),
    (["--dtype", "fp8"], "--dtype.*fp8.*bf16"), (["--impl", "gpu"], "--impl.*gpu.*reference"), (["--repeat", "0"], "1 or more"),
    (["--file", "no/such.pt"], "no/such.pt"), (["--impl", "cuda"], "cuda"), (["--threads", "0"], "1 or more")],
    ids=lambda v: " ".join(v) if isinstance(v, list) else "")
def test_refusals(arguments, words, capsys):
    """One clear line, exit status 2, no traceback."""
    assert main(["bench", "codec", "--device", "cpu", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("ds_zipccl: ") and error.count("\n") == 1
    assert re.search(words, error)


def test_files_that_cannot_be_read(tmp_path):
    (tmp_path / "a.pt").write_bytes(b"not a checkpoint")
    (tmp_path / "b.safetensors").write_bytes(struct.pack("<Q", 1 << 40) + b"{}")
    (tmp_path / "c.txt").write_text("hello")
    torch.save({"only": torch.arange(3)}, tmp_path / "d.pt")
    torch.save({"code": test_rows}, tmp_path / "e.pt")
    for name in ("a.pt", "b.safetensors", "c.txt", "d.pt", "e.pt"):
        with pytest.raises(ZipScapeError, match=name.replace(".", r"\.")):
            bench_data.load_tensors(str(tmp_path / name))


def test_sizes():
    assert [bench_codec.parse_size(s) for s in ("100", "4k", " 16M", "1G")] == [100, 4096, 16 << 20, 1 << 30]


def test_times_are_taken_in_turns():
    calls = []
    times = bench_timing.interleaved({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, "cpu", 3, warmup=0)
    assert calls == ["a", "b"] * 3 and set(map(len, times.values())) == {3}
    calls.clear()
    bench_timing.interleaved({"a": lambda: calls.append("a")}, "cpu", 2)
    assert len(calls) > 100                  # short calls are repeated within one measurement
