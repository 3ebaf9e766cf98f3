"""Moves bytes: payloads over the caller's own group, small agreements and resends over side channels of the same
ranks."""
import functools
import threading
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ds_zipccl.collectives import nccl_direct
from ds_zipccl.collectives.mailbox_meeting import Meeting
from ds_zipccl.collectives.place import Loan, place_of
from ds_zipccl.errors import CollectiveError
from zipscape import handshake
from zipscape.errors import describe

DIRECT_WORDS = True                 # past torch to NCCL, where torch gives its communicator away
CONNECTING = 16, 1 << 23            # bytes: of each rank; of all together
PAIRS_GATHER: bool | None = None    # for tests: in place of ``SideChannel.pair_gathers``'s own finding

# torch 2.13 renames these two; 2.11 knows only the old names
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def native_all_gather(out: torch.Tensor, own: torch.Tensor, group: dist.ProcessGroup) -> dist.Work:
    """torch's asynchronous all_gather_into_tensor."""
    return _all_gather(out, own, group=group, async_op=True)


def native_reduce_scatter(out: torch.Tensor, data: torch.Tensor, op, group: dist.ProcessGroup) -> dist.Work:
    """torch's asynchronous reduce_scatter_tensor."""
    return _reduce_scatter(out, data, op=op, group=group, async_op=True)


def direct(group: dist.ProcessGroup, device: torch.device):
    """What carries out the group's calls on ``device``, for payloads that are ours: torch's functions around it cost 50 to 100 us of checks
    and logging a call, the group's own methods still some for their way through the dispatcher. The group itself where there is none."""
    try:
        return group._get_backend(device)
    except (AttributeError, RuntimeError):
        return group


# ``group`` below: a process group, or what ``direct`` made of one.

def all_gather_bytes(out: torch.Tensor, own: torch.Tensor, group) -> dist.Work:
    """Asynchronous all-gather of equal uint8 pieces on ``group``; ``own`` may be this rank's slice of ``out``."""
    return group._allgather_base(out, own)


def all_to_all_bytes(out: torch.Tensor, rows: torch.Tensor, group, pieces=None) -> dist.Work:
    """Asynchronous all-to-all of equal uint8 pieces on ``group``. ``pieces``: from ``all_but``; then this rank's own piece stays as it is
    (GPU), since NCCL would copy it, while the link waits for the same processors."""
    if pieces is not None and out.is_cuda:
        return group.alltoall(*pieces)
    return group.alltoall_base(out, rows, [], [])


