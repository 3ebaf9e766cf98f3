"""Frame buffers: reused, bounded, and old sizes do not keep new ones out."""
import torch

from ds_zipccl.collectives import streams
from ds_zipccl.collectives.workspace import PAGE_BYTES, Workspace

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
