"""What a step shows of SCAPE's residuals in host memory, by parts of a trace: its flow, between passes that multiply matrices.

    python benchmarks/scape_offload.py [--ranks 2] [--numel 200M] [--runs 0.01:plain,0.01:offload,0.01:ahead] [--json FILE]

A run is DENSITY:MODE, MODE plain, offload, offload4 (so many buffers) or ahead; plain comes first, the others of its density are compared
with it, every tensor bit by bit (sums of them by position). On fewer GPUs than ranks: rank 0 of a group whose peers send what it sends.
"window": from the last gradient to the next forward pass, by what it is for: kernels first, then communication, then copies, then nothing.
"""
import argparse
import functools
import gc
import os
import statistics
import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from ds_scape.config import ScapeParams
from ds_scape.kernels import loader
from ds_scape.optimizer import memory
from ds_scape.optimizer.flow import Flow
from ds_scape.optimizer.passage import PIECE, host_zeros, passage_for
from ds_scape.optimizer.state import FlatState, sync_steps
from ds_scape.sync.partition import TensorSlot, flat_layout
from ds_scape.sync.transport import Transport
from ds_zipccl.cli import step_trace
from ds_zipccl.cli.step_trace import length, union
from zipscape.machine import write_json

TENSORS, PARTS_OF_BACKWARD, WARM, TRACED = 100, 20, 3, 3
MODES = {"plain": None, "offload": {}, "offload4": {"buffers": 4}, "ahead": {"ahead": True}}
MULTIPLY = ("gemm", "nvjet", "cutlass", "cublas")
#: What a kernel is for, by parts of its name.
PURPOSES = {"norm": ("lanes_kernel", "halve"), "enter": ("enter_kernel", "starts_kernel", "take_kernel", "track_kernel"),
            "choose": ("prepare_kernel", "sample_kernel", "choose_kernel", "digit_kernel", "equal_kernel", "finish_kernel", "overdue"),
            "owner step": ("owner",), "scatter": ("scatter",),
            "masks": ("words_kernel", "fill_kernel", "count_kernel", "before_kernel", "offsets_kernel", "bits_kernel", "positions_kernel"),
            "copies in": ("memcpy htod",), "copies out": ("memcpy dtoh",), "communication": ("nccl",)}
LAST = ("communication", "copies in", "copies out")


