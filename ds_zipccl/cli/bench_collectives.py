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

from ds_zipccl.backend import front
from ds_zipccl.cli import collectives_table, ranks
from ds_zipccl.cli.bench_codec import DTYPES, parse_size
from ds_zipccl.cli.collective_rivals import RIVALS, Rival, rivals
from ds_zipccl.collectives.registry import Call, CollectiveSpec, specs
from ds_zipccl.collectives.runtime import Runtime
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.kernels import loader
from ds_zipccl.stats import difference
from zipscape.errors import ZipScapeError, describe
from zipscape.machine import describe_machine, write_json

HELP = "collectives: native against zipped, with the columns of nccl-tests"
DESCRIPTION = """Every collective at every size: native, native once more (its speedup is the noise), ours by each --choice and --rivals,
in turns. size: bytes of the whole tensor, as nccl-tests counts them; count: its elements; calls: so many back to back, of which the time is
one's; algbw = size / time; busbw = algbw x the collective's factor; both on raw bytes. wire: what a rank sends (the largest of all ranks);
ratio = raw / wire. speedup: the median of native time / this time over the turns, with the interval that holds the true median with 95 %
(fewer than 6 turns: all of them). A row is slower only if all of that lies below 0.97; the medians below it are counted beside, and both
for native once more. #wrong: elements that differ from native's on inputs that sum exactly in any order, and, where nothing is summed or 2
ranks sum, on Gaussians. Exit status 1 if any does."""
LEAST = 0.97                             # of native's speed, is promised under ``adaptive``
WARM_TURNS, LEAST_TURNS = 2, 5           # before those that count; that count, where --seconds would have fewer
CHOICES = "always", "adaptive"
BITS = {2: torch.int16, 4: torch.int32}
IN_PLACE = ("all_gather_into_tensor", "reduce_scatter_tensor")          # both ways exist; others have one


def add_arguments(parser) -> None:
    parser.add_argument("--op", metavar="LIST", default=None, help="of " + ", ".join(specs()) + " (default: all)")
    parser.add_argument("-b", "--begin", metavar="SIZE", default="1M", help="smallest size in bytes, with K, M or G (default 1M)")
    parser.add_argument("-e", "--end", metavar="SIZE", default="16M", help="largest size (default 16M)")
    parser.add_argument("-f", "--factor", type=int, default=4, help="from one size to the next (default 4)")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bf16")
    parser.add_argument("--choice", metavar="LIST", default="always", help="always: ours is zipped whenever eligible; adaptive: the switch "
                        "decides; adaptive,always: both in the same turns")
    parser.add_argument("--transport", choices=("process_group", "symmetric_memory", "adaptive"), default="process_group",
                        help="symmetric_memory: ours goes one-sided where it can (decision says one-sided); adaptive: where that is faster")
    parser.add_argument("--rivals", metavar="LIST", default="", help="beside them: " + "; ".join(f"{k}: {v}" for k, v in RIVALS.items()))
    parser.add_argument("--place", choices=("both", "in", "out"), default="both", help="of collectives with both forms")
    parser.add_argument("--iters", type=int, default=11, help="turns (default 11)")
    parser.add_argument("--seconds", type=float, default=None, help=f"for the turns of a call: where --iters take longer there are fewer, "
                        f"but {LEAST_TURNS}, and several calls are left out where {LEAST_TURNS} take longer")
    parser.add_argument("--limit", type=float, default=None, metavar="SECONDS", help="begin no further call of a size after so long; sizes "
                        "come in ascending order")
    parser.add_argument("--calls", metavar="LIST", default="1", help="time so many calls back to back, as behind a computation; times are "
                        "of one (default 1: each waits for its own launch; 1,8: rows of both)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--kernels", choices=("best", *loader.NAMES), default="best")
    parser.add_argument("--level", type=int, choices=(1, 2), default=1, help="compression level (default 1)")
    parser.add_argument("--ranks", type=int, default=None, metavar="N", help="spawn N ranks here instead of using a launcher")
    parser.add_argument("--json", metavar="FILE", help="rank 0 also writes the rows here, after each size")
    parser.add_argument("--markdown", metavar="FILE", help="the same as a table, a line for each call")


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
    for name, allowed, given in (("--choice", CHOICES, args.choice), ("--rivals", tuple(RIVALS), args.rivals or "sum")):
        if not set(given.split(",")) <= set(allowed):
            raise ZipScapeError(describe(name, got=given, expected=f"a list of {', '.join(allowed)}"))
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
    return _counts_wrong(spec, call, {"ours": ours})["ours"]


