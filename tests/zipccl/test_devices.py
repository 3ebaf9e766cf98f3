"""Visible GPUs in any order: the work is on the device of the tensor, and no other one is touched (C131). Needs two GPUs."""
import os
import subprocess
import sys

import pytest
import torch

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

SCRIPT = """
import ctypes, sys
import torch
from ds_zipccl.codec.codec import Codec
rank = int(sys.argv[1])
torch.cuda.set_device(rank)
x = torch.randn(100_000, device="cuda").to(torch.bfloat16)
codec = Codec.of(x.dtype, x.numel(), "cuda", kernels=sys.argv[2])
frames, status = codec.empty_frames(1, x.device), torch.zeros(1, dtype=torch.int32, device="cuda")
codec.encode(x.view(1, -1), frames, status)
out = torch.empty_like(x)
codec.decode(frames, out.view(1, -1))
codec.raise_on_error(x.device)
assert torch.equal(out.view(torch.int16), x.view(torch.int16))
cuda, states = ctypes.CDLL("libcuda.so.1"), []
for index in range(torch.cuda.device_count()):
    device, flags, active = ctypes.c_int(), ctypes.c_uint(), ctypes.c_int()
    assert cuda.cuDeviceGet(ctypes.byref(device), index) == 0
    assert cuda.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active)) == 0
    states.append(bool(active.value))
print(states)
"""


@pytest.mark.parametrize("kernels", ["cuda", "triton"])
@pytest.mark.parametrize("rank", [0, 1])
def test_no_context_on_the_other_device(rank, kernels):
    """C131: with CUDA_VISIBLE_DEVICES out of order."""
    visible = ",".join(os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")[1::-1])
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(rank), kernels], env={**os.environ, "CUDA_VISIBLE_DEVICES": visible},
                          capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str([index == rank for index in range(2)])
