"""Streams, events, kernels, communicators and NCCL of a GPU that is not there, for test_stream_order.py: they know nothing but who waited
for whom, and say when they ran."""
import ctypes
import itertools
import os
from datetime import timedelta
from types import SimpleNamespace

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from ds_zipccl.collectives import mailbox, streams
from ds_zipccl.collectives.registry import Call, specs
from ds_zipccl.kernels.launch_calls import LaunchCalls

GPU, WORLD, ROW = torch.device("cuda", 0), 2, 4096
#: But reduce_to_owner: reduce_scatter_uneven's flight, in which a rank encodes or decodes, never both.
OPS = tuple(op for op in specs(internal=True) if op != "reduce_to_owner")
PREPARED = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single", "all_reduce", "broadcast")
AGAIN = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")             # known ones are one call of C
MAIL = 0x1234500         # an entry of a mailbox
COMMUNICATOR = 0x77700


class Gpu:
    """``seen[stream]``: numbers of what has ended when that stream gets to what is queued next; ``host``: when the host goes on.
    ``log``: (what, stream, numbers of what has ended before, names of the memory it
    touched)."""

    def __init__(self):
        self.current, self.seen, self.host, self.log, self.handles = 0, {}, set(), [], itertools.count(100)
        self._kept, self.events, self.storages, self.posts, self.told = {}, {}, {}, False, {}
        self.is_prepared, self.num_prepared, self.num_sent, self.sends, self.watched = False, 0, 0, False, []
        self.box, self.captures = None, 0

    def address(self, tensor):
        storage = tensor.untyped_storage()
        base, _ = self.storages.setdefault(storage._cdata, (len(self.storages) + 1 << 32, storage))
        return base + tensor.storage_offset() * tensor.element_size()

    def at(self, address):
        """The memory, for ``queue``."""
        return next((storage for base, storage in self.storages.values() if base == address >> 32 << 32), None)

    def queue(self, what, stream=None, touched=()):
        stream = self.current if stream is None else stream
        self.order(stream, self.host)
        seen = self.seen[stream]
        storages = [t.untyped_storage() if isinstance(t, FakeTensor) else t for t in tree_leaves(touched)]
        storages = {t._cdata: t for t in storages if isinstance(t, torch.UntypedStorage)}
        self._kept.update(storages)                             # else the next one might get the name of one that is gone
        self.log.append((what, stream, frozenset(seen), storages.keys()))
        seen.add(len(self.log) - 1)

    def order(self, stream, seen):
        self.seen.setdefault(stream, set()).update(seen)

    def now(self, stream=None):
        return frozenset(self.seen.get(self.current if stream is None else stream, ()))

    def all(self, *what):
        """Numbers of the entries of these names."""
        return {i for i, (name, *_) in enumerate(self.log) if name in what}

    def before(self, number):
        return self.log[number][2]


class Stream:
    def __init__(self, gpu, handle):
        self._gpu, self.cuda_stream = gpu, handle

    def wait_stream(self, other):
        self._gpu.order(self.cuda_stream, self._gpu.now(other.cuda_stream))

    def wait_event(self, event):
        self._gpu.order(self.cuda_stream, event.seen)


class Event:
    def __init__(self, gpu):
        self._gpu, self.seen, self.cuda_event = gpu, frozenset(), 0

    def record(self, stream=None):
        if not self.cuda_event:
            self.cuda_event = next(self._gpu.handles)
            self._gpu.events[self.cuda_event] = self
        self.seen = self._gpu.now(stream and stream.cuda_stream)

    def query(self):
        return True

    def synchronize(self):
        self._gpu.host |= self.seen


class Communicator:
    """Runs on a stream of its own, behind what the current one was given, as NCCL under torch."""
    timeout, where = timedelta(seconds=90), "group 7"

    def __init__(self, gpu, name):
        self._gpu, self._name = gpu, name

    def _run(self, *tensors):
        gpu, stream = self._gpu, f"stream of {self._name}"
        gpu.order(stream, gpu.now())
        gpu.queue(self._name, stream, tensors)
        seen = gpu.now(stream)
        return SimpleNamespace(wait=lambda: gpu.order(gpu.current, seen), is_completed=lambda: True)

    _allgather_base = alltoall = alltoall_base = broadcast = all_gather = all_to_all = _run

    def exchange_pairs(self, *_):
        self._run().wait()

    def _words(self, words, *_):
        words.through(self._run)

    gather_words = broadcast_word = exchange_words = _words

    def _post(self, words, root=None, *_):
        if not self._gpu.posts:
            return None
        if root is None and self._gpu.box is not None:
            return words.posted(*self._gpu.box.post_to_all(7))
        gpu, stamp = self._gpu, next(self._gpu.handles)

        def is_there():
            gpu.host |= gpu.told.get(stamp, set())
            return True

        said = SimpleNamespace(is_there=is_there, wait=is_there, words=[gpu.word] * words.data.numel())
        return words.posted(said, *((MAIL, stamp) if root in (None, 0) or isinstance(root, list) else (0, 0)))

    post_to_all = post_from = post_to_one = _post

    def connect(self):
        self._gpu.queue(f"connect {self._name}")

    def pair_gathers(self):
        return self._gpu.sends

    close = abort = exchange_no_words = lambda *_: None

    def ring_box(self):
        return self._gpu.box


