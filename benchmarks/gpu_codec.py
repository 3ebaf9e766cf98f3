"""The codec on one GPU: exactness first, then speed against the copy floor, all in one run.

    python benchmarks/gpu_codec.py [--json FILE] [--quick] [--impls cuda,triton] [--part exact|tiny|speed|ratio|all]
        [--levels 1,2] [--nvcomp FOLDER] [--apart]

Speed is GPU time from CUDA-graph replay over rotating buffers that together exceed the L2 cache. GB/s = 1e9 uncompressed bytes a second.
The CUDA kernels of one call overlap the end of the call before it, as in any stream of our own calls; --apart: what a call costs without.
The floor of a call is (bytes it must read + bytes it must write) / copy speed at that size, the better of two copies of this run. Beside
sums of rows stands a plain one of the same bytes (sum_floor.py).
"""
import argparse
import datetime
import json
import math
import os
import platform
import sys
from pathlib import Path

import torch

from ds_zipccl.cli import bench_nvcomp
from ds_zipccl.cli.bench_timing import interleaved
from ds_zipccl.codec import format as fmt
from ds_zipccl.codec.dtypes import BY_TORCH, TABLE
from ds_zipccl.kernels import impl_reference, loader, ops
from ds_zipccl.kernels.rank_order import sum_in_order

sys.path.append(str(Path(__file__).parent))
import sum_floor

MIB = 1 << 20
BITS = {2: torch.int16, 4: torch.int32}
BF16 = BY_TORCH[torch.bfloat16]
L2_MULTIPLE_BYTES = 512 * MIB
ROWS: list[dict] = []
# By level: two capacities and sub-pools that must both be exact, one that Gaussians spill out of into several groups, and what makes them
# overflow; capacities for other data than Gaussians.
CAPACITIES = {1: (((35, 64), (22, 2048)), (22, 600), (22, 64)), 2: (((95, 64), (60, 40000)), (80, 2000), (80, 64))}
FITTED = {1: {}, 2: {"zeros10": 140, "student3": 130, "bits": 1792}}


def row(**fields) -> None:
    ROWS.append(fields)


