"""Memory for what lives during one step only. A gradient that has entered the residual is not needed any more, and dense training has its
memory in any case: so that memory is used first, and the allocator's only where it does not suffice."""
import itertools

import torch

#: What is handed out begins at a multiple of so many bytes.
ALIGNMENT = 64


class Rooms:
    """Which bytes of numbered blocks are free: the bookkeeping, without any memory."""

    def __init__(self):
        self._free: list[tuple[int, int, int]] = []             # (block, start, stop), ascending, none beside another

    def lend(self, block: int, start: int, stop: int) -> None:
        """These bytes are free from now on, none of which was: what is free twice would be handed out twice."""
        merged = []
        for room in sorted([*self._free, (block, start, stop)] if start < stop else self._free):
            if merged and merged[-1][0] == room[0] and merged[-1][2] >= room[1]:
                assert merged[-1][2] == room[1], "memory is given back that is free already"
                room = (room[0], merged.pop()[1], room[2])
            merged.append(room)
        self._free = merged

    def take(self, num_bytes: int, tight: int = ALIGNMENT, at_end: bool = False) -> tuple[int, int] | None:
        """(block, start) in the smallest room in which ``num_bytes`` fit, at its beginning or at its end; None: there is none. tight: the
        alignment that will do where they do not fit otherwise."""
        return self._take(num_bytes, ALIGNMENT, at_end) or (self._take(num_bytes, tight, at_end) if tight < ALIGNMENT else None)

    def _take(self, num_bytes: int, alignment: int, at_end: bool) -> tuple[int, int] | None:
        fitting = []
        for i, (block, start, stop) in enumerate(self._free):
            begin = (stop - num_bytes) // alignment * alignment if at_end else -(-start // alignment) * alignment
            if start <= begin and begin + num_bytes <= stop:
                fitting.append((stop - start, i, block, begin, stop))
        if not fitting:
            return None
        _, i, block, begin, stop = min(fitting)
        rest = (block, self._free[i][1], begin), (block, begin + num_bytes, stop)
        self._free[i:i + 1] = [room for room in rest if room[1] < room[2]]
        return block, begin

    def mark(self) -> list:
        """For release()."""
        return list(self._free)

    def release(self, mark: list) -> None:
        """What was taken since ``mark`` is free again; nothing was lent in between."""
        self._free = list(mark)


def starts_of(sizes: list[int]) -> list[int]:
    """Where blocks of so many bytes begin that lie one after another, and where the last one ends."""
    return list(itertools.accumulate((-(-size // ALIGNMENT) * ALIGNMENT for size in sizes), initial=0))


def joined(like: list[torch.Tensor], dtype: torch.dtype) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Zeros as long as these tensors, one after another in one: what is lent of neighbours is then one room. (All of it, its parts.)"""
    starts = [start // dtype.itemsize for start in starts_of([t.numel() * dtype.itemsize for t in like])]
    whole = torch.zeros(starts[-1], dtype=dtype, device=like[0].device)
    return whole, parts_of(whole, like)


def parts_of(whole: torch.Tensor, like: list[torch.Tensor]) -> list[torch.Tensor]:
    """The parts of what joined() made."""
    starts = starts_of([t.numel() * whole.itemsize for t in like])
    return [whole[start // whole.itemsize:][:t.numel()] for start, t in zip(starts, like, strict=False)]


class Workspace:
    """Hands out tensors in memory that was lent to it. All work on them is on the current stream."""

    def __init__(self, device: torch.device, blocks: list[torch.Tensor]):
        """blocks: contiguous tensors whose memory may be lent, those that lie together in order; none: everything is the allocator's."""
        self._device = device
        self._blocks, self._places = [], {}                 # places: {address: (number of a block, where in it, where the next one is)}
        usable = [block.view(torch.uint8) for block in blocks if block.numel() and block.data_ptr() % ALIGNMENT == 0]
        for block in usable:
            before, start = self._blocks[-1] if self._blocks else None, block.data_ptr()
            gap = ALIGNMENT if before is None else start - before.data_ptr() - len(before)
            if 0 <= gap < ALIGNMENT and before.untyped_storage().data_ptr() == block.untyped_storage().data_ptr():
                last = next(reversed(self._places))
                self._blocks[-1] = before = before.as_strided((len(before) + gap + len(block),), (1,))
                self._places[last] = *self._places[last][:2], start - before.data_ptr()
            else:
                self._blocks.append(block)
            begin = start - self._blocks[-1].data_ptr()
            self._places[start] = len(self._blocks) - 1, begin, begin + len(block)
        self._rooms = Rooms()
        self.lends = bool(blocks)
        self.mark, self.release = self._rooms.mark, self._rooms.release

    def lend(self, block: torch.Tensor, start: int, stop: int) -> None:
        """From now on the elements [start, stop) of one of the blocks are overwritten."""
        if block.data_ptr() in self._places and block.numel():
            number, begin, following = self._places[block.data_ptr()]
            end = begin + stop * block.element_size() if stop < block.numel() else following
            self._rooms.lend(number, begin + start * block.element_size(), end)

    def give_back(self, *tensors: torch.Tensor) -> None:
        """Some from empty() are not needed any more."""
        for tensor, (number, block) in itertools.product(tensors, enumerate(self._blocks)):
            start = tensor.data_ptr() - block.data_ptr()
            if 0 <= start < len(block):
                self._rooms.lend(number, start, start + tensor.nbytes)

    def for_exchange(self, sent: torch.Tensor, splits: list[int], rank: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, list]:
        """(where every rank's values come in, [at least W * k]; the message of weights, of ``dtype``, as long as the longest; what is to be
        given back): the first two are the same memory from the beginning on, if they can be. A value is not needed any more when the weight
        is known that takes its place. With one rank ``sent`` is what comes in."""
        ranks, longest = len(splits), max(splits) * dtype.itemsize
        is_one = sent.itemsize >= dtype.itemsize
        num = max(ranks * splits[rank], -(-longest // sent.itemsize) if is_one else 0)
        room = sent if ranks == 1 else self.empty(num, sent.dtype)
        if is_one:
            return room, room.view(torch.uint8)[:longest].view(dtype), [room]
        message = self.empty(max(splits), dtype, is_tight=True)
        return room, message, [room, message]

    def has_room(self, *sizes: int) -> bool:
        """Whether so many bytes each would all be in lent memory."""
        mark = self.mark()
        has_room = all(self._rooms.take(num_bytes) is not None for num_bytes in sizes)
        self.release(mark)
        return has_room

    def empty(self, numel: int, dtype: torch.dtype, is_tight: bool = False, at_end: bool = False) -> torch.Tensor:
        """[numel], not initialised. is_tight: may be aligned to its elements only, where it does not fit otherwise. at_end: of the room."""
        place = self._rooms.take(numel * dtype.itemsize, dtype.itemsize if is_tight else ALIGNMENT, at_end) if numel else None
        if place is None:
            return torch.empty(numel, dtype=dtype, device=self._device)
        block, start = place
        return self._blocks[block][start:start + numel * dtype.itemsize].view(dtype)