class Echo:
    """In place of torch.distributed: what one rank sends comes from all, on the current stream."""

    def __init__(self, ranks: int):
        self._ranks = ranks

    def all_gather_into_tensor(self, out, own, **kwargs):
        out.view(self._ranks, -1).copy_(own.expand(self._ranks, -1))
        return _Done(torch.cuda.current_stream().record_event() if out.is_cuda else None)

    def all_to_all_single(self, out, own, **kwargs):
        out.view(self._ranks, -1).copy_(own[:out.numel() // self._ranks].expand(self._ranks, -1))

    def all_reduce(self, tensor):
        pass

    def barrier(self):
        pass


class _Done:
    def __init__(self, event):
        self._event = event

    def wait(self):
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)


class Load:
    """Matrix products that take a number of milliseconds on a GPU; one of small matrices on a CPU."""

    def __init__(self, device):
        size = 4096 if device.type == "cuda" else 32
        self._a, self._b = (torch.randn(size, size, device=device).to(torch.bfloat16) for _ in range(2))
        self._out, self._ms = torch.empty_like(self._a), None
        for count in (50, 100) if device.type == "cuda" else ():            # the second time the clock is where it stays
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(count):
                torch.mm(self._a, self._b, out=self._out)
            end.record()
            end.synchronize()
            self._ms = start.elapsed_time(end) / count

    def __call__(self, ms: float) -> None:
        for _ in range(max(1, round(ms / self._ms)) if self._ms else 1):
            torch.mm(self._a, self._b, out=self._out)


def bits(t: torch.Tensor, device) -> int:
    """A sum of the bits that depends on their places."""
    words, total = t.reshape(-1).view(torch.uint8), 0
    for i, part in enumerate(words[:len(words) // 4 * 4].view(torch.int32).split(1 << 25)):
        part = part.to(device).to(torch.int64)
        total += int((part * (torch.arange(len(part), device=device) % 65521 + 1 + i)).sum())
    return total & (1 << 63) - 1


def summarize(events: list[tuple[float, float, str]], num_steps: int) -> dict[str, float]:
    """Milliseconds from (start, end, kernel's name) in us: in a mean "window" between what multiplies matrices, that of every purpose, of
    LAST only where nothing before is there ("copies": either way), and "nothing"; of LAST per step "..., all" and "..., hidden"."""
    runs, kinds = [], {kind: [] for kind in (*PURPOSES, "other kernels")}
    for start, end in union([(a, b) for a, b, name in events if any(word in name for word in MULTIPLY)]):
        if runs and start - runs[-1][1] < 2000:                             # a gap in a pass, not one between passes of two steps
            runs[-1] = runs[-1][0], end
        else:
            runs.append((start, end))
    for start, end, name in events:
        if not any(word in name for word in MULTIPLY):
            kinds[next((kind for kind, words in PURPOSES.items() if any(word in name.lower() for word in words)), "other kernels")].append(
                (start, end))
    windows = [(before[1], after[0]) for before, after in zip(runs, runs[1:], strict=False)]
    inside = functools.partial(_inside, windows)
    row, covered, count = {"window": length(windows) / max(1, len(windows)) / 1e3}, [], max(1, len(windows)) * 1e3
    for kind, found in [(kind, kinds[kind]) for kind in kinds if kind not in LAST] + [("communication", kinds["communication"]),
                                                                                     ("copies", kinds["copies in"] + kinds["copies out"])]:
        more = union([*covered, *inside(found)])
        row[kind], covered = (length(more) - length(covered)) / count, more
    row["nothing"] = row["window"] - length(covered) / count
    for kind in LAST:
        row[f"{kind}, all"] = length(union(kinds[kind])) / num_steps / 1e3
        row[f"{kind}, hidden"] = length(union(_inside(runs, kinds[kind]))) / num_steps / 1e3
    return row


def _inside(windows, intervals):
    return [(max(a, begin), min(b, end)) for begin, end in windows for a, b in intervals if a < end and b > begin]


class Bench:
    def __init__(self, args, comm, rank: int, device, say):
        self.args, self.comm, self.rank, self.device, self.say = args, comm, rank, device, say
        self.load, self.truth, self.plain = Load(device), {}, {}
        self.gradient = torch.empty(args.numel, dtype=torch.bfloat16, device=device)
        self._fill(self.gradient, 5 + rank, 1e-3)

    def _fill(self, t: torch.Tensor, seed: int, scale: float) -> None:
        generator = torch.Generator(self.device).manual_seed(seed)
        for part in t.split(1 << 24):
            part.copy_(torch.randn(len(part), generator=generator, device=self.device) * scale)

    def flow(self, density: float, mode: str) -> tuple[Flow, list[TensorSlot]]:
        n, ranks, device = self.args.numel, self.args.ranks, self.device
        settings = {"residual": "none"} if MODES[mode] is None else {"residual": "cpu", **MODES[mode]}
        p = ScapeParams(density=density, offload=settings)
        group = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.1, "density": density}
        slots = [TensorSlot(i * (n // TENSORS), n // TENSORS, 2) for i in range(TENSORS)]
        way, copies = passage_for(p.offload, device, n), torch.empty(n, dtype=torch.bfloat16, device=device)
        self._fill(copies, 1, 0.02)
        weight = copies.view(ranks, -1)[self.rank].float()
        residual = torch.zeros(n, device=device) if way is None else host_zeros(n, torch.float32, device)
        momentum, q = torch.zeros_like(weight), torch.zeros_like(weight)
        flat = FlatState(flat_layout(slots, n, ranks, density), copies, residual, weight, momentum, q, sync_steps(weight, p, density, way),
                         group, p, way)
        return Flow([flat], p, Transport(self.comm, None, self.rank, ranks)), slots

    def run(self, density: float, mode: str) -> None:
        on_gpu, n = self.device.type == "cuda", self.args.numel
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.synchronize()
            others = torch.cuda.memory_allocated()
        flow, slots = self.flow(density, mode)
        fresh = torch.zeros_like(flow.flats[0].copies)
        step = functools.partial(self._step, flow, slots, fresh)
        for _ in range(WARM):
            step(None)
        shown, whole, host = [], [], []
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        for _ in range(self.args.repeat):
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if on_gpu else None
            start = time.perf_counter()
            step(marks)
            host.append((time.perf_counter() - start) * 1e3)
            if on_gpu:
                torch.cuda.current_stream().synchronize()
                shown.append(marks[0].elapsed_time(marks[1]))
            whole.append((time.perf_counter() - start) * 1e3)
        row = {"density": density, "mode": mode, "step_ms": statistics.median(whole), "host_ms": statistics.median(host)}
        if on_gpu:
            beyond = torch.cuda.max_memory_allocated() - others - (4 * n + 12 * n // self.args.ranks)
            events = step_trace.record(lambda: [step(None) for _ in range(TRACED)])
            moved = {way: sum(e["args"].get("bytes", 0) for e in events if word in e["name"]) / TRACED for way, word in (
                ("in", "HtoD"), ("out", "DtoH"))}
            row |= {"shown_ms": statistics.median(shown), "beyond_dense_bytes": beyond, "allowed_bytes": memory.design_bytes(flow.layout),
                    "in_bytes": moved["in"], "out_bytes": moved["out"]}
            row |= summarize([(e["ts"], e["ts"] + e["dur"], e["name"]) for e in events], TRACED)
            self.plain.setdefault(density, row["shown_ms"])
            row["longer_ms"] = row["shown_ms"] - self.plain[density]
        flow.settle()
        flat = flow.flats[0]
        states = {"copies": flat.copies, "weight": flat.weight, "momentum": flat.momentum, "q": flat.square, "residual": flat.residual,
                  "ages": flat.last_sync, "mask": flow._mask_message}
        sums = {name: bits(t, self.device) for name, t in states.items()}
        wrong = [name for name, expected in self.truth.setdefault(density, sums).items() if sums[name] != expected]
        bad = torch.tensor([len(wrong)], device=self.device)
        self.comm.all_reduce(bad)
        stored = [flat.stored_residual, flat.stored_last_sync, *(t for own in (flow._ahead.spares if flow._ahead else ()) for t in own)]
        self.say(row | {"host_bytes": sum(t.nbytes for t in stored) if MODES[mode] is not None else 0, "wrong": int(bad),
                        "wrong_here": wrong})

    def _step(self, flow: Flow, slots, fresh, marks) -> None:
        self.load(self.args.forward_ms)
        for part in range(PARTS_OF_BACKWARD):
            if part == 0:
                is_old = flow.uses_gradients
                flow.prefetch()
                if is_old:
                    fresh.zero_()
            self.load(self.args.backward_ms / PARTS_OF_BACKWARD)
            upto = TENSORS * (PARTS_OF_BACKWARD - part) // PARTS_OF_BACKWARD
            for slot in reversed(slots[upto - TENSORS // PARTS_OF_BACKWARD:upto]):
                fresh[slot.offset:slot.offset + slot.numel] += self.gradient[slot.offset:slot.offset + slot.numel]
                flow.gradient_is_complete([fresh], 0, slot.offset, slot.offset + slot.numel)
        if marks:
            marks[0].record()
        flow.step([fresh], may_overwrite=True)
        if not flow.uses_gradients:
            fresh.zero_()
        if marks:
            marks[1].record()

    def on_the_host(self, density: float, threads: int) -> None:
        """The alternative: gradients go down behind the backward pass; after the norm the host adds and packs, own ones first, whose
        residuals go up meanwhile to be ranked. "ready": these and the values are on the device, from the end of the backward pass on."""
        n, own, on_gpu = self.args.numel, self.args.numel // self.args.ranks, self.device.type == "cuda"
        cpu, residual = loader.choose("best", "cpu"), host_zeros(n, torch.float32, self.device)
        gradient = torch.zeros(n, dtype=torch.bfloat16, device="cpu", pin_memory=on_gpu)
        index = torch.arange(0, own, int(1 / density), dtype=torch.int32, device="cpu")
        values = torch.empty(self.args.ranks, len(index), dtype=torch.bfloat16, device="cpu", pin_memory=on_gpu)
        rooms, sent = [torch.empty(PIECE // 2, device=self.device) for _ in range(2)], torch.empty_like(values, device=self.device)
        side, before, times = torch.cuda.Stream() if on_gpu else None, torch.get_num_threads(), []
        torch.set_num_threads(threads)
        for _ in range(4):
            self.comm.barrier()
            for part in range(PARTS_OF_BACKWARD):
                self.load(self.args.backward_ms / PARTS_OF_BACKWARD)
                place = slice(n * part // PARTS_OF_BACKWARD, n * (part + 1) // PARTS_OF_BACKWARD)
                if on_gpu:
                    side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    gradient[place].copy_(self.gradient[place], non_blocking=True)
            if on_gpu:
                torch.cuda.current_stream().synchronize()
            start = time.perf_counter()
            if on_gpu:
                side.synchronize()
            for turn, lo in enumerate(range(0, own, PIECE // 2)):
                place = slice(lo, min(own, lo + PIECE // 2))
                first, end = (-(-at // int(1 / density)) for at in (place.start, place.stop))
                cpu.enter(residual[place], gradient[place], 0.5, index[first:end], values[0, first:end], first=lo)
                with torch.cuda.stream(side):
                    rooms[turn % 2][:place.stop - lo].copy_(residual[place], non_blocking=True)
            for other in range(1, self.args.ranks):
                place = slice(other * own, (other + 1) * own)
                cpu.enter(residual[place], gradient[place], 0.5, index, values[other])
            sent.copy_(values, non_blocking=True)
            if on_gpu:
                torch.cuda.synchronize()
            times.append((time.perf_counter() - start) * 1e3)
        torch.set_num_threads(before)
        self.say({"density": density, "mode": f"on the host, {threads} threads a rank", "ready_ms": sorted(times)[1]})


def text_of(row: dict) -> str:
    numbers = " ".join(f"{name.replace(' ', '_')} {value / 1e6:.1f}M" if name.endswith("bytes") else f"{name.replace(' ', '_')} {value:.2f}"
                       for name, value in row.items() if isinstance(value, float | int) and name not in ("density", "wrong"))
    return f"{row['density']:g} {row['mode']}: {'BITS DIFFER ' * bool(row.get('wrong'))}{numbers}"


def measure(rank: int, args, port: int, on_gpus: bool) -> None:
    rows, is_echo = [], args.ranks > 1 and (torch.cuda.device_count() < args.ranks if on_gpus else args.echo)
    device, alone = torch.device("cuda", rank) if on_gpus else torch.device("cpu"), is_echo or args.ranks == 1
    if on_gpus:
        torch.cuda.set_device(device)
    if not alone:
        dist.init_process_group("nccl" if on_gpus else "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=args.ranks)

    def say(row):
        if rank == 0:
            rows.append(row)
            print(text_of(row), flush=True)
            if args.json:
                write_json(args.json, {"ranks": args.ranks, "numel": args.numel, "peers": "echo" if is_echo else "ranks", "rows": rows},
                           command="python " + " ".join(sys.argv))

    with torch.no_grad():
        bench = Bench(args, Echo(args.ranks) if alone else dist, rank, device, say)
        for run in args.runs.split(","):
            density, mode = run.split(":")
            bench.run(float(density), mode)
        for threads in [int(num) for num in args.host_threads.split(",") if num]:
            bench.on_the_host(0.01, threads)
    if not alone:
        dist.destroy_process_group()
    if any(row.get("wrong") for row in rows):
        sys.exit("states differ from those without offload")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--numel", type=lambda text: int(float(text.rstrip("KM")) * {"K": 1e3, "M": 1e6}.get(text[-1], 1)), default="200M")
    parser.add_argument("--runs", default="0.01:plain,0.01:offload,0.01:ahead,0.1:plain,0.1:offload,0.1:ahead")
    parser.add_argument("--forward-ms", type=float, default=20)
    parser.add_argument("--backward-ms", type=float, default=40)
    parser.add_argument("--repeat", type=int, default=6)
    parser.add_argument("--host-threads", default="", metavar="LIST", help="also the alternative, with so many threads a rank")
    parser.add_argument("--echo", action="store_true", help="on CPUs: rank 0 alone, as on fewer GPUs than ranks")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    args.numel = args.numel // (TENSORS * args.ranks) * TENSORS * args.ranks
    on_gpus = torch.cuda.is_available()
    alone = args.ranks == 1 or (torch.cuda.device_count() < args.ranks if on_gpus else args.echo)
    if alone:
        measure(0, args, 0, on_gpus)
    else:
        mp.spawn(measure, (args, 29000 + os.getpid() % 20000, on_gpus), nprocs=args.ranks)


if __name__ == "__main__":
    main()
