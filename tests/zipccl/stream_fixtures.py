"""Fixtures over stream_stand_in.py: a GPU that is not there, and a Runtime on it."""
import ctypes
import subprocess
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from ds_zipccl.collectives import capacity, flight, group_state, launch, nccl_direct, repeats, streams
from ds_zipccl.collectives.runtime import Runtime
from ds_zipccl.collectives.words import Words
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.kernels import loader, ops
from tests.zipccl.stream_stand_in import (
    COMMUNICATOR,
    Communicator,
    Event,
    Gpu,
    Group,
    Kernels,
    Stream,
    mailbox_of,
    nccl,
    prepared,
)
from zipscape.op_builder import toolchain
from zipscape.op_builder.base import csrc_dir


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> ctypes.CDLL:
    target = tmp_path_factory.mktemp("launch") / "launch.so"
    subprocess.run([*toolchain.find("c++"), "-x", "c++", "-std=c++17", "-fPIC", "-shared", str(csrc_dir() / "zipccl/launch.h"), "-o",
                    str(target)], check=True, timeout=120)
    return ctypes.CDLL(str(target))


@pytest.fixture(params=["step by step", "prepared", "prepared, words by encode", "prepared, words by encode, payload too",
                        "prepared, words by encode, payload too, again"])
def gpu(request, monkeypatch, library):
    gpu = Gpu()
    gpu.is_prepared, gpu.posts = "prepared" in request.param, "words" in request.param
    calls = prepared(gpu, library)
    monkeypatch.setattr(launch, "PREPARED", gpu.is_prepared)
    gpu.sends = "payload" in request.param
    gpu.box = mailbox_of(gpu) if "again" in request.param else None
    if gpu.box is not None:
        for module in (capacity, repeats):
            monkeypatch.setattr(module, "CALM_AFTER", 1)
    if gpu.sends:
        functions = nccl(gpu)
        monkeypatch.setattr(nccl_direct, "payload_functions", lambda: functions)
        monkeypatch.setattr(nccl_direct, "returns_when_queued", lambda backend: True)
        monkeypatch.setattr(nccl_direct, "handle", lambda backend: COMMUNICATOR)
    objects = {}

    def stream(handle):
        return objects.setdefault(handle, Stream(gpu, handle))

    class On:
        def __init__(self, stream):
            self._stream = stream

        def __enter__(self):
            self._before = gpu.current
            gpu.current = gpu.current if self._stream is None else self._stream.cuda_stream

        def __exit__(self, *exc):
            gpu.current = self._before

    def copy(tensor, *_, **__):
        if tensor.is_cuda:                                      # the words' way to host memory is not of interest
            gpu.queue("copy")
        return tensor

    def part(tensor, key):                                      # torch's own makes the device current, which is not there
        dim = 0
        for one in key if isinstance(key, tuple) else (key,):
            if isinstance(one, slice):
                tensor, dim = torch.ops.aten.slice(tensor, dim, one.start, one.stop), dim + 1
            else:
                tensor = torch.select(tensor, dim, one)
        return tensor

    monkeypatch.setattr(torch.cuda, "Event", lambda **_: Event(gpu))
    monkeypatch.setattr(torch.cuda, "Stream", lambda *_, **__: stream(next(gpu.handles)))
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle, device: stream(handle))
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: stream(0))
    monkeypatch.setattr(streams, "_objects", {})
    monkeypatch.setattr(streams, "of_device", lambda index: gpu.current)
    monkeypatch.setattr(streams, "is_capturing", lambda: False)
    monkeypatch.setattr(streams, "On", On)
    monkeypatch.setattr(streams, "copy", lambda target, offset, source: gpu.queue("copy"))
    monkeypatch.setattr(streams, "keep", lambda tensor: None)
    monkeypatch.setattr(FakeTensor, "data_ptr", lambda tensor: gpu.address(tensor), raising=False)
    monkeypatch.setattr(FakeTensor, "__getitem__", part, raising=False)
    monkeypatch.setattr(FakeTensor, "__setitem__", lambda tensor, key, value: copy(tensor), raising=False)
    monkeypatch.setattr(FakeTensor, "copy_", copy, raising=False)
    monkeypatch.setattr(FakeTensor, "record_stream", lambda *_: None, raising=False)
    monkeypatch.setattr(group_state, "SideChannel", lambda group, device, purpose="words": Communicator(gpu, {"bulk": "resend"}.get(
        purpose, "words")))
    monkeypatch.setattr(group_state.rank_order, "load_kernels", lambda device: gpu.queue("load kernels"))
    monkeypatch.setattr(flight, "WATCH", SimpleNamespace(add=gpu.watched.append))
    monkeypatch.setattr(group_state, "WATCH", SimpleNamespace(add=lambda state: None, wake=lambda: None))
    monkeypatch.setattr(Words, "tolist", lambda words: [gpu.word] * words.data.numel())
    monkeypatch.setitem(ops._SETS, "told", None)
    monkeypatch.setattr(loader, "resolve", lambda *_: "told")
    ops.register("told", Kernels(gpu, calls), ("cuda",))
    gpu.word = 0
    with FakeTensorMode():
        yield gpu


@pytest.fixture
def live(gpu):
    live = Runtime(ZipcclConfig(enabled=True, collectives="always", min_bytes=0, transport="process_group"), {"cuda": "told"})
    live.group = Group(gpu)
    return live
