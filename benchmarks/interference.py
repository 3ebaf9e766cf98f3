"""How much slower a matrix product gets beside a collective, native or ours, and how long both take together.

    python benchmarks/interference.py --ranks 2 [--size 256M] [--sms 0,64,32] [--json FILE]
    python benchmarks/interference.py --ranks 1 --ways copies,kernels --sms 0,64,32             # the kernels alone, on one GPU

Per collective and way, on every rank: the products alone, the collectives alone, and both at once, products on one stream and collectives
on another; medians over --rounds, in turns. ``products_slower``: time of the products beside the collectives / alone. ``both``: time until
all is done / the longer of the two alone (1: perfectly hidden). ``serial``: the same / both alone, one after the other (1: nothing is
gained). Results of the collectives are compared with native's by bits first, those of the products after every round.

Ways: ``native``, ``zipped``, ``one_sided`` are collectives. ``kernels``: what one of two ranks computes for such a call, without any
transfer. ``copies``: as many plain copies of its part as there are kernels, so a little more traffic in memory (4 bytes for 3.4).

--sms: ``zipped`` and ``kernels``, with all kernels of the codec on so many multiprocessors of each GPU (0: all), by streams of a green
context; NCCL's kernels are where they always are. --device cpu runs the same over gloo, to try the script: there nothing runs beside
anything.
"""
import argparse
import ctypes
import itertools
import statistics
import sys
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist

from ds_zipccl.backend import front
from ds_zipccl.cli import ranks
from ds_zipccl.cli.bench_codec import parse_size
from ds_zipccl.cli.bench_collectives import count_wrong, make_call
from ds_zipccl.codec.codec import Codec, split_status
from ds_zipccl.collectives.registry import specs
from ds_zipccl.collectives.runtime import Runtime
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.kernels import loader
from ds_zipccl.kernels.rank_order import sum_in_order
from zipscape.machine import write_json

#: Way -> its setting ``transport``; the others are none of ours.
TRANSPORTS = {"zipped": "process_group", "one_sided": "symmetric_memory"}
WAYS = ("native", "zipped", "one_sided", "kernels", "copies")
LIMITED = ("zipped", "kernels")         # those that wait for each other count on room for all
OPS = "all_gather_into_tensor,reduce_scatter_tensor"
PRODUCTS_MS = 20.0          # about as long as the products of one round take


def parse(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=None, help="spawn so many here instead of using a launcher")
    parser.add_argument("--op", default=OPS)
    parser.add_argument("--ways", default="native,zipped,one_sided", help=f"of {', '.join(WAYS)} (default: the collectives)")
    parser.add_argument("--sms", default="0", help="multiprocessors for our kernels, a list of numbers (default 0: all)")
    parser.add_argument("--size", default="256M", help="of the whole tensor")
    parser.add_argument("--side", type=int, default=4096, help="of the square BF16 matrices (default 4096)")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args(argv)
    if unknown := [way for way in args.ways.split(",") if way not in WAYS]:
        parser.error(f"--ways {','.join(unknown)}: expected of {', '.join(WAYS)}")
    if not list(_rows(args)):
        parser.error(f"--ways {args.ways} --sms {args.sms}: nothing to measure; limits are for {' and '.join(LIMITED)}, 0 is none")
    return args


def _rows(args) -> Iterator[tuple[str, str, int]]:
    """(op, way, multiprocessors) of each, in order."""
    ops, ways, limits = args.op.split(","), args.ways.split(","), [int(text) for text in args.sms.split(",")]
    yield from itertools.product(ops, ways, [0] if 0 in limits else [])
    yield from itertools.product(ops, [way for way in ways if way in LIMITED], [n for n in limits if n])


class Products:
    """``count`` matrix products in a row, which take about PRODUCTS_MS."""

    def __init__(self, side: int, device: torch.device):
        generator = torch.Generator(device).manual_seed(1)
        self._left, self._right = (torch.randn(side, side, generator=generator, device=device).bfloat16() for _ in range(2))
        self._out, self.count = torch.empty_like(self._left), 1
        self._run()
        self._expected = self._out.clone()
        start = time.perf_counter()
        for _ in range(3):
            self._run()
        _settle(device)
        self.count = max(2, round(PRODUCTS_MS / ((time.perf_counter() - start) / 3 * 1e3)))

    def _run(self) -> None:
        torch.mm(self._left, self._right, out=self._out)

    def queue(self) -> None:
        for _ in range(self.count):
            self._run()

    def check(self) -> None:
        assert torch.equal(self._out, self._expected), "a matrix product beside a collective has another result"


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _clock(device: torch.device):
    """Milliseconds, on this stream of a GPU, from here to where the returned function is called: that one returns another, which says them
    when all is done."""
    if device.type == "cpu":
        start = time.perf_counter()

        def stop():
            took = (time.perf_counter() - start) * 1e3
            return lambda: took
        return stop
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    marks[0].record()

    def stop_later():
        marks[1].record()
        return lambda: marks[0].elapsed_time(marks[1])
    return stop_later