def make(kind: str, n: int, dtype, sigma: float = 0.02, seed: int = 0) -> torch.Tensor:
    g = torch.Generator("cuda").manual_seed(seed)
    if kind == "bits":
        width = 8 * dtype.itemsize - 1
        return torch.randint(-(1 << width), 1 << width, (n,), generator=g, device="cuda").to(BITS[dtype.itemsize]).view(dtype.torch_dtype)
    if kind == "specials":                   # a third of it -0 in every row; NaNs with payloads, infinities, denormals of both signs
        values = torch.tensor([-0.0, 0.0, math.inf, -math.inf, 1.0, -1.0, 1e-39, -1e-40, 3e38, -3e38, 0.02], device="cuda")
        x = values.to(dtype.torch_dtype)[torch.randint(0, len(values), (n,), generator=g, device="cuda")].view(BITS[dtype.itemsize])
        payload = torch.randint(1, 1 << dtype.mantissa_bits, (n,), generator=g, device="cuda").to(x.dtype)
        which = torch.rand(n, generator=g, device="cuda")
        infinity = values[2].to(dtype.torch_dtype).view(x.dtype)
        x = torch.where(which < 0.02, payload | infinity, torch.where(which < 0.1, payload, x)).view(dtype.torch_dtype)
        x[:n // 3] = -0.0
        return x
    z = torch.randn(n, generator=g, device="cuda") * sigma
    if kind in ("zeros10", "zeros90"):
        z *= torch.rand(n, generator=g, device="cuda") > (0.1 if kind == "zeros10" else 0.9)
    if kind == "tail":
        z *= torch.exp(2 * torch.randn(n, generator=g, device="cuda"))
    if kind == "zeros":
        z *= 0
    if kind == "student3":
        chi = sum(torch.randn(n, generator=g, device="cuda") ** 2 for _ in range(3))
        z /= (chi / 3).sqrt()
    return z.to(dtype.torch_dtype)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    view = BITS.get(a.element_size(), torch.uint8)
    return torch.equal(a.view(view), b.view(view))


def formats(impl, levels: tuple) -> list:
    """Every (dtype, level) that ``impl`` knows, of these levels."""
    return [(row, level) for row in TABLE for level in row.levels if level in levels and level in impl.levels]


# ---- exactness

def frames_of(impl, x, g, skip=-1):
    frames = torch.full((x.shape[0], fmt.align(g.frame_bytes)), 0xA5, dtype=torch.uint8, device="cuda")
    status = torch.full((1,), -1, dtype=torch.int32, device="cuda")
    impl.encode(x, frames, status, g, skip)
    return frames, int(status)


def check_one(name, impl, kind, dtype, n, rows, skip, offset, capacity, spill, level) -> int:
    """Number of things that differ from the reference."""
    g = fmt.layout(dtype, n, capacity, spill, level=level)
    gap = 8 + -n % 8                     # rows are 16-byte aligned where offset is 0
    x = torch.empty(rows * (n + gap) + offset, dtype=dtype.torch_dtype, device="cuda")[offset:].view(rows, n + gap)[:, :n]
    for i in range(rows):
        x[i] = make(kind, n, dtype, seed=i)
    frames, status = frames_of(impl, x, g, skip)
    expected, expected_status = frames_of(impl_reference, x, g, skip)
    wrong = [what for what, ok in (("status", status == expected_status), ("bytes", torch.equal(frames, expected))) if not ok]
    if not expected_status & 1 << 16:
        for source, reader, way in ((expected, impl, "decode"), (frames, impl_reference, "reference decode")):
            out = torch.full((rows, n + gap), 1.5, dtype=dtype.torch_dtype, device="cuda")
            reader.decode(source, out[:, :n], g, skip)
            kept = [i for i in range(rows) if i != skip]
            wrong += [way] * (not same(out[kept, :n], x[kept]) or not bool((out[:, n:] == 1.5).all()))
        own, totals = max(skip, 0), [torch.full_like(x[0], 1.5).contiguous() for _ in range(2)]
        impl.decode_reduce(expected, x[own], own, totals[0], g)
        impl_reference.decode_reduce(expected, x[own], own, totals[1], g)
        wrong += ["decode_reduce"] * (not same(*totals))
        if hasattr(impl, "raise_on_error"):
            impl.raise_on_error("cuda")
    if wrong:
        print(f"  WRONG {name} level {level} {kind} {dtype.name} n={n} rows={rows} skip={skip} offset={offset} c={capacity} s={spill}: "
              f"{wrong}", flush=True)
    return len(wrong)


def exactness(impls: dict, quick: bool, levels: tuple) -> int:
    all_wrong = 0
    for name, impl in impls.items():
        sizes = (0, 1025, 70001) if quick else (0, 1, 1023, 1025, 32768, 70001)
        kinds = ("gauss", "zeros10", "tail", "specials") if quick else ("gauss", "zeros10", "zeros", "tail", "bits", "student3", "specials")
        wrong = cases = 0
        for dtype, level in formats(impl, levels):
            for n in sizes:
                for kind in kinds:
                    for capacity, spill in CAPACITIES[level][0]:
                        rows = 2 + n % 2
                        wrong += check_one(name, impl, kind, dtype, n, rows, n % (rows + 1) - 1, n % 3, capacity, spill, level)
                        cases += 1
        for level in [level for dtype, level in formats(impl, levels) if dtype == BF16]:
            most = fmt.LEVELS[level].max_slot_bytes
            for capacity, spill in (*CAPACITIES[level][1:], (most, 0)):
                wrong += check_one(name, impl, "gauss", BF16, 32768 * 260 + 77, 1, -1, 0, capacity, spill, level)
                cases += 1
            x = torch.arange(1 << 16, device="cuda").to(torch.int16).view(torch.bfloat16).view(1, -1)
            g = fmt.layout(BF16, x.shape[1], most, 0, level=level)
            wrong += not torch.equal(frames_of(impl, x, g)[0], frames_of(impl_reference, x, g)[0])
        row(op="parity", impl=name, dtype="all", dist="all", cases=cases, wrong=wrong)
        print(f"exactness {name}: {cases} cases, {wrong} wrong", flush=True)
        all_wrong += wrong
    return all_wrong


def tiny(impls: dict, levels: tuple) -> int:
    """Few launches of every kernel, for compute-sanitizer (C20): round trips only, without the reference."""
    wrong = 0
    for impl in impls.values():
        for dtype, level in formats(impl, levels):
            for n, kind, rows in ((70001, "tail", 3), (33000, "gauss", 2), (32768 * 3, "zeros10", 2)):
                g = fmt.layout(dtype, n, 22, 8000 * level, level=level)
                x = torch.stack([make(kind, n, dtype, seed=i) for i in range(rows)])
                frames, status = frames_of(impl, x, g)
                out = torch.empty_like(x)
                impl.decode(frames, out, g)
                impl.decode_reduce(frames, x[1], 1, torch.empty_like(x[0]), g)
                wrong += (not status & 1 << 16) and not same(x, out)
    torch.cuda.synchronize()
    print(f"tiny run: {wrong} wrong", flush=True)
    return wrong


# ---- speed

def graph_us(calls: list, reps: int = 9) -> float:
    """Median GPU microseconds of one call; the calls follow each other in one graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls[:3]:
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    repeat = max(1, 8 // len(calls))
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(repeat):
            for call in calls:
                call()
    times = []
    for i in range(reps + 2):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        if i >= 2:
            times.append(begin.elapsed_time(end) * 1e3 / (repeat * len(calls)))
    return sorted(times)[len(times) // 2]


def num_sets(size: int) -> int:
    return max(2, min(192, L2_MULTIPLE_BYTES // size))


def copy_speed(size: int) -> float:
    """Bytes read + written a second."""
    sources = [torch.randint(1 << 30, (size // 4,), dtype=torch.int32, device="cuda") for _ in range(num_sets(size))]
    pairs = [(source, torch.empty_like(source)) for source in sources]
    ways = {"memcpy": [lambda a=a, b=b: b.copy_(a) for a, b in pairs],
            "elementwise": [lambda a=a, b=b: torch.bitwise_not(a, out=b) for a, b in pairs]}
    speeds = {way: 2 * size / graph_us(calls) * 1e6 for way, calls in ways.items()}
    row(op="copy", impl="torch", bytes=size, **{f"{way}_gbs": speed / 1e9 for way, speed in speeds.items()})
    return max(speeds.values())


def report(op, name, dtype, kind, size, us, moved, copy, frame_bytes, wrong, **more):
    gbs, share = size / us / 1e3, moved / copy * 1e6 / us
    row(op=op, impl=name, dtype=dtype.name, dist=kind, bytes=size, time_us=us, gbs=gbs, floor_share=share, wire_bytes=frame_bytes,
        ratio=size / frame_bytes, wrong=wrong, **more)
    print(f"  {op:14s} {name:7s} level {more.get('level', '-')} {dtype.name:8s} {kind:8s} {size / MIB:6.0f} MiB {us:9.1f} us "
          f"{gbs:7.0f} GB/s {100 * share:4.0f} % of floor  ratio {size / frame_bytes:.4f}  wrong {wrong}", flush=True)


def speed_of(name, impl, dtype, kind, size, copy, level):
    n, sets = size // dtype.itemsize, num_sets(size)
    g = fmt.layout(dtype, n, FITTED[level].get(kind), level=level)
    xs = [make(kind, n, dtype, seed=i).view(1, -1) for i in range(sets)]
    frames = [torch.empty(1, g.frame_bytes, dtype=torch.uint8, device="cuda") for _ in xs]
    outs = [torch.full_like(x, 1.5) for x in xs]
    status = torch.zeros(1, dtype=torch.int32, device="cuda")
    bits, need, overflow, wrong = BITS[dtype.itemsize], 0, 0, 0
    for x, f, o in zip(xs, frames, outs, strict=True):
        impl.encode(x, f, status, g)
        word = int(status)
        need, overflow = max(need, word & 0xFFFF), overflow | word >> 16 & 1
        impl.decode(f, o, g)
        if not word & 1 << 16:                   # an overflowed frame says so and is not used
            wrong += int((x.view(bits) != o.view(bits)).sum())
    encode_us = graph_us([lambda x=x, f=f: impl.encode(x, f, status, g) for x, f in zip(xs, frames, strict=True)])
    decode_us = graph_us([lambda f=f, o=o: impl.decode(f, o, g) for f, o in zip(frames, outs, strict=True)])
    more = {"overflow": overflow, "need": need, "level": level}
    report("compress", name, dtype, kind, size, encode_us, size + g.frame_bytes, copy, g.frame_bytes, wrong, **more)
    report("decompress", name, dtype, kind, size, decode_us, size + g.frame_bytes, copy, g.frame_bytes, wrong, **more)


def reduce_speed_of(name, impl, dtype, rows, size, copy, level):
    """``size``: bytes of one row."""
    n, sets = size // dtype.itemsize, max(2, num_sets(size) // rows)
    g = fmt.layout(dtype, n, level=level)
    status = torch.zeros(1, dtype=torch.int32, device="cuda")
    xs = [torch.stack([make("gauss", n, dtype, seed=7 * i + r) for r in range(rows)]) for i in range(sets)]
    frames = [torch.empty(rows, fmt.align(g.frame_bytes), dtype=torch.uint8, device="cuda") for _ in xs]
    outs = [torch.empty_like(x[0]) for x in xs]
    own = rows - 1
    for x, f in zip(xs, frames, strict=True):
        impl.encode(x, f, status, g, own)
    calls = [lambda x=x, f=f, o=o: impl.decode_reduce(f, x[own], own, o, g) for x, f, o in zip(xs, frames, outs, strict=True)]
    us = graph_us(calls)
    expected, wrong = torch.empty_like(outs[0]), 0
    for x, o in zip(xs, outs, strict=True):
        sum_in_order(list(x), expected)
        wrong += int((expected.view(BITS[dtype.itemsize]) != o.view(BITS[dtype.itemsize])).sum())
    moved, more = (rows - 1) * g.frame_bytes + 2 * size, {"rows": rows, "level": level}
    report("decode_reduce", name, dtype, "gauss", size, us, moved, copy, g.frame_bytes, wrong, **more)
    if sum_floor.triton and level == 1:
        us, moved = sum_floor.sum_us(rows, size, g.frame_bytes, sets, graph_us)
        report("plain sum", "triton", dtype, "integers", size, us, moved, copy, g.frame_bytes, 0, **more)


def speed(impls: dict, quick: bool, nvcomp: bool, levels: tuple) -> None:
    sizes = [s * MIB for s in ((16, 256) if quick else (1, 4, 16, 64, 256, 1024))]
    copy = {size: copy_speed(size) for size in sizes}
    for size, value in copy.items():
        print(f"copy at {size / MIB:5.0f} MiB: {value / 1e9:.0f} GB/s read + written", flush=True)
    if nvcomp:
        nvcomp_speed(copy[256 * MIB])
    for name, impl in impls.items():
        for level in [level for dtype, level in formats(impl, levels) if dtype == BF16]:
            for size in sizes:
                speed_of(name, impl, BF16, "gauss", size, copy[size], level)
            for rows, size in ((2, 64 * MIB), (8, 64 * MIB)) if quick else ((2, 16 * MIB), (2, 256 * MIB), (4, 64 * MIB), (8, 64 * MIB)):
                reduce_speed_of(name, impl, BF16, rows, size, copy.get(size, copy[256 * MIB]), level)
            for kind in () if quick else ("zeros10", "student3", "bits"):
                speed_of(name, impl, BF16, kind, 256 * MIB, copy[256 * MIB], level)
        if not quick and 1 in levels:
            for dtype in TABLE[1:]:
                speed_of(name, impl, dtype, "gauss", 256 * MIB, copy[256 * MIB], 1)


def nvcomp_speed(copy: float) -> None:
    """nvCOMP's ANS at 256 MiB, as `ds_zipccl bench codec` times it: single calls, the L2 flushed before each."""
    reason = bench_nvcomp.NvcompAns.absent()
    if reason:
        row(op="none", impl="nvcomp", path="absent", reason=reason)
        print(f"nvcomp: not measured: {reason}", flush=True)
        return
    x = make("gauss", 128 * MIB, BF16)
    out = torch.full_like(x, 1.5)
    rival = bench_nvcomp.NvcompAns(x, out)
    times = interleaved({"compress": rival.compress, "decompress": rival.decompress}, "cuda", 9)
    wrong = int((x.view(torch.int16) != out.view(torch.int16)).sum())
    for op, values in times.items():
        report(op, "nvcomp", BF16, "gauss", x.nbytes, sorted(values)[4], x.nbytes + rival.wire_bytes, copy, rival.wire_bytes, wrong)
    rival.close()


def host_cost(name, impl) -> None:
    """Host microseconds to queue one call: small frames, so that the GPU is never behind."""
    import time
    g = fmt.layout(BF16, 1024)
    x, f = make("gauss", 1024, BF16).view(1, -1), torch.empty(1, g.frame_bytes, dtype=torch.uint8, device="cuda")
    status = torch.zeros(1, dtype=torch.int32, device="cuda")
    for op, call in (("encode", lambda: impl.encode(x, f, status, g)), ("decode", lambda: impl.decode(f, x, g))):
        best = math.inf
        for _ in range(20):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(100):
                call()
            best = min(best, (time.perf_counter() - begin) / 100 * 1e6)
        row(op=f"host_{op}", impl=name, dtype=BF16.name, time_us=best)
        print(f"host time to queue {op} {name}: {best:.1f} us", flush=True)


def ratios(impls: dict, level: int) -> None:
    """Fixed ratio and need over a half-octave sweep of sigma."""
    name, impl = next(iter(impls.items()))
    if level not in impl.levels:
        return
    n = 32 * MIB
    g = fmt.layout(BF16, n, level=level)
    frames, status = torch.empty(1, g.frame_bytes, dtype=torch.uint8, device="cuda"), torch.zeros(1, dtype=torch.int32, device="cuda")
    worst, worst_used = 0, math.inf
    for step in range(-40, 21):
        sigma = 2.0 ** (step / 2)
        impl.encode(make("gauss", n, BF16, sigma).view(1, -1), frames, status, g)
        word = int(status)
        heads = frames[0, 128:128 + (g.num_tiles - 1) * g.tile_bytes].view(-1, g.tile_bytes)[:, :4].contiguous().view(torch.int32)
        used = (g.num_tiles * (144 + 32 * (fmt.LEVELS[level].code_bytes + 1024)) + int(heads.sum()) + 128) or 1
        worst, worst_used = max(worst, word), min(worst_used, 2 * n / used)
        row(op="ratio", impl=name, level=level, dtype=BF16.name, dist="gauss", sigma=sigma, bytes=2 * n, ratio=2 * n / g.frame_bytes,
            ratio_used=2 * n / used, need=word & 0xFFFF, overflow=word >> 16 & 1)
    print(f"level {level}, ratio over sigma 2^-20..2^10: fixed {2 * n / g.frame_bytes:.4f}, used >= {worst_used:.4f}, "
          f"need <= {worst & 0xFFFF}, overflow {worst >> 16 & 1}", flush=True)


def table() -> str:
    lines = ["| op | impl | level | dtype | data | MiB | us | GB/s | % of copy floor | ratio | wrong |",
             "|---|---|---|---|---|---|---|---|---|---|---|"]
    for r in ROWS:
        if "floor_share" in r:
            op = r["op"] + (f", {r['rows']} rows" if "rows" in r else "")
            lines.append(f"| {op} | {r['impl']} | {r.get('level', '-')} | {r['dtype']} | {r['dist']} | {r['bytes'] // MIB} | "
                         f"{r['time_us']:.1f} | {r['gbs']:.0f} | "
                         f"{100 * r['floor_share']:.0f} | {r['ratio']:.4f}{' (overflow)' if r.get('overflow') else ''} | {r['wrong']} |")
    return "\n".join(lines)


def save(path: Path | None, impls: dict) -> None:
    meta = {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda, "torch": torch.__version__,
            "python": platform.python_version(), "command": "python benchmarks/gpu_codec.py " + " ".join(sys.argv[1:]),
            "date": datetime.date.today().isoformat(), "impls": list(impls),
            "layout": f"c = {fmt.LEVELS[1].slot_bytes}; level 2: {fmt.LEVELS[2].slot_bytes} for Gaussians, {FITTED[2]}; "
                      f"s = {fmt.DEFAULT_SPILL_PER_TILE}; Gaussian sigma 0.02"}
    if path:
        path.write_text(json.dumps({"meta": meta, "rows": ROWS}, indent=1))
        path.with_suffix(".md").write_text(f"{json.dumps(meta)}\n\n{table()}\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--nvcomp", nargs="?", const="", help="measure nvCOMP's ANS too: the installed one, or that of a folder that has "
                                                              "include/ and lib64/")
    parser.add_argument("--impls", default="cuda")
    parser.add_argument("--apart", action="store_true", help="CUDA kernels wait for the end of the call before, as behind others' kernels")
    parser.add_argument("--levels", default="1,2", help="compression levels, where an implementation has them")
    parser.add_argument("--part", default="all", choices=("exact", "tiny", "speed", "ratio", "all"))
    args = parser.parse_args()
    if args.nvcomp:
        os.environ[bench_nvcomp.VARIABLE] = args.nvcomp
    impls = {}
    for name in args.impls.split(","):
        loader.resolve(name, "cuda")
        impls[name] = ops.kernel_set(name)
        if args.apart and name == "cuda":
            impls[name]._calls.allow_overlap(False)
    levels = tuple(int(level) for level in args.levels.split(","))
    wrong = exactness(impls, args.quick, levels) if args.part in ("exact", "all") else 0
    save(args.json, impls)
    if args.part == "tiny":
        wrong = tiny(impls, levels)
    if args.part in ("speed", "all"):
        speed(impls, args.quick, args.nvcomp is not None, levels)
        save(args.json, impls)
        for name, impl in impls.items():
            host_cost(name, impl)
    if args.part in ("ratio", "all"):
        for level in levels:
            ratios(impls, level)
    save(args.json, impls)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
