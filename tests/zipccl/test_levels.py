"""Compression levels and kernel sets: one that does not know a level says so, and is not taken for it."""
import logging

import pytest
import torch

from ds_zipccl.codec import format as fmt
from ds_zipccl.codec.codec import Codec, compress, decompress
from ds_zipccl.codec.dtypes import BY_TORCH, TABLE
from ds_zipccl.errors import KernelError
from ds_zipccl.kernels import impl_cpu, impl_cuda, impl_reference, impl_triton, loader, ops
from tests.helpers.bits import assert_same_bits
from tests.zipccl.codec_cases import BF16, data, header_of

LEVEL_2 = fmt.layout(BY_TORCH[BF16], 3000, level=2)


@pytest.fixture
def first_level_only(monkeypatch):
    """A set of this name, the best for the CPU, that knows level 1."""
    functions = type("Old", (), {name: staticmethod(getattr(impl_reference, name)) for name in ops.FUNCTIONS})
    monkeypatch.setattr(ops, "_SETS", {**ops._SETS})
    ops.register("old", functions, ("cpu",))
    monkeypatch.setattr(loader, "PREFERENCE", (("old", ("cpu",), "none"), ("reference", ("cpu", "cuda"), "impl_reference")))
    monkeypatch.setattr(loader, "load", lambda name: None)
    loader._best.cache_clear()
    yield "old"
    loader._best.cache_clear()


def test_a_named_set_that_does_not_know_the_level_is_an_error(first_level_only):
    assert Codec.of(BF16, 3000, "cpu", kernels="old").kernels == "old"
    with pytest.raises(KernelError, match="'old' were asked for.*level 1 alone, not level 2"):
        Codec.of(BF16, 3000, "cpu", level=2, kernels="old")
    x, frames = torch.zeros(1, 3000, dtype=BF16), torch.zeros(1, LEVEL_2.frame_bytes, dtype=torch.uint8)
    status = torch.zeros(1, dtype=torch.int32)
    for call in (lambda: ops.encode(x, frames, status, LEVEL_2, kernels="old"), lambda: ops.decode(frames, x, LEVEL_2, kernels="old"),
                 lambda: ops.decode_reduce(frames, x[0], 0, x[0], LEVEL_2, kernels="old")):
        with pytest.raises(KernelError, match="does not know this compression level.*2.*1"):
            call()


def test_the_best_set_is_the_best_that_knows_the_level(first_level_only, caplog):
    x = data("gaussian", BF16, 3000)
    with caplog.at_level(logging.WARNING, "ds_zipccl"):
        assert loader.resolve("best", "cpu") == "old" and not caplog.records
        assert [loader.resolve("best", "cpu", 2) for _ in range(3)] == ["reference"] * 3
    assert [record.getMessage().count("do not know level 2") for record in caplog.records] == [1]
    frame = compress(x, level=2)
    assert header_of(frame).level == 2
    assert_same_bits(decompress(frame, torch.empty_like(x)), x)


def test_every_set_of_ours_knows_every_level():
    assert {impl_reference.levels, impl_cpu.CpuKernels.levels, impl_cuda.CudaKernels.levels, impl_triton.TritonKernels.levels} == {(1, 2)}


def test_a_codec_of_level_2_takes_no_window():
    codec = Codec.of(BF16, 3000, "cpu", level=2, kernels="reference")
    assert codec.giving(-1).geometry == codec.geometry
    with pytest.raises(ValueError, match="takes no given window.*level 2"):
        codec.giving(100)


def test_which_levels_there_are():
    assert {row.name: row.levels for row in TABLE} == {"bfloat16": (1, 2), "float16": (1,), "float32": (1,)}
    assert set(fmt.LEVELS) == {level for row in TABLE for level in row.levels}
    assert [row.level(2) for row in TABLE] == [2, 1, 1] and [row.level(1) for row in TABLE] == [1, 1, 1]
