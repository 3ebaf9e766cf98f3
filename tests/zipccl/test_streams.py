"""Streams by their handles: the default one is handle 0, for which ExternalStream would make a new stream."""
from types import SimpleNamespace

import pytest
import torch

from ds_zipccl.collectives import streams

GPU = torch.device("cuda", 0)


@pytest.fixture
def made(monkeypatch):
    monkeypatch.setattr(streams, "_objects", {})
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: "default")
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle, device: f"external {handle}")


def test_handle_0_is_the_default_stream(made):
    assert streams.as_object(GPU, 0) == "default" and streams.as_object(GPU, 77) == "external 77"
    assert streams.as_object(GPU, 0) is streams.as_object(GPU, 0)


def test_join_waits_on_another_stream_only(monkeypatch):
    waits = []
    monkeypatch.setattr(streams, "_objects", {(0, handle): SimpleNamespace(wait_stream=lambda other, handle=handle: waits.append(
        (handle, other.name)), name=handle) for handle in (0, 5)})
    monkeypatch.setattr(streams, "current", lambda device: 5)
    streams.join(GPU, 5)
    assert waits == []
    streams.join(GPU, 0)
    assert waits == [(5, 0)]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu():
    assert streams.as_object(GPU, 0).cuda_stream == 0
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        assert streams.as_object(GPU, streams.current(GPU)).cuda_stream == side.cuda_stream
    with streams.On(side):
        assert torch.cuda.current_stream() == side
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
