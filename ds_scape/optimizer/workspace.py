"""Memory for what lives during one step only. A gradient that has entered the residual is not needed any more, and dense training has its
memory in any case: so that memory is used first, and the allocator's only where it does not suffice."""
import torch

#: What is handed out begins at a multiple of so many bytes.
ALIGNMENT = 64


class Rooms:
    """Which bytes of numbered blocks are free: the bookkeeping, without any memory."""

    def __init__(self):
        self._free: list[tuple[int, int, int]] = []             # (block, start, stop), ascending, none beside another

    def lend(self, block: int, start: int, stop: int) -> None:
        """These bytes are free from now on."""
        merged = []
        for room in sorted([*self._free, (block, start, stop)]):
            if merged and merged[-1][0] == room[0] and merged[-1][2] == room[1]:
                room = (room[0], merged.pop()[1], room[2])
            merged.append(room)
        self._free = [room for room in merged if room[1] < room[2]]

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


class Workspace:
    """Hands out tensors in memory that was lent to it. All work on them is on the current stream."""

    def __init__(self, device: torch.device, blocks: list[torch.Tensor]):
        """blocks: contiguous tensors whose memory may be lent; none: everything is the allocator's."""
        self._device = device
        self._blocks = [block.view(torch.uint8) for block in blocks if block.numel() and block.data_ptr() % ALIGNMENT == 0]
        self._numbers = {block.data_ptr(): i for i, block in enumerate(self._blocks)}
        self._rooms = Rooms()
        self.lends = bool(blocks)
        self.mark, self.release = self._rooms.mark, self._rooms.release

    def lend(self, block: torch.Tensor, start: int, stop: int) -> None:
        """From now on the elements [start, stop) of one of the blocks are overwritten."""
        number = self._numbers.get(block.data_ptr())
        if number is not None:
            self._rooms.lend(number, start * block.element_size(), stop * block.element_size())

    def give_back(self, tensor: torch.Tensor | None) -> None:
        """Something from empty() is not needed any more."""
        for number, block in enumerate(self._blocks if tensor is not None else ()):
            start = tensor.data_ptr() - block.data_ptr()
            if 0 <= start < len(block):
                self._rooms.lend(number, start, start + tensor.nbytes)

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
