"""How much slower a matrix product gets beside a collective, native or ours, and how long both take together.

    python benchmarks/interference.py --ranks 2 [--size 256M] [--sms 0,64,32] [--json FILE]

Per collective and way, on every rank: the products alone, the collectives alone, and both at once, products on one stream and collectives
on another; medians over --rounds, in turns. ``products_slower``: time of the products beside the collectives / alone. ``both``: time until
all is done / the longer of the two alone (1: perfectly hidden). Results of the collectives are compared with native's by bits first, those
of the products after every round. --sms: zipped, with all kernels of the codec on so many multiprocessors of each GPU (0: all), by streams
of a green context; NCCL's kernels are where they always are. --device cpu runs the same over gloo, to try the script: there nothing
runs beside anything.
"""
import argparse
import ctypes
import itertools
import statistics
import sys
import time

import torch
import torch.distributed as dist

from ds_zipccl.backend import front
from ds_zipccl.cli import ranks
from ds_zipccl.cli.bench_codec import parse_size
from ds_zipccl.cli.bench_collectives import count_wrong, make_call
from ds_zipccl.collectives.registry import specs
from ds_zipccl.collectives.runtime import Runtime
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.kernels import loader
from zipscape.machine import write_json

#: Way -> its setting ``transport``; native is none of ours.
WAYS = {"native": None, "zipped": "process_group", "one_sided": "symmetric_memory"}
OPS = "all_gather_into_tensor,reduce_scatter_tensor"
PRODUCTS_MS = 20.0          # about as long as the products of one round take


def parse(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=None, help="spawn so many here instead of using a launcher")
    parser.add_argument("--op", default=OPS)
    parser.add_argument("--ways", default=",".join(WAYS), help=f"of {', '.join(WAYS)}")
    parser.add_argument("--sms", default="0", help="multiprocessors for our kernels, a list of numbers (default 0: all)")
    parser.add_argument("--size", default="256M", help="of the whole tensor")
    parser.add_argument("--side", type=int, default=4096, help="of the square BF16 matrices (default 4096)")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", metavar="FILE")
    return parser.parse_args(argv)


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


def measure(spec, way: str, products: Products, args, device: torch.device, num_sms: int = 0) -> dict:
    runtime = None
    if way != "native":
        config = ZipcclConfig(enabled=True, collectives="always", min_bytes=0, transport=WAYS[way], split_lists="all_or_none")
        runtime = Runtime(config, {device.type: loader.resolve("best", device.type)})
    call = make_call(spec, parse_size(args.size), torch.bfloat16, device, False)
    side = torch.cuda.Stream(device) if device.type == "cuda" else None
    if num_sms and runtime and side:
        (side, decode), num_sms = limited_streams(num_sms, device, 2)
        runtime.state(call.group, device).decode_stream = decode

    def one():
        work = front.run(runtime, call) if runtime else None
        return spec.native(call) if work is None else work

    def to_its_end() -> None:
        if side:
            side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):               # no stream, no effect
            one().wait()
        _settle(device)

    wrong = 0 if way == "native" else count_wrong(spec, call, to_its_end)
    for _ in range(3):
        to_its_end()
    start = time.perf_counter()
    for _ in range(3):
        to_its_end()
    count = max(2, round(PRODUCTS_MS / _agreed((time.perf_counter() - start) / 3 * 1e3, device)))

    def collectives() -> None:
        with torch.cuda.stream(side):
            for work in [one() for _ in range(count)]:
                work.wait()

    def together(with_products: bool, with_collectives: bool) -> tuple[float, float]:
        """Milliseconds until the products are done, and until all is."""
        dist.barrier()
        _settle(device)
        start, took = time.perf_counter(), _clock(device)
        if with_products:
            products.queue()
        first = took()
        if with_collectives:
            collectives()
        _settle(device)
        return first(), (time.perf_counter() - start) * 1e3

    times = {"products": [], "collectives": [], "beside": [], "both": []}
    for turn in range(args.rounds + 1):
        alone, _ = together(True, False)
        _, coll = together(False, True)
        beside, both = together(True, True)
        products.check()
        if turn:
            for name, value in zip(times, (alone, coll, beside, both), strict=True):
                times[name].append(_agreed(value, device))
    found = {name: statistics.median(values) for name, values in times.items()}
    row = {"op": spec.name, "impl": way, "sms": num_sms, "bytes": parse_size(args.size), "ranks": dist.get_world_size(),
           "wrong": int(_agreed(wrong, device)), "num_products": products.count, "num_collectives": count,
           **{f"{name}_ms": value for name, value in found.items()},
           "products_slower": found["beside"] / found["products"],
           "both": found["both"] / max(found["products"], found["collectives"])}
    if runtime:
        stats = runtime.stats.snapshot()[spec.name]
        row |= {name: stats[name] for name in ("calls_zipped", "calls_one_sided", "calls_native")}
        runtime.close()
    return row


def bench(args, argv: list[str]) -> int:
    device = torch.device(args.device, torch.cuda.current_device() if args.device == "cuda" else None)
    products, rows = Products(args.side, device), []
    products.count = int(_agreed(products.count, device))
    limits = [int(text) for text in args.sms.split(",")]
    whole = itertools.product(args.op.split(","), args.ways.split(","), [0] if 0 in limits else [])
    limited = itertools.product(args.op.split(","), ["zipped"] if "zipped" in args.ways.split(",") else [], [n for n in limits if n])
    for op, way, num_sms in (*whole, *limited):     # kernels of the one-sided way wait for each other, and count on room for all
        rows.append(measure(specs()[op], way, products, args, device, num_sms))
        if dist.get_rank() == 0:
            print("  ".join(f"{name} {round(value, 3) if isinstance(value, float) else value}" for name, value in rows[-1].items()),
                  flush=True)
            if args.json:
                write_json(args.json, {"rows": rows}, command="python benchmarks/interference.py " + " ".join(argv))
    return 1 if any(row["wrong"] for row in rows) else 0


def main(argv=None) -> int:
    args = parse(argv)
    return ranks.run(bench, args.ranks, args.device, args, sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    sys.exit(main())
