"""``ds_zipccl bench collectives``: native against ours, call by call, with the columns of nccl-tests."""
import contextlib
import functools
import random
import statistics
import sys
import time

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from ds_zipccl.backend import front
from ds_zipccl.cli import ranks
from ds_zipccl.cli.bench_codec import DTYPES, parse_size
from ds_zipccl.collectives.registry import Call, CollectiveSpec, specs
from ds_zipccl.collectives.runtime import Runtime
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.kernels import loader
from ds_zipccl.stats import difference
from zipscape.errors import ZipScapeError, describe
from zipscape.machine import write_json

HELP = "collectives: native against zipped, with the columns of nccl-tests"
DESCRIPTION = """Every collective at every size: native, native once more (its speedup is the noise) and ours, in turns. size: bytes of
the whole tensor, as nccl-tests counts them; count: its elements; calls: so many back to back, of which the time is one's; algbw = size /
time; busbw = algbw x the collective's factor; both on raw bytes. wire: what a rank sends (the largest of all ranks); ratio = raw / wire.
speedup: the median of native time / this time over the turns, with the interval that holds the true median with 95 %. A row is slower only
if all of that lies below 0.97; the medians below it are counted beside, and both for native once more. #wrong: elements that differ from
native's on inputs that sum exactly in any order, and, where nothing is summed or 2 ranks sum, on Gaussians. Exit status 1 if any does."""
COLUMNS = ("op", "size", "count", "type", "place", "calls", "path", "time us", "algbw", "busbw", "wire", "ratio", "speedup", "95 %",
           "decision", "#wrong")
LEAST = 0.97                             # of native's speed, is promised under ``adaptive``
BITS = {2: torch.int16, 4: torch.int32}
IN_PLACE = ("all_gather_into_tensor", "reduce_scatter_tensor")          # both ways exist; others have one


def add_arguments(parser) -> None:
    parser.add_argument("--op", metavar="LIST", default=None, help="of " + ", ".join(specs()) + " (default: all)")
    parser.add_argument("-b", "--begin", metavar="SIZE", default="1M", help="smallest size in bytes, with K, M or G (default 1M)")
    parser.add_argument("-e", "--end", metavar="SIZE", default="16M", help="largest size (default 16M)")
    parser.add_argument("-f", "--factor", type=int, default=4, help="from one size to the next (default 4)")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bf16")
    parser.add_argument("--choice", choices=("always", "adaptive"), default="always",
                        help="always: ours is zipped whenever eligible; adaptive: the switch decides")
    parser.add_argument("--transport", choices=("process_group", "symmetric_memory", "adaptive"), default="process_group",
                        help="symmetric_memory: ours goes one-sided where it can (decision says one-sided); adaptive: where that is faster")
    parser.add_argument("--iters", type=int, default=11, help="turns (default 11)")
    parser.add_argument("--calls", metavar="LIST", default="1", help="time so many calls back to back, as behind a computation; times are "
                        "of one (default 1: each waits for its own launch; 1,8: rows of both)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--kernels", choices=("best", *loader.NAMES), default="best")
    parser.add_argument("--level", type=int, choices=(1, 2), default=1, help="compression level (default 1)")
    parser.add_argument("--ranks", type=int, default=None, metavar="N", help="spawn N ranks here instead of using a launcher")
    parser.add_argument("--json", metavar="FILE", help="rank 0 also writes the rows here")


def _sizes(args) -> list[int]:
    begin, end = parse_size(args.begin), parse_size(args.end)
    if args.factor < 2 or begin > end or args.iters < 1 or not all(n.isdecimal() and int(n) for n in args.calls.split(",")):
        raise ZipScapeError(describe("the sweep", got=f"-b {args.begin} -e {args.end} -f {args.factor} --iters {args.iters} "
                                     f"--calls {args.calls}", expected="-b <= -e, -f >= 2, --iters >= 1, --calls >= 1"))
    sizes = [begin]
    while sizes[-1] * args.factor <= end:
        sizes.append(sizes[-1] * args.factor)
    return sizes


def run(args) -> int:
    _sizes(args)
    for op in args.op.split(",") if args.op else ():
        if op not in specs():
            raise ZipScapeError(describe("--op", got=op, expected=f"a list of {', '.join(specs())}"))
    return ranks.run(_bench, args.ranks, args.device, args, list(sys.argv[1:]))


