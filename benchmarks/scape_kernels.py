"""SCAPE's kernels against plain torch and against what memory allows.

    python benchmarks/scape_kernels.py [--device cpu|cuda] [--numel 16M] [--density 0.1,0.01] [--json FILE]

One partition of ``numel`` elements, cut into tensors as a GPT's are. Every result is compared with the reference's in the same run, bit by
bit. "floor" is the time in which a copy (measured here, same size and threads) moves the bytes that must move: every tensor read or written
once; of those that are looked at in few places, the memory lines these lie in. "select, again": with what the choice of a step before left
behind (hints), of residuals that a gradient has entered since. "owner pass" is this and owner_step together, beside a dense step.
"""
import argparse
import functools
import statistics
import sys
import time

import torch

from ds_scape.kernels import impl_reference as reference
from ds_scape.kernels import loader, ops
from ds_scape.sync.partition import TensorSlot, flat_layout
from ds_scape.update import tables
from zipscape.errors import ConfigError, ZipScapeError, describe
from zipscape.machine import write_json

FP32, BF16 = torch.float32, torch.bfloat16
LAYERS, MAX_AGE_FACTOR = 24, 4
INT = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def size_of(text: str) -> int:
    return int(float(text[:-1]) * {"K": 1e3, "M": 1e6, "G": 1e9}[text[-1]]) if text[-1] in "KMG" else int(text)


def slots_of(numel: int) -> list[TensorSlot]:
    """An embedding, then layers of four matrices and four vectors. Raises ConfigError where they do not fit."""
    layer = ((0.2499, 2), (0.0001, 1), (0.0832, 2), (0.0001, 1), (0.3331, 2), (0.0003, 1), (0.3332, 2), (0.0001, 1))
    parts = [(0.15, 2)] + LAYERS * [(share * 0.85 / LAYERS, dims) for share, dims in layer]
    slots, offset = [], 0
    for share, dims in parts:
        size = max(1, int(share * numel))
        slots.append(TensorSlot(offset, size, dims))
        offset += size
    if offset > numel:
        raise ConfigError(describe("--numel", got=f"{numel}, of which the tensors of {LAYERS} layers would take {offset}",
                                   expected="209K or more"))
    return slots


@functools.cache
def segments_of(numel: int, density: float):
    return flat_layout(slots_of(numel), numel, 1, density).segments[0]


def check_arguments(args) -> None:
    """Before anything is made or measured. Raises ZipScapeError."""
    for numel in args.numel:
        slots_of(numel)
    for density in args.density:
        if not 0 < density <= 1:
            raise ConfigError(describe("--density", got=density, expected="a number above 0, at most 1"))
    for name in args.impl or ():
        loader.choose(name, args.device)


