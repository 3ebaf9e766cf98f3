"""Host time of a known zipped call on a GPU (collectives/repeats.py), in microseconds, without a GPU: what the host does in Python and in C
of ours, where kernels, driver and NCCL are C functions that only note when they were called.

    python benchmarks/known_calls.py [op ...]

``encode``, ``payload``: until the first kernel, and the frames' transfer, are queued, which an idle GPU waits for; ``launch``: until the
call returns its handle; ``wait``: of wait(), with all ranks' words there. Medians, in a loop (warm), after 4 MiB (more than a core has to
itself) and after 64 MiB (more than most hosts' caches) were read before each launch and each wait. ``before``: without ``Repeats.again``.
A GPU adds what driver and NCCL take: 5 us a call of the driver's, 20 to 50 NCCL's, on the hosts that were seen.
"""
import ctypes
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import torch

from ds_zipccl.backend import front
from ds_zipccl.collectives import flight, group_state, launch, mailbox, nccl_direct, streams, transport
from ds_zipccl.collectives.cost import Costs, Curve
from ds_zipccl.collectives.registry import Call, specs
from ds_zipccl.collectives.runtime import Runtime
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.kernels import launch_calls, loader, ops
from zipscape.op_builder import toolchain
from zipscape.op_builder.base import csrc_dir

OPS = "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single"
CASES = ("warm", 0, 2000), ("4 MiB", 4 << 20, 100), ("64 MiB", 64 << 20, 60)
FASTER = Costs(Curve((1, 2), (5.0, 10.0)), Curve((1, 2), (1.0, 2.0)), 1.41)
RANK, WORLD = 1, 2
SOURCE = r"""
#include "launch.h"
#include <time.h>
using namespace zipscape::launching;
extern "C" {
double told[4];
static int note(int i) {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    if (!told[i]) told[i] = t.tv_sec * 1e6 + t.tv_nsec * 1e-3;
    return 0;
}
int encode(const void*, const void*, i64, void*, i64, i64, i64, void*, void*, void* mail, u32 stamp, void*) {
    if (mail) ((volatile u64*)mail)[-1] = ((volatile u64*)mail)[0] = (u64)stamp << 32;         // rank 1 of two, and its peer
    return note(0);
}
int decode(const void*, const void*, i64, void*, i64, i64, i64, void*, void*) { return note(2); }
int decode_reduce(const void*, const void*, i64, i64, const void*, i64, void*, void*, void*) { return note(2); }
int record(void*, void*) { return 0; }
int wait_event(void*, void*, unsigned) { return 0; }
int copy(u64, u64, size_t, void*) { return 0; }
int context(void** c) { return *c = (void*)1, 0; }
int is_capturing(void*, int* status) { return *status = 0; }
int gather(const void*, void*, size_t, int, void*, void*) { return note(1); }
int send(const void*, size_t, int, int, void*, void*) { return note(1); }
int receive(void*, size_t, int, int, void*, void*) { return 0; }
int group() { return 0; }
}
"""
CODEC_AND_DRIVER = "encode", "decode", "decode_reduce", "record", "wait_event", "copy", "context", "is_capturing"
NCCL = "gather", "send", "receive", "group", "group"


def build(folder: str) -> ctypes.CDLL:
    source, target = Path(folder) / "told.cpp", Path(folder) / "told.so"
    source.write_text(SOURCE)
    subprocess.run([*toolchain.find("c++"), "-O2", "-std=c++17", "-fPIC", "-shared", f"-I{csrc_dir() / 'zipccl'}", str(source), "-o",
                    str(target)], check=True)
    return ctypes.CDLL(str(target))


class Writer:
    """What of a mailbox is a GPU's."""

    def open(self, memory, trial: int) -> None:
        self._at = ctypes.addressof(ctypes.c_char.from_buffer(memory))

    def address(self, entry: int, stream) -> int:
        return self._at + 8 * entry


class Side(transport.SideChannel):
    """With a mailbox of this process, whose peer has read everything."""

    def __init__(self, group, device, purpose="side"):
        places, file = mailbox.Places(WORLD), os.memfd_create("words")
        os.ftruncate(file, places.num_bytes)
        box = mailbox.Mailbox(file, RANK, WORLD, 60.0, writer=Writer(), neighbours=range(WORLD))
        box.memory[places.mark(1 - RANK)] = 1 << 60
        self._device, self._meeting = device, SimpleNamespace(box=box, over=True, why_not=None)
        self.timeout, self.where = timedelta(seconds=60), "here"

    def pair_gathers(self) -> bool:
        return True

    def connect(self) -> None:
        pass