def _agreed(value: float, device: torch.device) -> float:
    """The largest of all ranks."""
    word = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(word, op=dist.ReduceOp.MAX)
    return word.item()


def limited_streams(num_sms: int, device: torch.device, count: int) -> tuple[list[torch.cuda.Stream], int]:
    """Streams whose kernels run on about ``num_sms`` multiprocessors of the GPU, and on how many they do. Of the driver's green contexts,
    which live as long as the process. Raises RuntimeError where it has none."""
    cuda, number, groups = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.c_uint(1)
    whole, part, rest = (ctypes.create_string_buffer(1024) for _ in range(3))               # CUdevResource
    description, context = ctypes.c_void_p(), ctypes.c_void_p()

    def call(name: str, *arguments) -> None:
        code = getattr(cuda, name)(*arguments)
        if code:
            raise RuntimeError(f"{name}: CUresult {code}")

    call("cuDeviceGet", ctypes.byref(number), device.index)
    call("cuDeviceGetDevResource", number, whole, 1)                                        # CU_DEV_RESOURCE_TYPE_SM
    call("cuDevSmResourceSplitByCount", part, ctypes.byref(groups), whole, rest, 0, ctypes.c_uint(num_sms))
    call("cuDevResourceGenerateDesc", ctypes.byref(description), part, 1)
    call("cuGreenCtxCreate", ctypes.byref(context), description, number, 1)                 # CU_GREEN_CTX_DEFAULT_STREAM
    handles = [ctypes.c_void_p() for _ in range(count)]
    for handle in handles:
        call("cuGreenCtxStreamCreate", ctypes.byref(handle), context, 1, 0)                 # CU_STREAM_NON_BLOCKING
    kept = int.from_bytes(part.raw[96:100], "little")                                       # its smCount
    return [torch.cuda.ExternalStream(handle.value, device=device) for handle in handles], kept


class Collectives:
    """One collective again and again."""

    def __init__(self, op: str, way: str, args, device: torch.device, num_sms: int):
        self._spec, self._runtime, self.num_sms = specs()[op], None, 0
        if way in TRANSPORTS:
            config = ZipcclConfig(enabled=True, collectives="always", min_bytes=0, transport=TRANSPORTS[way], split_lists="all_or_none")
            self._runtime = Runtime(config, {device.type: loader.resolve("best", device.type)})
        self._call = make_call(self._spec, parse_size(args.size), torch.bfloat16, device, False)
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        if num_sms and self._runtime and self.stream:
            (self.stream, decode), self.num_sms = limited_streams(num_sms, device, 2)
            self._runtime.state(self._call.group, device).decode_stream = decode

    def launch(self):
        work = front.run(self._runtime, self._call) if self._runtime else None
        return self._spec.native(self._call) if work is None else work

    def wrong(self, to_its_end) -> int:
        return count_wrong(self._spec, self._call, to_its_end) if self._runtime else 0

    def end(self) -> dict:
        """What a row has of it."""
        if self._runtime is None:
            return {}
        stats = self._runtime.stats.snapshot()[self._spec.name]
        self._runtime.close()
        return {name: stats[name] for name in ("calls_zipped", "calls_one_sided", "calls_native")}