class Kernels:
    levels = (1,)

    def __init__(self, gpu, launch_calls):
        self.launch_calls, self.workspace, self.unread_word = launch_calls, lambda *_: 1, lambda index: 1
        bound = lambda what: lambda *frames: lambda *_: gpu.queue(what, None, frames)         # noqa: E731
        self.bind_encode, self.bind_decode, self.bind_decode_reduce = bound("encode"), bound("decode"), bound("decode")
        self.encode = lambda *tensors: gpu.queue("encode", None, tensors)
        self.decode = self.decode_reduce = lambda *tensors: gpu.queue("decode", None, tensors)


def prepared(gpu, library):
    """What a plan calls in place of the codec and the driver: functions of C's that tell ``gpu``."""
    def encode(geometry, x, row_stride, frames, frame_stride, num_rows, skip, status, workspace, mail, stamp, stream):
        gpu.num_prepared += 1
        gpu.queue("encode", stream or 0, gpu.at(frames))
        if mail:
            gpu.queue("words", stream or 0)
        if mail and mail != MAIL:
            (ctypes.c_uint64 * WORLD).from_address(mail)[:] = [stamp << 32 | gpu.word] * WORLD
        elif mail:
            assert stamp not in gpu.told
            gpu.told[stamp] = gpu.now(stream or 0)
        return 0

    def decode(geometry, frames, *rest):
        gpu.num_prepared += 1
        gpu.queue("decode", rest[-1] or 0, gpu.at(frames))
        return 0

    def record(event, stream):
        gpu.events[event].seen = gpu.now(stream or 0)
        return 0

    def wait(stream, event, flags):                # no stream: the default one of the device that is current
        gpu.order(stream or ("another device's" if streams.current_device() else 0), gpu.events[event].seen)
        return 0

    def copy(to, source, num_bytes, stream):
        gpu.queue("copy", stream or 0)
        return 0

    def context(where):
        where[0] = 1 + streams.current_device()
        return 0

    def is_capturing(stream, status):
        status[0] = gpu.captures
        return 0

    p, i, u = ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint32
    signatures = ((encode, (p, p, i, p, i, i, i, p, p, p, u, p)), (decode, (p, p, i, p, i, i, i, p, p)),
                  (decode, (p, p, i, i, p, i, p, p, p)), (record, (p, p)), (wait, (p, p, u)),
                  (copy, (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, p)), (context, (ctypes.POINTER(p),)),
                  (is_capturing, (p, ctypes.POINTER(ctypes.c_int))))
    return LaunchCalls(library, *[ctypes.CFUNCTYPE(ctypes.c_int, *arguments)(function) for function, arguments in signatures])


def mailbox_of(gpu):
    """A real one of this process, rank 0, where the encode that is queued writes for all ranks, which have read everything."""
    class Writer:
        def open(self, memory, trial):
            self._at = ctypes.addressof(ctypes.c_char.from_buffer(memory))

        def address(self, entry, stream):
            return self._at + 8 * entry

    places, file = mailbox.Places(WORLD), os.memfd_create("words")
    os.ftruncate(file, places.num_bytes)
    box = mailbox.Mailbox(file, 0, WORLD, 60.0, writer=Writer(), neighbours=range(WORLD))
    for rank in range(1, WORLD):
        box.memory[places.mark(rank)] = 1 << 60
    return box


def nccl(gpu):
    """NCCL's functions, the same way, as ``nccl_direct.payload_functions`` gives them."""
    in_group = []

    def queue(stream, *places):
        gpu.num_sent += 1
        gpu.queue("payload", stream or 0, [gpu.at(place) for place in places])
        return 0

    def all_gather(own, out, count, dtype, communicator, stream):
        assert communicator == COMMUNICATOR and not in_group and count and out <= own < out + WORLD * count
        return queue(stream, own, out)

    def one_way(place, count, dtype, peer, communicator, stream):
        assert communicator == COMMUNICATOR and in_group == [1] and count and peer == 1
        return queue(stream, place)

    def group(*change):
        in_group[:] = change
        return 0

    p, i, n = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
    signatures = ((all_gather, (p, p, n, i, p, p)), (one_way, (p, n, i, i, p, p)), (one_way, (p, n, i, i, p, p)),
                  (lambda: group(1), ()), (lambda: group(), ()))
    gpu.nccl = [ctypes.CFUNCTYPE(i, *arguments)(function) for function, arguments in signatures]
    return (p * len(gpu.nccl))(*[ctypes.cast(function, p) for function in gpu.nccl])


class Group:
    group_name = "g"

    def __init__(self, gpu):
        self._payloads = Communicator(gpu, "payload")

    def rank(self):
        return 0

    def size(self):
        return WORLD

    def _get_backend(self, device):
        return self._payloads


def call_of(op, group):
    small = op in ("all_gather_into_tensor", "all_gather", "broadcast")
    data = torch.empty(ROW if small else WORLD * ROW, dtype=torch.bfloat16, device=GPU)
    if op in ("all_reduce", "broadcast"):
        return Call(op, data, data, group, root=1 if op == "broadcast" else None)
    output = torch.empty(ROW if "scatter" in op else WORLD * ROW, dtype=torch.bfloat16, device=GPU)
    return Call(op, output.split(ROW) if op in ("all_gather", "all_to_all") else output,
                data.split(ROW) if op in ("reduce_scatter", "reduce_scatter_uneven", "all_to_all") else data, group)


def begin(gpu, live, op, stream, group=None):
    """A call launched on ``stream``, with work of the caller's before and after it."""
    call = call_of(op, group or live.group)
    gpu.current = stream
    gpu.queue("input")
    work = live.run(call)
    assert work is not None
    gpu.queue("between")
    return work


def end(gpu, work, stream):
    gpu.current = stream
    work.wait()
    gpu.queue("read")