class Group:
    group_name = "stand-in"

    def rank(self) -> int:
        return RANK

    def size(self) -> int:
        return WORLD

    def _get_backend(self, device) -> "Group":
        return self


def pretend(library: ctypes.CDLL) -> None:
    """CPU tensors are a GPU's, as far as known calls ask."""
    ask = torch.get_num_threads                                         # some function of torch's, for what asks the device

    class Mark(streams.Mark):
        __slots__ = ()
        handle, passed = 77, True

    def on_gpu(kind, *arguments):
        init_kind(kind, *arguments)
        kind.on_gpu = True

    def prepared(this, **fields):
        init_launch(this, **fields)
        this.may_be_early, this.launcher = True, launcher
        this.state.__dict__.update({f"{name}_stream": SimpleNamespace(cuda_stream=20 + i) for i, name in enumerate(
            ("decode", "payload", "status", "resend"))})

    nothing = lambda *_: None           # noqa: E731
    kernels = SimpleNamespace(encode=lambda x, frames, status, g, skip=-1: None, decode=nothing, decode_reduce=nothing,
                              bind_encode=lambda *_: nothing, bind_decode=lambda *_: nothing, bind_decode_reduce=lambda *_: nothing)
    workspace = torch.zeros(1 << 16, dtype=torch.int64)
    launcher = SimpleNamespace(launch_calls=launch_calls.LaunchCalls(library, *[getattr(library, name) for name in CODEC_AND_DRIVER]),
                               workspace=lambda *_: workspace.data_ptr(), unread_word=lambda index: workspace.data_ptr(), keep=workspace)
    table = (ctypes.c_void_p * len(NCCL))(*[ctypes.cast(getattr(library, name), ctypes.c_void_p) for name in NCCL])
    nccl_direct.payload_functions, nccl_direct.returns_when_queued = (lambda: table), (lambda backend: True)
    nccl_direct.handle = lambda backend: ask() and 0x777
    streams.current, streams.of_device = (lambda device: (device.type, device.index, ask()) and 7), (lambda index: ask() and 7)
    streams.current_device, streams.is_capturing, streams.Mark = (lambda: None), torch.is_inference_mode_enabled, Mark
    init_kind, launch.Kind.__init__, init_launch, launch.Launch.__init__ = launch.Kind.__init__, on_gpu, launch.Launch.__init__, prepared
    group_state.SideChannel, flight.WATCH = Side, SimpleNamespace(add=nothing)
    ops.register("nothing", kernels, ("cpu",))
    known = loader.load
    loader.load = lambda name: None if name == "nothing" else known(name)


def measure(op: str, told, is_before: bool) -> None:
    group, cpu = Group(), torch.device("cpu")
    output, data = specs()[op].make_tensors(RANK, WORLD, 1 << 13, torch.bfloat16, cpu)
    runtime = Runtime(ZipcclConfig(enabled=True, collectives="adaptive", min_bytes=0, deterministic_reduce=False), {"cpu": "nothing"})
    if is_before:
        runtime.again = lambda call: None
    for name in (op, "pair"):
        runtime.state(group, cpu).measured(name, torch.bfloat16).costs = FASTER

    def one(other_work: bytes) -> tuple[float, ...]:
        call = Call(op, output, data, group)
        other_work.find(b"-")
        told[:] = [0.0] * len(told)
        start = time.perf_counter()
        work = front.run(runtime, call)
        launched = time.perf_counter()
        encode, payload = told[0] - start * 1e6, told[1] - start * 1e6
        other_work.find(b"-")
        waits = time.perf_counter()
        work.wait()
        return encode, payload, (launched - start) * 1e6, (time.perf_counter() - waits) * 1e6

    for _ in range(50):
        one(b"")
    for name, num_bytes, count in CASES:
        other_work = b"." * num_bytes
        runs = [one(other_work) for _ in range(count)]
        encode, payload, launched, waited = [statistics.median(column) for column in zip(*runs, strict=True)]
        print(f"{op:24s} {'before' if is_before else 'now':6s} {name:6s} encode {encode:5.1f}, payload {payload:5.1f}, "
              f"launch {launched:5.1f}, wait {waited:5.1f}, both {launched + waited:5.1f} us", flush=True)
    if bool(runtime.repeats.num_again) == is_before:
        raise SystemExit("calls did not go the way they were to")


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        library = build(scratch)
        pretend(library)
        for name in sys.argv[1:] or OPS:
            for is_before in (True, False):
                measure(name, (ctypes.c_double * 4).in_dll(library, "told"), is_before)