class Kernels:
    """What one of two ranks computes in a call: it encodes the half that it sends, and decodes the half that comes, or adds it."""

    def __init__(self, op: str, way: str, args, device: torch.device, num_sms: int):
        self._adds, self.num_sms = op == "reduce_scatter_tensor", 0
        if not self._adds and op != "all_gather_into_tensor":
            raise SystemExit(f"--ways {way}: --op {op} is not known to it, only {OPS}")
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        if num_sms and self.stream:
            (self.stream,), self.num_sms = limited_streams(num_sms, device, 1)
        numel = parse_size(args.size) // 4
        self._rows = (0.02 * torch.randn(2, numel, generator=torch.Generator(device).manual_seed(7), device=device)).bfloat16()
        self._codec = Codec.of(torch.bfloat16, numel, device.type)
        self._out, self._frames = torch.empty_like(self._rows[0]), self._codec.empty_frames(2, device)
        self._status = torch.zeros(1, dtype=torch.int32, device=device)

    def launch(self) -> "Kernels":
        self._codec.encode(self._rows, self._frames, self._status, 0)
        if self._adds:
            self._codec.decode_reduce(self._frames, self._rows[0], 0, self._out)
        else:
            self._codec.decode(self._frames[1:], self._out.view(1, -1))
        return self

    def wait(self) -> None:
        pass                                # as a collective's work on a GPU: in stream order

    def _expected(self) -> torch.Tensor:
        if not self._adds:
            return self._rows[1]
        total = torch.empty_like(self._out)
        sum_in_order(self._rows, total)
        return total

    def wrong(self, to_its_end) -> int:
        self._out.fill_(1.5)
        to_its_end()
        overflowed, _ = split_status(self._status.item())
        return int((self._out.view(torch.int16) != self._expected().view(torch.int16)).sum()) + overflowed

    def end(self) -> dict:
        return {}


class Copies(Kernels):
    """Two plain copies of a half instead."""

    def launch(self) -> "Copies":
        for row in self._rows:
            self._out.copy_(row)
        return self

    def _expected(self) -> torch.Tensor:
        return self._rows[1]


#: Way -> what it is, of those that talk to nobody.
ALONE = {"kernels": Kernels, "copies": Copies}


def measure(op: str, way: str, products: Products, args, device: torch.device, num_sms: int = 0) -> dict:
    load = ALONE.get(way, Collectives)(op, way, args, device, num_sms)

    def to_its_end() -> None:
        if load.stream:
            load.stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(load.stream):        # no stream, no effect
            load.launch().wait()
        _settle(device)

    wrong = load.wrong(to_its_end)
    for _ in range(3):
        to_its_end()
    start = time.perf_counter()
    for _ in range(3):
        to_its_end()
    count = max(2, round(PRODUCTS_MS / _agreed((time.perf_counter() - start) / 3 * 1e3, device)))

    def queue_load() -> None:
        with torch.cuda.stream(load.stream):
            for work in [load.launch() for _ in range(count)]:
                work.wait()

    def together(with_products: bool, with_load: bool) -> tuple[float, float]:
        """Milliseconds until the products are done, and until all is."""
        dist.barrier()
        _settle(device)
        start, took = time.perf_counter(), _clock(device)
        if with_products:
            products.queue()
        first = took()
        if with_load:
            queue_load()
        _settle(device)
        return first(), (time.perf_counter() - start) * 1e3

    times = {"products": [], "collectives": [], "beside": [], "both": []}
    for turn in range(args.rounds + 1):
        alone, _ = together(True, False)
        _, others = together(False, True)
        beside, both = together(True, True)
        products.check()
        if turn:
            for name, value in zip(times, (alone, others, beside, both), strict=True):
                times[name].append(_agreed(value, device))
    found = {name: statistics.median(values) for name, values in times.items()}
    return {"op": op, "impl": way, "sms": load.num_sms, "bytes": parse_size(args.size), "ranks": dist.get_world_size(),
            "wrong": int(_agreed(wrong, device)), "num_products": products.count, "num_collectives": count,
            **{f"{name}_ms": value for name, value in found.items()},
            "products_slower": found["beside"] / found["products"],
            "both": found["both"] / max(found["products"], found["collectives"]),
            "serial": found["both"] / (found["products"] + found["collectives"]), **load.end()}


def bench(args, argv: list[str]) -> int:
    device = torch.device(args.device, torch.cuda.current_device() if args.device == "cuda" else None)
    products, rows = Products(args.side, device), []
    products.count = int(_agreed(products.count, device))
    for op, way, num_sms in _rows(args):
        rows.append(measure(op, way, products, args, device, num_sms))
        if dist.get_rank() == 0:
            print("  ".join(f"{name} {round(value, 3) if isinstance(value, float) else value}" for name, value in rows[-1].items()),
                  flush=True)
            if args.json:
                write_json(args.json, {"rows": rows}, command="python benchmarks/interference.py " + " ".join(argv))
    return 1 if any(row["wrong"] for row in rows) else 0


def main(argv=None) -> int:
    args, words = parse(argv), sys.argv[1:] if argv is None else argv
    if args.ranks == 1 and not {*args.ways.split(",")} - ALONE.keys():
        dist.init_process_group("nccl" if args.device == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            return bench(args, words)
        finally:
            dist.destroy_process_group()
    return ranks.run(bench, args.ranks, args.device, args, words)


if __name__ == "__main__":
    sys.exit(main())
