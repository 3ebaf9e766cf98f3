"""The CPU kernels' threads: torch's own, in the caller's floating-point modes, and others after a fork."""
import os
import subprocess
import sys

import pytest
import torch

from ds_zipccl.codec import format as fmt
from ds_zipccl.codec.dtypes import BY_TORCH
from ds_zipccl.kernels import impl_cpu
from tests.helpers.bits import as_ints
from zipscape.op_builder.zipccl import ZIPCCL_CPU


def usable_kernels() -> list[impl_cpu.CpuKernels]:
    library = ZIPCCL_CPU.load()
    return [impl_cpu.CpuKernels(library, isa) for n, isa in enumerate(impl_cpu.ISAS) if library.zipccl_cpu_supports(n)]


@pytest.fixture
def two_threads():
    if not ZIPCCL_CPU.available()[0]:
        pytest.skip(f"no C++ compiler: {ZIPCCL_CPU.available()[1]}")
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)
    torch.set_flush_denormal(False)


def test_threads_borrow_the_callers_denormal_mode(two_threads):
    """torch's threads may have another one than the caller; a sum is one or the other as a whole."""
    numel = 1 << 20
    x, g = torch.full((2, numel), 1, dtype=torch.int16).view(torch.bfloat16), fmt.layout(BY_TORCH[torch.bfloat16], numel, 35, 64, -1)
    torch.ones(1 << 20).add_(1)                          # starts torch's threads
    frames, out = torch.empty(2, g.frame_bytes, dtype=torch.uint8), torch.empty(numel, dtype=torch.bfloat16)
    kernels = usable_kernels()
    kernels[0].encode(x, frames, torch.zeros(1, dtype=torch.int32), g)
    for flush in (True, False):
        if not torch.set_flush_denormal(flush):
            pytest.skip("this machine does not flush denormals")
        for k in kernels:
            k.decode_reduce(frames, x[0], 0, out, g)
            assert (as_ints(out) == (0 if flush else 2)).all(), f"{k.isa}, flush {flush}"


FORK = """
import os, sys, time, torch
from ds_zipccl.codec import format as fmt
from ds_zipccl.codec.dtypes import BY_TORCH
from ds_zipccl.kernels import impl_cpu
torch.set_num_threads(2)
x = torch.randn(1 << 22).bfloat16().view(1, -1)                      # with torch's threads, which a fork loses
g = fmt.layout(BY_TORCH[x.dtype], x.numel(), 35, 64, -1)
kernels, status = impl_cpu.load(), torch.zeros(1, dtype=torch.int32)
frames = [torch.empty(1, g.frame_bytes, dtype=torch.uint8) for _ in range(2)]
kernels.encode(x, frames[0], status, g)
child = os.fork()
if child == 0:
    torch.set_num_threads(2)
    kernels.encode(x, frames[1], status, g)
    os._exit(0 if bytes(frames[0].numpy()) == bytes(frames[1].numpy()) else 1)
for _ in range(300):
    done, status = os.waitpid(child, os.WNOHANG)
    if done:
        sys.exit(os.waitstatus_to_exitcode(status))
    time.sleep(0.1)
os.kill(child, 9)
sys.exit("the child hangs")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_forked_process_has_threads_of_its_own(two_threads):
    subprocess.run([sys.executable, "-c", FORK], check=True, timeout=120)
