"""Frame buffers: reused, bounded, and old sizes do not keep new ones out."""
import gc
import types
import weakref

import pytest
import torch

from ds_zipccl.codec.codec import Codec
from ds_zipccl.collectives import streams
from ds_zipccl.collectives.workspace import PAGE_BYTES, Workspace
from ds_zipccl.kernels import impl_cuda

CPU = torch.device("cpu")


def test_a_buffer_of_the_same_size_comes_back():
    workspace = Workspace(4 * PAGE_BYTES)
    buffer = workspace.take(1000, CPU)
    assert buffer.data.numel() == 1000 and buffer.data.dtype == torch.uint8
    address = buffer.data.data_ptr()
    workspace.give(buffer)
    assert workspace.held_bytes == PAGE_BYTES
    again = workspace.take(2000, CPU)
    assert again.data.data_ptr() == address and workspace.held_bytes == 0
    assert workspace.take(2000, CPU).data.data_ptr() != address


def test_never_more_idle_than_the_bound():
    workspace = Workspace(4 * PAGE_BYTES)
    for pages in (1, 2, 3, 1, 2, 5, 4, 1):
        for buffer in [workspace.take(pages * PAGE_BYTES, CPU) for _ in range(3)]:
            workspace.give(buffer)
            held = sum(b.numel() for stack in workspace._idle.values() for b in stack)
            assert held == workspace.held_bytes <= 4 * PAGE_BYTES
    workspace.clear()
    assert workspace.held_bytes == 0 and not workspace._idle


def test_sizes_out_of_use_make_room():
    workspace = Workspace(4 * PAGE_BYTES)
    for buffer in [workspace.take(PAGE_BYTES, CPU) for _ in range(4)]:
        workspace.give(buffer)                              # full of a size that is not used any more
    buffer = workspace.take(3 * PAGE_BYTES, CPU)
    address = buffer.data.data_ptr()
    workspace.give(buffer)
    assert workspace.take(3 * PAGE_BYTES, CPU).data.data_ptr() == address
    workspace.give(workspace.take(5 * PAGE_BYTES, CPU))     # larger than the bound: not kept, and nothing dropped for it
    assert workspace.held_bytes == PAGE_BYTES


def test_what_ends_on_another_stream_is_not_kept_where_nobody_looks(monkeypatch):
    """Streams by number; the memory of such a buffer goes back to torch when that stream is done with it."""
    kept, now = [], ["launch"]
    monkeypatch.setattr(streams, "current", lambda device: now[0])
    monkeypatch.setattr(streams, "keep", kept.append)
    workspace = Workspace(4 * PAGE_BYTES)
    same, other = workspace.take(1000, CPU), workspace.take(1000, CPU)
    workspace.give(same)
    now[0] = "of another thread"
    workspace.give(other)
    assert workspace.held_bytes == PAGE_BYTES and len(kept) == 1 and kept[0] is other.whole
    assert workspace.take(1000, CPU).whole is not same.whole             # that one is for its own stream
    now[0] = "launch"
    assert workspace.take(1000, CPU).whole is same.whole


@pytest.mark.parametrize("bind", [
    lambda kernels, frames, g: kernels.bind_encode(frames, torch.empty(1, dtype=torch.int32), g, -1, 0),
    lambda kernels, frames, g: kernels.bind_decode(frames, g, -1, 0),
    lambda kernels, frames, g: kernels.bind_decode_reduce(frames, 0, g, 0)], ids=["encode", "decode", "decode_reduce"])
def test_frames_go_with_the_kernels_bound_to_them(bind, monkeypatch):
    """At once, not when Python next looks for cycles: until then the memory of calls out of use would exceed the bound."""
    monkeypatch.setattr(impl_cuda, "_current_device", lambda: -1)       # where a CPU's tensors say that they are
    monkeypatch.setattr(impl_cuda, "_current_stream", lambda index: 0)
    monkeypatch.setattr(impl_cuda, "_is_capturing", lambda: False)
    ran = []
    run = lambda *given: lambda *addresses: ran.append(addresses)       # noqa: E731
    calls = types.SimpleNamespace(prepare=lambda: (0, 1000, 8), bind_encode=run, bind_decode=run, bind_decode_reduce=run)
    codec = Codec.of(torch.bfloat16, 3000, "cpu")
    frames = codec.empty_frames(1, CPU)
    function, alive = bind(impl_cuda.CudaKernels(calls, "nothing"), frames, codec.geometry), weakref.ref(frames)
    function(*[torch.zeros(3000, dtype=torch.bfloat16)] * (2 if "reduce" in function.__name__ else 1))
    del frames
    assert len(ran) == 1 and alive() is not None
    was_on = gc.isenabled()
    gc.disable()
    try:
        del function
        assert alive() is None
    finally:
        if was_on:
            gc.enable()