def make_call(spec: CollectiveSpec, size: int, dtype: torch.dtype, device, in_place: bool) -> Call:
    """A call whose whole tensor has about ``size`` bytes, with inputs that sum exactly."""
    group, count = dist.group.WORLD, max(1, size // dtype.itemsize)
    row = max(1, count // group.size())
    call = spec.make_call(group, row, dtype, device)
    if spec.whole_numel(call) < count - group.size():           # nothing is divided by the number of ranks
        call = spec.make_call(group, count, dtype, device)
    if not in_place:
        return call
    whole, part = (call.output, call.input) if spec.name == "all_gather_into_tensor" else (call.input, call.output)
    mine = whole.view(group.size(), -1)[group.rank()]
    if spec.name == "all_gather_into_tensor":
        mine.copy_(part.view(-1))
        return Call(spec.name, whole, mine, group)
    return Call(spec.name, mine, whole, group)


def _gaussian(call: Call) -> None:
    for i, t in enumerate(call.inputs):
        generator = torch.Generator(t.device).manual_seed(100 * call.rank + i)
        t.normal_(0, 0.02, generator=generator)


def _copies(tensors) -> list[torch.Tensor]:
    return [t.clone() for t in tensors]


def _restore(tensors, saved) -> None:
    for t, s in zip(tensors, saved, strict=True):
        t.copy_(s)


def _wait(works, device) -> None:
    for work in works:
        work.wait()
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def count_wrong(spec: CollectiveSpec, call: Call, ours) -> int:
    """Elements of the outputs, in bits and NaN payloads included, that differ from native's after ``ours()``."""
    saved = _copies(call.inputs)
    _wait([spec.native(call)], call.device)
    expected = _copies(call.outputs)
    for t in call.outputs:
        if not any(t.data_ptr() == s.data_ptr() for s in call.inputs):
            t.fill_(1.5)
    _restore(call.inputs, saved)
    ours()
    bits = BITS[call.dtype.itemsize]
    wrong = sum(int((got.contiguous().view(bits) != want.contiguous().view(bits)).sum())
                for got, want in zip(call.outputs, expected, strict=True))
    _restore(call.inputs, saved)
    return wrong


def median_interval(values: list[float]) -> tuple[float, float]:
    """The order statistics between which the median lies with at least 95 % (all of them where there are too few)."""
    ordered, n = sorted(values), len(values)
    chance, k = 0.5 ** n, 0                # of at most k values below the median
    term = chance
    while k < n // 2 and 2 * chance <= 0.05:
        k += 1
        term *= (n - k + 1) / k
        chance += term
    low = max(0, k - 1)
    return ordered[low], ordered[n - 1 - low]


def _times(paths: dict, call: Call, iters: int, num_calls: int) -> dict[str, list[float]]:
    """Microseconds of one of the ``num_calls`` of a function on the slowest rank, per path and turn; the inputs are put back before each
    turn (all_reduce is in place). In an order of its own each turn: what ran just before is in the caches."""
    saved, times = _copies(call.inputs), {path: [] for path in paths}
    for turn in range(iters + 2):
        for path, function in random.Random(turn).sample(list(paths.items()), len(paths)):
            _restore(call.inputs, saved)
            dist.barrier()
            if call.device.type == "cuda":
                torch.cuda.synchronize(call.device)
            start = time.perf_counter()
            function()
            if turn >= 2:
                times[path].append((time.perf_counter() - start) * 1e6 / num_calls)
    slowest = torch.tensor(list(times.values()), dtype=torch.float64, device=call.device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return dict(zip(times, slowest.tolist(), strict=True))


def measure(spec: CollectiveSpec, size: int, args, runtime: Runtime, in_place: bool) -> list[dict]:
    """The rows of one collective at one size: native, native again, ours, for each number of calls back to back."""
    device, dtype = torch.device(args.device, torch.cuda.current_device() if args.device == "cuda" else None), DTYPES[args.dtype]
    call = make_call(spec, size, dtype, device, in_place)

    def native(num_calls: int) -> None:
        _wait([spec.native(call) for _ in range(num_calls)], device)

    def ours(num_calls: int = 1) -> None:
        _wait([front.run(runtime, call, spec.native) for _ in range(num_calls)], device)

    wrong = count_wrong(spec, call, ours)
    _gaussian(call)
    if not spec.reduces or call.world_size == 2:
        wrong += count_wrong(spec, call, ours)
    rows = []
    for num_calls in map(int, args.calls.split(",")):
        for _ in range(3):
            ours(num_calls)                         # capacities and the switch settle
        before = runtime.stats.snapshot()[spec.name]
        theirs = functools.partial(native, num_calls)
        times = _times({"native": theirs, "native again": theirs, "ours": functools.partial(ours, num_calls)}, call, args.iters, num_calls)
        seen = difference(runtime.stats.snapshot()[spec.name], before)
        rows += [row | {"calls": num_calls, "in_place": in_place} for row in _rows(spec, call, args, times, seen, wrong)]
    return rows


def _rows(spec: CollectiveSpec, call: Call, args, times: dict[str, list[float]], seen: dict, wrong: int) -> list[dict]:
    """``times``: by path and turn. ``seen``: what was counted of ours."""
    calls = seen["calls_zipped"] + seen["calls_native"]
    reasons = max(seen["native_reasons"], key=seen["native_reasons"].get, default="")
    most = torch.tensor([seen["raw_bytes"], seen["wire_bytes"]], device=call.device)         # of all ranks: a broadcast is sent by one
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    raw_bytes, wire_bytes = most.tolist()
    facts = {"native": (raw_bytes, 0), "native again": (raw_bytes, 0), "ours": (wire_bytes, wrong)}
    whole, factor, rows = spec.whole_numel(call), spec.bus_factor(call.world_size), []
    for path, path_times in times.items():
        time_us, (wire, path_wrong) = statistics.median(path_times), facts[path]
        speedups = [a / b for a, b in zip(times["native"], path_times, strict=True)]
        algbw = whole * call.dtype.itemsize / time_us / 1e3
        zipped = path == "ours" and seen["calls_zipped"] > 0
        one_sided = zipped and seen["calls_one_sided"] > 0
        decision = "one-sided" if one_sided else "zipped" if zipped else reasons if path == "ours" else ""
        rows.append({"op": spec.name, "impl": path, "dtype": args.dtype, "dist": "normal", "bytes": whole * call.dtype.itemsize,
                     "count": whole, "ranks": call.world_size, "transport": "symmetric_memory" if one_sided else "process_group",
                     "path": "zipped" if zipped else "native",
                     "time_us": time_us, "algbw": algbw, "busbw": algbw * factor, "wire_bytes": wire // calls,
                     "ratio": raw_bytes / wire, "speedup": statistics.median(speedups),
                     "speedup_interval": median_interval(speedups), "decision": decision,
                     "overflows": seen["overflows"] if path == "ours" else 0, "wrong": path_wrong})
    return rows


def slower(rows: list[dict]) -> dict[str, dict[str, int]]:
    """Of how many rows the whole interval lies below LEAST, and of how many the median, by path: native against itself is the noise."""
    seen = {}
    for path in ("native again", "ours"):
        mine = [row for row in rows if row["impl"] == path]
        seen[path] = {"rows": len(mine), "intervals": sum(row["speedup_interval"][1] < LEAST for row in mine),
                      "medians": sum(row["speedup"] < LEAST for row in mine)}
    return seen


def _bench(args, argv: list[str]) -> int:
    config = ZipcclConfig(enabled=True, collectives=args.choice, min_bytes=0, kernels=args.kernels, level=args.level,
                          transport=args.transport, deterministic_reduce=False, split_lists="all_or_none")
    runtime = Runtime(config, {args.device: loader.resolve(args.kernels, args.device, args.level)})
    first, rows = dist.get_rank() == 0, []
    names = list(dict.fromkeys(args.op.split(","))) if args.op else list(specs())
    console = Console(width=max(190, Console().width))          # rather lines that wrap than columns without their numbers
    with contextlib.ExitStack() as stack:
        status = stack.enter_context(console.status("")) if first else None
        for name in names:
            for size in _sizes(args):
                for in_place in (False, True) if name in IN_PLACE else (False,):
                    if status:
                        status.update(f"{name} {size >> 10} KiB")
                    rows += measure(specs()[name], size, args, runtime, in_place)
    measured = {name: runtime.stats.sections[name]()[1] for name in ("switch", "switch_times")}
    runtime.close()
    wrong = torch.tensor([row["wrong"] for row in rows], device=args.device)
    dist.all_reduce(wrong)
    for row, total in zip(rows, wrong.tolist(), strict=True):
        row["wrong"] = total
    if first:
        console.print(_table(rows, args))
        for path, seen in slower(rows).items():
            console.print(f"{path}: {seen['rows']} rows, {seen['intervals']} slower than native by more than 3 % with 95 % confidence "
                          f"({seen['medians']} medians)")
        if args.json:
            settings = {"device": args.device, "choice": args.choice, "transport": args.transport, "iters": args.iters,
                        "calls": args.calls, "level": args.level, "kernels": runtime.kernels}
            write_json(args.json, {"settings": settings, "rows": rows, "slower": slower(rows), **measured},
                       command="ds_zipccl " + " ".join(argv))
            console.print(f"written to {args.json}")
    total = int(wrong.sum())
    if total and first:
        print(f"ds_zipccl: {total} elements are wrong", file=sys.stderr)
    return 1 if total else 0


def _table(rows: list[dict], args) -> Table:
    where = torch.cuda.get_device_name() if args.device == "cuda" else "CPU, gloo"
    title = f"ds_zipccl bench collectives: {rows[0]['ranks']} ranks, {where}, median of {args.iters} turns"
    table = Table(title=title, title_justify="left")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in ("op", "type", "place", "path", "decision") else "right", no_wrap=True)
    for row in rows:
        low, high = row["speedup_interval"]
        table.add_row(row["op"], str(row["bytes"]), str(row["count"]), row["dtype"], "in" if row["in_place"] else "out",
                      str(row["calls"]), row["impl"], f"{row['time_us']:.1f}", f"{row['algbw']:.2f}", f"{row['busbw']:.2f}",
                      str(row["wire_bytes"]), f"{row['ratio']:.3f}", f"{row['speedup']:.3f}", f"{low:.2f}-{high:.2f}", row["decision"],
                      str(row["wrong"]))
    return table