def _counts_wrong(spec: CollectiveSpec, call: Call, functions: dict) -> dict[str, int]:
    """The same of several functions, each for itself."""
    saved, bits, wrong = _copies(call.inputs), BITS[call.dtype.itemsize], {}
    _wait([spec.native(call)], call.device)
    expected = _copies(call.outputs)
    for path, function in functions.items():
        for t in call.outputs:
            if not any(t.data_ptr() == s.data_ptr() for s in call.inputs):
                t.fill_(1.5)
        _restore(call.inputs, saved)
        function()
        wrong[path] = sum(int((got.contiguous().view(bits) != want.contiguous().view(bits)).sum())
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


def _times(paths: dict, call: Call, iters: int, num_calls: int, seconds: float | None = None) -> dict[str, list[float]]:
    """Microseconds of one of the ``num_calls`` of a function on the slowest rank, per path and turn; the inputs are put back before each
    turn (all_reduce is in place). In an order of its own each turn: what ran just before is in the caches. ``iters`` turns, or what of them
    fits into ``seconds``, but LEAST_TURNS."""
    saved, times, turn, last = _copies(call.inputs), {path: [] for path in paths}, 0, iters + WARM_TURNS
    while turn < last:
        began = 0.0 if seconds is None else time.perf_counter()
        for path, function in random.Random(turn).sample(list(paths.items()), len(paths)):
            _restore(call.inputs, saved)
            dist.barrier()
            if call.device.type == "cuda":
                torch.cuda.synchronize(call.device)
            start = time.perf_counter()
            function()
            if turn >= WARM_TURNS:
                times[path].append((time.perf_counter() - start) * 1e6 / num_calls)
        if seconds is not None and turn == WARM_TURNS - 1:
            last = WARM_TURNS + _fitting(iters, seconds, time.perf_counter() - began, call.device)
        turn += 1
    slowest = torch.tensor(list(times.values()), dtype=torch.float64, device=call.device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return dict(zip(times, slowest.tolist(), strict=True))


def _fitting(iters: int, seconds: float, turn: float, device: torch.device) -> int:
    """Turns, of which one takes ``turn`` seconds: the same number on every rank."""
    slowest = torch.tensor([turn], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return min(iters, max(LEAST_TURNS, int(seconds / max(slowest.item(), 1e-9))))


def measure(spec: CollectiveSpec, size: int, args, runtimes: dict[str, Runtime], in_place: bool) -> list[dict]:
    """The rows of one collective at one size, for each number of calls back to back: native, native again, ours by each of ``runtimes``,
    whose keys name them, and the rivals."""
    device, dtype = torch.device(args.device, torch.cuda.current_device() if args.device == "cuda" else None), DTYPES[args.dtype]
    call = make_call(spec, size, dtype, device, in_place)
    others = rivals(args.rivals.split(","), call, in_place, list(runtimes.values())[-1], spec.raw_bytes(call))

    def native(num_calls: int) -> None:
        _wait([spec.native(call) for _ in range(num_calls)], device)

    def ours(runtime: Runtime, num_calls: int = 1) -> None:
        _wait([front.run(runtime, call, spec.native) for _ in range(num_calls)], device)

    def by_rival(rival: Rival, num_calls: int = 1, collects: bool = False) -> None:
        for _ in range(num_calls):
            rival.run()
        if collects:
            rival.collect()
        _wait((), device)

    mine = {path: functools.partial(ours, runtime) for path, runtime in runtimes.items()}
    theirs = {path: functools.partial(by_rival, rival) for path, rival in others.items()}
    wrong = _verified(spec, call, mine | {path: functools.partial(run, collects=True) for path, run in theirs.items()}, others)
    rows, alone = [], 0.0
    for num_calls in map(int, args.calls.split(",")):
        if args.seconds is not None and num_calls > 1 and alone * num_calls * LEAST_TURNS > args.seconds:
            continue
        for run in mine.values():
            for _ in range(3):
                run(num_calls)                      # capacities and the switch settle
        before = {path: runtime.stats.snapshot()[spec.name] for path, runtime in runtimes.items()}
        paths = {path: functools.partial(run, num_calls) for path, run in
                 ({"native": native, "native again": native} | mine | theirs).items()}
        times = _times(paths, call, args.iters, num_calls, args.seconds)
        alone = alone or sum(map(statistics.median, times.values())) / 1e6
        seen = {path: difference(runtime.stats.snapshot()[spec.name], before[path]) for path, runtime in runtimes.items()}
        rows += [row | {"calls": num_calls, "in_place": in_place} for row in _rows(spec, call, args, times, seen, wrong, others)]
    return rows


def _verified(spec: CollectiveSpec, call: Call, functions: dict, others: dict[str, Rival]) -> dict[str, int]:
    """Wrong elements by path, on inputs that sum exactly and, where no order makes another sum, on the Gaussians that stay."""
    for rival in others.values():
        rival.prepare()
    wrong = _counts_wrong(spec, call, functions)
    _gaussian(call)
    for rival in others.values():
        rival.prepare()
    if not spec.reduces or call.world_size == 2:
        for path, number in _counts_wrong(spec, call, functions).items():
            wrong[path] += number
    return wrong


def _rows(spec: CollectiveSpec, call: Call, args, times: dict[str, list[float]], seen: dict[str, dict], wrong: dict[str, int],
          others: dict[str, Rival]) -> list[dict]:
    """``times``: by path and turn. ``seen``: what was counted of ours, by path; ``wrong``: elements."""
    whole, factor, rows = spec.whole_numel(call), spec.bus_factor(call.world_size), []
    for path, path_times in times.items():
        raw_bytes, wire, decision, transport = _sent(spec, call, seen.get(path), others.get(path))
        time_us, speedups = statistics.median(path_times), [a / b for a, b in zip(times["native"], path_times, strict=True)]
        algbw = whole * call.dtype.itemsize / time_us / 1e3
        rows.append({"op": spec.name, "impl": path, "dtype": args.dtype, "dist": "normal", "bytes": whole * call.dtype.itemsize,
                     "count": whole, "ranks": call.world_size, "transport": transport,
                     "path": "zipped" if decision in ("zipped", "one-sided") else "rival" if path in others else "native",
                     "turns": len(path_times), "time_us": time_us, "algbw": algbw, "busbw": algbw * factor, "wire_bytes": wire,
                     "ratio": raw_bytes / max(wire, 1), "speedup": statistics.median(speedups),
                     "speedup_interval": median_interval(speedups), "decision": decision,
                     "overflows": seen[path]["overflows"] if path in seen else 0, "wrong": wrong.get(path, 0)})
    return rows


def _sent(spec: CollectiveSpec, call: Call, seen: dict | None, rival: Rival | None) -> tuple[int, int, str, str]:
    """(raw bytes of a call, bytes sent, how ours went or why natively, transport). ``seen``: what was counted, None: not ours."""
    if seen is None:
        raw, wire, decision, transport = spec.raw_bytes(call), spec.raw_bytes(call), "", "process_group"
        if rival is not None:
            wire, transport = rival.wire_bytes, rival.transport
    else:
        calls, reasons = seen["calls_zipped"] + seen["calls_native"], seen["native_reasons"]
        raw, wire = seen["raw_bytes"] // calls, seen["wire_bytes"] // calls
        one_sided = seen["calls_one_sided"] > 0
        decision = "one-sided" if one_sided else "zipped" if seen["calls_zipped"] else max(reasons, key=reasons.get, default="")
        transport = "symmetric_memory" if one_sided else "process_group"
    most = torch.tensor([raw, wire], device=call.device)        # of all ranks: a broadcast is sent by one
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return *most.tolist(), decision, transport


def slower(rows: list[dict]) -> dict[str, dict[str, int]]:
    """Of how many rows the whole interval lies below LEAST, and of how many the median, by path: native against itself is the noise."""
    seen = {}
    for path in dict.fromkeys(("native again", *(row["impl"] for row in rows if row["impl"].startswith("ours")))):
        mine = [row for row in rows if row["impl"] == path]
        seen[path] = {"rows": len(mine), "intervals": sum(row["speedup_interval"][1] < LEAST for row in mine),
                      "medians": sum(row["speedup"] < LEAST for row in mine)}
    return seen


def _calls_of(args) -> list[tuple[int, str, bool]]:
    """(size, collective, in place), in the order in which they are measured: small ones first."""
    names = list(dict.fromkeys(args.op.split(","))) if args.op else list(specs())
    places = {"both": (False, True), "in": (True,), "out": (False,)}[args.place]
    return [(size, name, in_place) for size in _sizes(args) for name in names
            for in_place in (places if name in IN_PLACE else (False,))]


def _is_late(args, start: float) -> bool:
    """On any rank."""
    if args.limit is None:
        return False
    late = torch.tensor([int(time.monotonic() - start > args.limit)], device=args.device)
    dist.all_reduce(late, op=dist.ReduceOp.MAX)
    return bool(late.item())


def _bench(args, argv: list[str]) -> int:
    start, runtimes, choices = time.monotonic(), {}, args.choice.split(",")
    for choice in choices:
        config = ZipcclConfig(enabled=True, collectives=choice, min_bytes=0, kernels=args.kernels, level=args.level,
                              transport=args.transport, deterministic_reduce=False, split_lists="all_or_none")
        runtimes["ours" if len(choices) == 1 else f"ours, {choice}"] = Runtime(
            config, {args.device: loader.resolve(args.kernels, args.device, args.level)})
    first, rows, left_out, command = dist.get_rank() == 0, [], [], "ds_zipccl " + " ".join(argv)
    kernels, calls = next(iter(runtimes.values())).kernels, _calls_of(args)
    settings = {"device": args.device, "choice": args.choice, "transport": args.transport, "iters": args.iters, "seconds": args.seconds,
                "calls": args.calls, "level": args.level, "kernels": kernels, "rivals": args.rivals}
    order = list(dict.fromkeys(name for _, name, _ in calls))
    console = Console(width=max(190, Console().width))          # rather lines that wrap than columns without their numbers
    with contextlib.ExitStack() as stack:
        status = stack.enter_context(console.status("")) if first else None
        for i, (size, name, in_place) in enumerate(calls):
            if _is_late(args, start):
                left_out = [f"{name} of {size >> 10} KiB{' in place' if in_place else ''}" for size, name, in_place in calls[i:]]
                break
            if status:
                status.update(f"{name} {size >> 10} KiB")
            rows += measure(specs()[name], size, args, runtimes, in_place)
            if first and args.json and (i + 1 == len(calls) or calls[i + 1][0] != size):
                write_json(args.json, {"settings": settings, "rows": rows}, command=command)
    rows.sort(key=lambda row: order.index(row["op"]))
    measured = {name: {choice: runtime.stats.sections[name]()[1] for choice, runtime in zip(choices, runtimes.values(), strict=True)}
                for name in ("switch", "switch_times")}
    for runtime in runtimes.values():
        runtime.close()
    wrong = torch.tensor([row["wrong"] for row in rows], device=args.device)
    dist.all_reduce(wrong)
    for row, total in zip(rows, wrong.tolist(), strict=True):
        row["wrong"] = total
    total = sum(wrong.tolist())
    if first:
        document = {"settings": settings, "rows": rows, "slower": slower(rows), "left_out": left_out, **measured}
        _report(args, console, rows, document, command)
    if total and first:
        print(f"ds_zipccl: {total} elements are wrong", file=sys.stderr)
    return 1 if total else 0


def _report(args, console: Console, rows: list[dict], document: dict, command: str) -> None:
    if rows:
        console.print(collectives_table.console_table(rows, args.device))
    notes = [f"{path}: {seen['rows']} rows, {seen['intervals']} slower than native by more than 3 % with 95 % confidence "
             f"({seen['medians']} medians)" for path, seen in document["slower"].items()]
    if document["left_out"]:
        notes.append(f"left out, their time was over: {', '.join(document['left_out'])}")
    for note in notes:
        console.print(note)
    if args.json:
        write_json(args.json, document, command=command)
        console.print(f"written to {args.json}")
    if args.markdown and rows:
        notes.append(f"{sum(row['wrong'] for row in rows)} wrong elements")
        collectives_table.write_markdown(args.markdown, rows, describe_machine(command), [f"- {note}" for note in notes])
        console.print(f"written to {args.markdown}")