def all_but(own: int, out: torch.Tensor, rows: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """``pieces`` for ``all_to_all_bytes``: the rows of both [world, n], that of rank ``own`` empty."""
    return tuple([row[:0] if rank == own else row for rank, row in enumerate(t.unbind(0))] for t in (out, rows))


def broadcast_bytes(data: torch.Tensor, root: int, group) -> dist.Work:
    """Asynchronous broadcast of uint8 ``data`` on ``group`` from rank ``root`` of the group."""
    return group.broadcast([data], _from_root(root))


def _from_root(root: int, here: bool = False):
    options = c10d.BroadcastOptions()
    options.rootRank, options.rootTensor = root, 0
    if here:
        options.asyncOp = False
    return options


class Pieces(list):
    """Flat uint8 tensors, one per rank, with what an exchange asks of them: ``whole``, the one tensor that they are consecutive parts of
    (or None), and ``sizes``."""

    def __init__(self, tensors):
        super().__init__(tensors)
        self.whole, self.sizes = adjoining(self), [t.numel() for t in self]


def exchange_bytes(received: list[torch.Tensor], sent: list[torch.Tensor], group, whole: torch.Tensor | None = None) -> dist.Work:
    """Asynchronous exchange on ``group``: ``sent[r]`` goes to rank r, ``received[r]`` comes from it; flat uint8 of any sizes, ``Pieces``
    or lists. ``whole``: of two ranks, whose pieces have one size, an all-gather into it (``SideChannel.pair_gathers``): what this rank
    sends is its own row there, what it receives the other one.

    Meets a native all_to_all_single that has the same bytes in every pair, also one with equal splits. Pieces that lie one after another
    in memory are not copied; others are on a CPU.
    """
    if whole is not None:
        return group._allgather_base(whole, next(piece for piece in sent if piece.numel()))
    received, sent = (t if isinstance(t, Pieces) else Pieces(t) for t in (received, sent))
    whole_in, whole_out = received.whole, sent.whole
    if (whole_in is None or whole_out is None) and sent[0].is_cuda:
        return group.alltoall(received, sent)
    buffer = torch.empty(sum(received.sizes), dtype=torch.uint8, device=received[0].device) if whole_in is None else whole_in
    work = group.alltoall_base(buffer, torch.cat(sent) if whole_out is None else whole_out, received.sizes, sent.sizes)
    return work if whole_in is not None else _Unpacked(work, buffer, received)


def adjoining(pieces: list[torch.Tensor]) -> torch.Tensor | None:
    """The one flat tensor that the pieces are consecutive parts of, or None."""
    present = [piece for piece in pieces if piece.numel()]
    if not present:
        return pieces[0][:0]
    first, end = present[0], present[0].storage_offset()
    storage = first.untyped_storage().data_ptr()
    for piece in present:
        if piece.untyped_storage().data_ptr() != storage or piece.storage_offset() != end:
            return None
        end += piece.numel()
    return first.as_strided((end - first.storage_offset(),), (1,))


class _Unpacked(dist.Work):
    """An exchange (CPU) whose bytes go from one buffer to their places in the first ``wait``."""

    def __init__(self, work: dist.Work, buffer: torch.Tensor, pieces: list[torch.Tensor]):
        super().__init__()
        self._work, self._buffer, self._pieces = work, buffer, pieces

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._work.wait()
        for piece, data in zip(self._pieces, self._buffer.split([piece.numel() for piece in self._pieces]), strict=True):
            piece.copy_(data)
        self._buffer, self._pieces = self._buffer[:0], []
        return True


def group_timeout(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """How long the group itself waits for its ranks."""
    try:
        return group._get_backend(device).options._timeout
    except (AttributeError, RuntimeError):
        return c10d.default_pg_timeout


class SideChannel:
    """A communicator of its own over the ranks of ``group``, made from the group's store: no global state, no torch
    group. On a CPU ranks connect at their first message: making one waits for nobody, so ranks may come to their groups in different
    orders.

    Agreements go through one so that they neither wait behind payloads nor disturb their order; resends after an overflow through
    another, so that they cannot mix with calls on the group that do not pass through this library. Every rank of the group must construct
    it at the same point of its call sequence. ``purpose`` names it in the store. Status words go past the communicator where all ranks
    share memory (mailbox_meeting.py).
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, purpose: str = "side"):
        rank, size = group.rank(), group.size()
        self._rank, self._size, self._device, self._purpose = rank, size, device, purpose
        name, timeout = f"zipccl/{purpose}/{device.type}/{group.group_name}", group_timeout(group, device)
        self.timeout, self.where = timeout, f"group {group.group_name}, rank {rank} of {size}"
        self._place = place_of(group)
        # No key of the store is used twice. The store counts, not the process: a later group of the same name may have other ranks.
        self._keys = f"{name}/{size}/{handshake.next_meeting(self._place.store, rank, size, name=name)}"
        store = dist.PrefixStore(self._keys, self._place.store)
        self._connecting: Loan | None = None
        self._launched_works: list[dist.Work] = []      # of gloo's, which may wait in the store
        if device.type == "cpu":                # others wait for its address
            self._backend = self._gloo()
        self._tags, self._idle, self._options = {}, None, {}
        self._nccl: nccl_direct.Communicator | bool | None = None            # None: not asked for yet
        self._num_words_sent, self._connected, self._is_aborted = 0, False, False
        self._meeting = Meeting(rank, size, device, store, timeout.total_seconds(), group.group_name)

    @functools.cached_property
    def _backend(self):
        """On a GPU made when first used: never, where words go through shared memory and nothing overflows."""
        self._connecting = self._place.borrow(self._keys)           # NCCL waits there in its first call
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)       # not in one queue of the hardware with payloads
        options._timeout = self.timeout
        backend = self.__dict__["_backend"] = dist.ProcessGroupNCCL(self._connecting.store, self._rank, self._size, options)
        if self._is_aborted:                    # by another thread, which may have come too early to see it
            abort_backend(backend, self._device.type)
            raise CollectiveError(describe("a channel cannot be made", got="its group was aborted", where=self._keys))
        return backend

    def _gloo(self):
        options = dist.ProcessGroupGloo._Options()
        options._devices, options._timeout = [dist.ProcessGroupGloo.create_default_device(lazy_init=True)], self.timeout
        return dist.ProcessGroupGloo(self._loan.store, self._rank, self._size, options)

    @functools.cached_property
    def _loan(self) -> Loan:
        return self._place.borrow(self._keys)

    @property
    def store(self) -> dist.Store:
        """The group's, in which may be waited, for other keys of this channel's lifetime. Not from several threads at a time."""
        return self._loan.store

    def connect(self) -> None:
        """Connects all ranks now (GPU), for every kind of call where resends go, which the first one of its kind does otherwise."""
        if self._device.type == "cuda" and (self._purpose != "side" or self._box_at_once() is None):
            (few, many), resends = CONNECTING, self._purpose != "side"
            for numel in (few, max(few, many // self._size))[:1 + resends]:         # NCCL connects for the algorithm that suits the size
                own, rows = (torch.zeros(n, dtype=torch.uint8, device=self._device) for n in (numel, self._size * numel))
                out = torch.empty_like(rows)
                self.all_gather(out, own).wait()
                self.broadcast(out, 0).wait()
                if resends:                         # every pair of ranks
                    self.all_to_all(out, rows).wait()
            self._connected = True

    def pair_gathers(self) -> bool:
        """Whether two ranks exchange pieces of one size by an all-gather of what each has for the other: the same bytes. Over host memory
        and sockets NCCL's ring moves 6 to 25 % more of them in a second than its send and receive, over direct links fewer. All ranks of
        the group alike, who ask at the same point."""
        if PAIRS_GATHER is not None or self._size != 2:
            return bool(PAIRS_GATHER) and self._size == 2
        self._box_at_once()
        return self._device.type == "cuda" and not self._meeting.linked

    def all_gather(self, out: torch.Tensor, own: torch.Tensor) -> dist.Work:
        """Asynchronous; ``out`` [size * n], ``own`` [n]."""
        return self._launched(self._backend._allgather_base(out, own))

    def all_to_all(self, out: torch.Tensor, rows: torch.Tensor) -> dist.Work:
        """Asynchronous, equal pieces."""
        return self._launched(self._backend.alltoall_base(out, rows, [], []))

    def broadcast(self, data: torch.Tensor, root: int) -> dist.Work:
        """Asynchronous, from rank ``root`` of the group."""
        return self._launched(self._backend.broadcast([data], _from_root(root)))

    def _launched(self, work: dist.Work | None) -> dist.Work | None:
        """On a GPU all ranks have connected when the backend's first call returns; on a CPU calls may wait for them."""
        if self._connecting is not None:
            self._connecting.give_back()
            self._connecting = None
        elif self._device.type == "cpu":
            self._launched_works = [work, *(before for before in self._launched_works if not before.is_completed())]
        return work

    # Status words (``words.Words``), on a GPU queued on their stream. They go one way or the other on all ranks.

    @property
    def words_go_by(self) -> str:
        """"mailbox", or why they do not: a key of mailbox_meeting.REASONS."""
        return self._meeting.why_not or "mailbox"

    def _box_at_once(self):
        """The mailbox, or None. On a GPU the ranks now agree on it; all of them come here."""
        if not self._meeting.over and self._device.type == "cuda":
            self._meeting.now()
        return self._meeting.box

    def _box_for_gather(self, words):
        """The same; on a CPU gathers take the ranks towards an agreement."""
        if not self._meeting.over and self._device.type != "cuda":
            self._meeting.before_gather(words)
        return self._box_at_once()

    def gather_words(self, words, own: torch.Tensor) -> None:
        """One of each rank."""
        box = self._box_for_gather(words)
        if box is not None:
            words.by_mailbox(box.gather(own, words.stream_handle))
            return
        direct = self._direct()
        if direct is None:
            words.through(lambda: self._launched(self._backend._allgather_base(words.data, own, self._here(c10d.AllgatherOptions))))
        else:
            direct.all_gather(words.on_host(), own.data_ptr(), 1, words.stream_handle)

    def broadcast_word(self, words, own: torch.Tensor, root: int) -> None:
        """The root's ``own``, which is ``words.data``."""
        box = self._box_at_once()
        if box is not None:
            words.by_mailbox(box.broadcast(own, root, words.stream_handle))
            return
        direct = self._direct()
        if direct is None:
            words.through(lambda: self._launched(self._backend.broadcast([own], _from_root(root, here=self._has_here))))
        else:
            direct.broadcast(words.on_host(), own.data_ptr(), 1, root, words.stream_handle)

    def ring_box(self):
        """The mailbox, where the ranks have one by now."""
        return self._meeting.box

    # The same where this rank's word goes into the mailbox by itself, from the encode that is queued next: (address, stamp), see
    # ``mailbox.Mailbox``; ``words`` are then of that exchange. None: there is no mailbox.

    def post_to_all(self, words) -> tuple[int, int] | None:
        box = self._meeting.box or self._box_at_once()
        return None if box is None else words.posted(*box.post_to_all(words.launch_stream))

    def post_from(self, words, root: int) -> tuple[int, int] | None:
        box = self._meeting.box or self._box_at_once()
        return None if box is None else words.posted(*box.post_from(root, words.launch_stream))

    def post_to_one(self, words, out_counts: list[int], counts: list[int]) -> tuple[int, int] | None:
        """To one rank at most."""
        box = self._meeting.box or self._box_at_once()
        return None if box is None else words.posted(*box.post_to_one(counts, out_counts, words.launch_stream))

    def exchange_words(self, words, out: torch.Tensor, own: torch.Tensor, out_counts: list[int], counts: list[int]) -> None:
        """``counts[r]`` of ``own`` go to rank r, ``out_counts[r]`` come from it; both are parts of ``words.data``. At most one
        of each."""
        box = self._box_at_once()
        if box is not None:
            words.by_mailbox(box.exchange(own, counts, out_counts, words.stream_handle))
            return
        direct = self._direct()
        if direct is None:
            words.through(lambda: self._launched(
                self._backend.alltoall_base(out, own, out_counts, counts, self._here(c10d.AllToAllOptions))))
        else:
            direct.exchange(out.data_ptr(), own.data_ptr(), out_counts, counts, words.stream_handle)

    @property
    def _has_here(self) -> bool:
        return self._device.type == "cuda" and hasattr(c10d.AllgatherOptions, "asyncOp")

    def _here(self, kind):
        """Options for what is queued on the current stream itself, where torch can do that: then there is no Work to wait for."""
        options = self._options.get(kind)
        if options is None:
            options = self._options[kind] = kind()
            if self._has_here:
                options.asyncOp = False
        return options

    def _direct(self) -> nccl_direct.Communicator | None:
        """NCCL itself, from the second call on: the first, or ``connect``, makes torch connect the ranks."""
        if self._nccl is None and self._device.type == "cuda" and DIRECT_WORDS:
            if self._num_words_sent or self._connected:
                self._nccl = nccl_direct.communicator(self._backend) or False
            self._num_words_sent += 1
        return self._nccl or None

    def exchange_no_words(self, world_size: int) -> None:
        """Where other ranks exchange words and this one has none: NCCL leaves out pairs without words, gloo sends empty messages, so there
        every rank takes part."""
        if self._device.type == "cpu" and self._meeting.box is None:
            none = torch.empty(0, dtype=torch.int32, device="cpu")
            self._idle = self._launched(self._backend.alltoall_base(none, none, [0] * world_size, [0] * world_size))

    def exchange_pairs(self, received: dict[int, torch.Tensor], sent: dict[int, torch.Tensor]) -> None:
        """Sends ``sent[r]`` to rank r, fills ``received[r]`` from it; only a pair's two ends take part. Returns when done (GPU: queued)."""
        if not (received or sent):
            return
        if self._device.type == "cuda":
            empty = torch.empty(0, dtype=torch.uint8, device=self._device)
            pieces = [[part.get(r, empty) for r in range(self._size)] for part in (received, sent)]
            self._launched(self._backend.alltoall(*pieces)).wait()
            return
        works = [self._backend.recv([data], peer, self._tag(peer, self._rank)) for peer, data in received.items()]
        works += [self._backend.send([data], peer, self._tag(self._rank, peer)) for peer, data in sent.items()]
        for work in works:
            work.wait()

    def _tag(self, source: int, target: int) -> int:
        """Both ends count the messages of their pair: one that failed cannot be taken for the next."""
        self._tags[source, target] = self._tags.get((source, target), 0) + 1
        return self._tags[source, target] & 0x7FFFFFFF

    def close(self) -> None:
        """Ends the communicator. All ranks of the group at the same point, with nothing in flight."""
        if self._idle is not None:
            self._idle.wait()
            self._idle = None
        self._nccl = False
        self._meeting.end("its group was closed")
        if all([work.is_completed() for work in self._launched_works]):         # else gloo may wait in it still: nobody else's then
            for loan in (self._connecting, self.__dict__.get("_loan")):
                if loan is not None:
                    loan.give_back()
        shutdown = getattr(self.__dict__.get("_backend"), "shutdown", None)         # older torch: dropping the object ends it
        if shutdown is not None:
            shutdown()

    def abort(self) -> None:
        """Ends the communicator on this rank alone, whatever is in flight. Waits for nothing."""
        self._nccl, self._is_aborted = False, True
        self._meeting.end("its group was aborted")
        if "_backend" in self.__dict__:
            abort_backend(self._backend, self._device.type)


def abort_backend(backend: dist.distributed_c10d.Backend, device_type: str) -> threading.Thread | None:
    """Ends what it can of a backend, at once, in a thread that has the last reference; returns it if it is worth waiting for.

    Gloo's abort and its destructor wait for what is in flight until that times out. NCCL's frees memory, which waits for all kernels on the
    device, also for those of another communicator of the group that wait for a peer: all must be told to end before any has ended.
    """
    thread = threading.Thread(target=backend.abort, name="zipccl abort", daemon=True)
    thread.start()
    return thread if device_type == "cuda" else None