class Data:
    """Tensors of one size and density, on one device, made once; the state like in a run: normal gradients of many scales."""

    def __init__(self, numel: int, density: float, device: str):
        self.numel, self.density, self.device = numel, density, device
        generator = torch.Generator(device).manual_seed(1)

        def normal(scale=1e-3, num=numel):
            return torch.randn(num, generator=generator, device=device) * scale

        scale = torch.exp(0.7 * normal(1.0))
        self.residual, self.square = normal() * scale, (1e-3 * scale) ** 2
        self.gradient = normal(1e-3) * scale
        self.gradient_bf16 = self.gradient.to(BF16)
        self.later, self.is_later, self.hints = self.residual + density ** 0.5 * self.gradient, False, {}      # one step of 1 / density
        self.weight, self.momentum = normal(0.02), normal(1e-4)
        del scale
        self.max_age = int(MAX_AGE_FACTOR / density)
        ages = torch.rand(numel, generator=generator, device=device)
        self.last_sync = (1000 - (-ages.log() / density).clamp(max=self.max_age + 2)).to(torch.int16)
        self.last_step = torch.full_like(self.last_sync, 1000)          # as after a step without masks
        del ages
        self.segments = segments_of(numel, density)
        self.dense = tuple((s.start, s.stop) for s in self.segments if s.is_dense)
        best = loader.choose("best", device)        # whose results are compared with the reference's below
        self.chosen = best.select(self.residual, self.square, self.last_sync, 1000, self.max_age, self.segments)
        self.index = self.chosen.nonzero().view(-1).to(reference.position_dtype((numel,)))
        self.k = len(self.index)
        self.max_ones = sum(s.num_sent for s in self.segments if not s.is_dense)
        self.encoding = "bits" if -(-numel // 8) < reference.index_bytes(numel, self.max_ones) else "indices"
        self.values = torch.empty(self.k, dtype=BF16, device=device)
        self.mean = normal(1e-3, self.k)
        self.copies = self.weight.to(BF16)
        self.message = best.pack_mask(self.chosen, self.dense, self.encoding, self.max_ones)
        self.tables = tables.age_tables(self.max_age, 0.9, dtype=FP32, device=device)
        decay = tables.initial_decay(2 * self.max_age)
        for _ in range(3 * self.max_age):
            decay = tables.advance_decay(decay, 1 - 1e-4)
        self.decay = decay.to(device, FP32)

    def turn(self):
        """Another step's residuals are chosen among."""
        self.is_later = not self.is_later


class Op:
    """call(kernels, data) runs it and returns what it returns; bytes(data): what must move; changes: fields of the data that it writes."""

    def __init__(self, name, call, num_bytes, changes=()):
        self.name, self.call, self.bytes, self.changes = name, call, num_bytes, changes


def _owner(k, d, last_sync, index, mean, out):
    k.owner_step(d.weight, d.momentum, last_sync, mean, index, 1001, d.tables, d.decay, lr=1e-3, beta2=0.95, eps=1e-6, catch_up=True,
                 out=out)


def _enter(k, d, gradient, square):
    k.enter(d.residual, gradient, 0.5, d.index, d.values, square=square, beta2=0.95)


def _select_again(k, d):
    return k.select(d.later if d.is_later else d.residual, d.square, d.last_sync, 1000, d.max_age, d.segments,
                    hints=d.hints.setdefault(str(k.names), {}))


OPS = (
    Op("enter (fp32 gradient)", lambda k, d: _enter(k, d, d.gradient, None), lambda d: 12 * d.numel + 6 * d.k, ("residual", "values")),
    Op("enter (bf16 gradient)", lambda k, d: _enter(k, d, d.gradient_bf16, None), lambda d: 10 * d.numel + 6 * d.k,
       ("residual", "values")),
    Op("enter and q", lambda k, d: _enter(k, d, d.gradient, d.square), lambda d: 20 * d.numel + 6 * d.k, ("residual", "values", "square")),
    Op("norm (bf16 gradient)", lambda k, d: k.sum_of_squares(d.gradient_bf16), lambda d: 2 * d.numel),
    Op("select", lambda k, d: k.select(d.residual, d.square, d.last_sync, 1000, d.max_age, d.segments), lambda d: 11 * d.numel),
    Op("select, again", _select_again, lambda d: 11 * d.numel),
    Op("owner_step", lambda k, d: _owner(k, d, d.last_sync, d.index, d.mean, d.values),
       lambda d: 10 * d.k + 4 * _lines(d, 4) + 2 * _lines(d, 2), ("weight", "momentum", "last_sync", "values")),
    Op("owner_step, all", lambda k, d: _owner(k, d, d.last_step, None, d.gradient, d.copies), lambda d: 26 * d.numel,
       ("weight", "momentum", "last_step", "copies")),
    Op("dense_step", lambda k, d: k.dense_step(d.weight, d.momentum, d.gradient, lr=1e-3, kept=0.9, taken=0.1, beta2=0.95, eps=1e-6,
                                               decay=0.9999), lambda d: 20 * d.numel, ("weight", "momentum")),
    Op("scatter", lambda k, d: k.scatter(d.copies, d.index, d.values), lambda d: 6 * d.k + 2 * _lines(d, 2), ("copies",)),
    Op("pack_mask", lambda k, d: k.pack_mask(d.chosen, d.dense, d.encoding, d.max_ones), lambda d: d.numel + d.message.numel()),
    Op("unpack_mask", lambda k, d: k.unpack_mask(d.message, d.numel, d.dense, d.encoding, (d.numel,), (d.k,))[0][0],
       lambda d: d.message.numel() + 4 * d.k),
)


def _lines(d: Data, itemsize: int) -> int:
    """Bytes of the memory lines that the chosen coordinates lie in; memory moves no less."""
    line = (32 if d.device == "cuda" else 64) // itemsize
    at = d.index // line
    return line * itemsize * (1 + int((at[1:] != at[:-1]).sum()))


def wrong(a, b) -> int:
    """Elements that differ in a bit."""
    return 0 if a is None else int((a.view(INT[a.element_size()]) != b.view(INT[b.element_size()])).sum())


def check(op, kernels, data) -> int:
    """Wrong elements of one call, in everything it writes; the data is afterwards as it was."""
    saved = {name: getattr(data, name).clone() for name in op.changes}
    result = op.call(kernels, data)
    got = {name: getattr(data, name).clone() for name in op.changes}
    for name, value in saved.items():
        getattr(data, name).copy_(value)
    expected = op.call(ops.REFERENCE, data)
    total = wrong(result, expected) + sum(wrong(got[name], getattr(data, name)) for name in op.changes)
    for name, value in saved.items():
        getattr(data, name).copy_(value)
    return total


class Timer:
    def __init__(self, device: str, repeat: int):
        self.device, self.repeat = device, repeat

    def __call__(self, function, prepare=lambda: None) -> float:
        """Median time in microseconds; ``prepare`` runs before every call, untimed."""
        times = []
        for i in range(self.repeat + 2):
            prepare()
            if self.device == "cuda":
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                torch.cuda._sleep(1_000_000)        # in which the host gets ahead
                start.record()
                function()
                end.record()
                end.synchronize()
                times.append(start.elapsed_time(end) * 1e3)
            else:
                begin = time.perf_counter()
                function()
                times.append((time.perf_counter() - begin) * 1e6)
            if i == 1 and times[1] > 2e6 / self.repeat:        # slow ones: a few calls are enough
                break
        return statistics.median(times[2:] or times[1:])


def copy_speed(timer: Timer, num_bytes: int) -> float:
    """Bytes moved per microsecond, read and written both counted, by a copy that moves about so many."""
    size = max(1024, num_bytes // 8)
    source, target = (torch.zeros(size, device=timer.device).add_(1) for _ in range(2))
    return 8 * size / timer(lambda: target.copy_(source))


def measure(args, emit, save) -> None:
    timer = Timer(args.device, args.repeat)
    for numel in args.numel:
        for density in args.density:
            times = {}
            measure_data(Data(numel, density, args.device), args, timer, times, emit)
            for name in args.impl:
                for op, first in (("owner pass, first", "select"), ("owner pass", "select, again")):
                    if all((part, name) in times for part in (first, "owner_step", "dense_step")):
                        taken = times[first, name] + times["owner_step", name]
                        emit({"op": op, "impl": name, "numel": numel, "density": density, "time_us": round(taken, 1),
                              "of_dense_step": round(taken / times["dense_step", name], 3)})
            save()


def measure_data(data: Data, args, timer: Timer, times: dict, emit) -> None:
    originals = {name: getattr(data, name).clone() for name in ("last_sync", "last_step")}
    for op in OPS:
        if args.op and not any(word in op.name for word in args.op):
            continue
        num_bytes = op.bytes(data)
        speed = copy_speed(timer, num_bytes)
        for name in args.impl:
            kernels = loader.choose(name, args.device)
            ages = next((name for name in originals if name in op.changes), None)
            prepare = functools.partial(getattr(data, ages).copy_, originals[ages]) if ages else data.turn
            prepare()
            errors = None if name == "reference" or args.unchecked else check(op, kernels, data)
            before = {field: getattr(data, field).clone() for field in op.changes}
            taken = timer(functools.partial(op.call, kernels, data), prepare)
            for field, value in before.items():         # the next op finds what this one found
                getattr(data, field).copy_(value)
            del before
            prepare()
            times[op.name, name] = taken
            slow = times.get((op.name, "reference"))
            emit({"op": op.name, "impl": name, "numel": data.numel, "density": data.density, "k": data.k, "bytes": num_bytes,
                  "time_us": round(taken, 1), "floor_us": round(num_bytes / speed, 1),
                  "share_of_floor": round(num_bytes / speed / taken, 3),
                  "gb_per_s": round(num_bytes / taken / 1e3, 1), "copy_gb_per_s": round(speed / 1e3, 1),
                  "speedup": round(slow / taken, 2) if slow else None, "wrong": errors})


def show(row: dict) -> None:
    if "of_dense_step" in row:
        text = f"{row['of_dense_step']:.2f} x a dense step"
    else:
        text = f"{row['gb_per_s']:7.1f} GB/s  {row['share_of_floor']:6.1%} of the floor"
        text += f"  {row['speedup']:6.2f} x torch" if row["speedup"] else ""
        text += f"  WRONG {row['wrong']}" if row["wrong"] else ""
    print(f"{row['op']:22s} {row['impl']:10s} {row['numel'] / 1e6:6.1f}M {row['density']:5g} {row['time_us']:11.1f} us  {text}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--numel", type=lambda text: [size_of(word) for word in text.split(",")], default=[16_000_000])
    parser.add_argument("--density", type=lambda text: [float(word) for word in text.split(",")], default=[0.1, 0.01])
    parser.add_argument("--impl", type=lambda text: text.split(","), help="kernel sets, the reference first to have speedups")
    parser.add_argument("--op", type=lambda text: text.split(","), help="parts of names")
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--threads", type=int, default=0, help="of the CPU; 0: torch's default")
    parser.add_argument("--unchecked", action="store_true", help="time only, without the reference")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    try:
        check_arguments(args)
    except ZipScapeError as error:
        parser.error(str(error))
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.impl is None:
        args.impl = [name for name, devices, _ in loader.PREFERENCE if args.device in devices and loader.load(name) is None]
        args.impl = args.impl[:-1] if args.unchecked else args.impl[-1:] + args.impl[:-1]           # the reference is the last
    rows = []

    def emit(row):
        rows.append(row)
        show(row)

    def save():
        if args.json:               # again after every size and density: a run that is stopped leaves what it has
            settings = {"device": args.device, "threads": torch.get_num_threads(), "repeat": args.repeat, "kernels": loader.report()}
            write_json(args.json, {"settings": settings, "rows": rows}, command="python " + " ".join(sys.argv))

    measure(args, emit, save)
    return int(any(row.get("wrong") for row in rows))


if __name__ == "__main__":
    with torch.no_grad():
        sys.exit(main())
