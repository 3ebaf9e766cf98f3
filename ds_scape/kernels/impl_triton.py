"""The Triton kernels as a kernel set: the bits of every other one, for GPUs without nvcc. Queued on the current stream; nothing
waits but who reads what unpack_mask counted.

With TRITON_INTERPRET=1 in the environment (before Triton is first imported) the kernels run on CPU tensors: slow, for tests.
"""
import functools

import torch

from ds_scape.kernels import cuda_plans as plans
from ds_scape.kernels.impl_reference import BLOCK, LANES, empty_beside, index_bytes, position_dtype
from zipscape.op_builder import triton_device

LOG_TILE, STEP, SPARSE = 12, 1024, 256         # elements of a program: of a residual (log2), of a step, of those at scattered places
#: Programs of passes that most often have nothing to do.
FEW = 2048


@functools.cache
def load():
    """Raises BuildError when Triton is not installed, there is no GPU for it, or it cannot build: it needs a C compiler at run time."""
    triton_device.device_type()
    return TritonKernels()


def _bits(t: torch.Tensor) -> torch.Tensor:
    """The same as integers."""
    return t.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[t.element_size()])


class TritonKernels:
    """A kernel set; ops.py has the contract."""

    def __init__(self):
        import triton

        from ds_scape.kernels.triton_launchers import LAUNCHERS, ceil_div
        self.built_by, self._run, self._ceil = f"Triton {triton.__version__}", LAUNCHERS, ceil_div
        for launcher in LAUNCHERS.values():
            # Triton 3.6's key of a kernel depends on those hashed before it in the process: in one order, the cache on disk has it.
            getattr(launcher.function, "cache_key", None)

    # --- masks --------------------------------------------------------------------------------------------------------------------------
    def pack_mask(self, mask, dense, encoding, max_ones):
        device, numel = mask.device, mask.numel()
        num_words = self._ceil(numel, 32)
        words = torch.empty(num_words, dtype=torch.int32, device=device)
        if numel:
            self._run["words_of_mask"]((self._ceil(num_words, 256),), (_bits(mask), words), (numel, num_words), (256,))
        self._fill(words, dense, 0)
        if encoding == "bits":
            return words.view(torch.uint8)[:self._ceil(numel, 8)]
        plan = plans.positions_plan((numel,), device)
        message = torch.zeros(index_bytes(numel, max_ones), dtype=torch.uint8, device=device)
        if numel:
            counts = message[:4 * len(plan.runs)].view(torch.int32)
            self._write_ones(words, plan, counts, max_ones, message[4 * len(plan.runs):].view(torch.int16))
        return message

    def unpack_mask(self, message, numel, dense, encoding, sizes, counts):
        device, num_blocks = message.device, self._ceil(numel, BLOCK)
        total, plan = sum(counts), plans.positions_plan(tuple(sizes), device)
        is_sound = torch.zeros(1, dtype=torch.int64, device=device)
        if encoding == "bits":
            words = torch.empty(self._ceil(numel, 32), dtype=torch.int32, device=device)
            words.view(torch.uint8)[:message.numel()].copy_(message)
        else:
            words = torch.zeros(num_blocks * (BLOCK // 32), dtype=torch.int32, device=device)
            message = message if message.data_ptr() % 4 == 0 else message.clone()
            room = (message.numel() - 4 * num_blocks) // 2
            ones, offsets = message[:4 * num_blocks].view(torch.int32), message[4 * num_blocks:][:2 * room].view(torch.int16)
            if numel:
                before = self._sums_before(ones, room)
                self._run["words_of_offsets"]((num_blocks,), (offsets, before, words), (num_blocks,), (1024,))
                is_sound = before[-1:]
        self._fill(words, dense, 1)
        positions = torch.empty(total, dtype=position_dtype(sizes), device=device)
        before = torch.zeros(1, dtype=torch.int64, device=device)
        if len(plan.runs):
            before = self._write_ones(words, plan, torch.empty(len(plan.runs), dtype=torch.int32, device=device), total, positions)
        return list(positions.split(counts)), plans.Ones(before, plan, is_sound)

    def _fill(self, words, ranges, value):
        if ranges:
            longest = max(stop - start for start, stop in ranges)
            self._run["fill"]((len(ranges), min(64, self._ceil(longest, 1 << 13))), (words, plans.ranges(tuple(ranges), words.device)), (),
                              (value, 256))

    def _sums_before(self, counts, room):
        before = torch.empty(len(counts) + 1, dtype=torch.int64, device=counts.device)
        self._run["sums_before"]((1,), (counts, before), (len(counts), room), (1024,))
        return before

    def _write_ones(self, words, plan, counts, room, out):
        """The runs' numbers of ones to ``counts``, the places of up to ``room`` ones to ``out``; how many lie before each run."""
        self._run["count_ones"]((len(plan.runs),), (words, plan.runs, counts), (), (1024,))
        before = self._sums_before(counts, 1 << 62)
        self._run["write_ones"]((len(plan.runs),), (words, plan.runs, plan.bases, before, out), (room,), (1024,))
        return before

    # --- a worker's residual ------------------------------------------------------------------------------------------------------------
    def enter(self, residual, gradient, factor, index, values, first, square, own_start, beta2):
        num, taken = residual.numel(), 0 if index is None else index.numel()
        if not num or gradient is None and values is None:
            return
        if gradient is None and index is not None:
            if taken:
                self._run["take"]((self._ceil(taken, SPARSE),), (residual, values, index), (taken, first), (SPARSE,))
            return
        num_tiles, take = self._ceil(num, 1 << LOG_TILE), 0 if values is None else 1 if index is None else 2 if taken else 0
        starts = residual
        if take == 2:
            starts = torch.empty(num_tiles + 1, dtype=torch.int64, device=residual.device)
            self._run["tile_starts"]((self._ceil(taken, SPARSE),), (index, starts), (taken, num_tiles, first), (LOG_TILE, SPARSE))
        has_square = square is not None and gradient is not None
        tensors = [residual if t is None else t for t in (residual, gradient, square, values, index)]
        sizes = (num, own_start, square.numel()) if has_square else (num, 0, 0)
        self._run["enter"]((num_tiles,), (*tensors, starts), (*sizes, first, factor, beta2, 1 - beta2),
                           (gradient is not None, has_square, take, LOG_TILE, SPARSE))

    def track_square(self, square, gradient, factor, beta2):
        if square.numel():
            self._run["track_square"]((self._ceil(square.numel(), STEP),), (square, gradient), (square.numel(), factor, beta2, 1 - beta2),
                                      (STEP,))

    def scatter(self, target, index, values):
        if index.numel():
            self._run["scatter"]((self._ceil(index.numel(), SPARSE),), (_bits(target), _bits(values), index), (index.numel(),), (SPARSE,))

    def take_ages(self, last_sync, index, first, step, out):
        if out.numel():
            self._run["take_ages"]((self._ceil(out.numel(), STEP),), (last_sync, out, out if index is None else index),
                                   (out.numel(), first, step), (index is not None, STEP))

    def mark_overdue(self, rank_by, last_sync, step, max_age):
        if rank_by.numel():
            self._run["mark_overdue"]((self._ceil(rank_by.numel(), STEP),), (rank_by, last_sync), (rank_by.numel(), step, max_age), (STEP,))

    # --- the owner's steps, the norm ----------------------------------------------------------------------------------------------------
    def owner_step(self, weight, momentum, last_sync, mean_value, index, step, tables, decay, lr, beta2, eps, catch_up, out):
        num, block = mean_value.numel(), 512 if index is None else SPARSE
        if not num:
            return
        longest = 0 if decay is None else decay.numel() - 1
        tensors = [mean_value if t is None else t for t in (weight, momentum, last_sync, mean_value, index, *tables, decay, out)]
        self._run["owner_step"]((self._ceil(num, block),), tuple(tensors),
                                (num, tables[0].numel() - 1, longest, step, lr, beta2, 1 - beta2, eps),
                                (index is not None, decay is not None, bool(catch_up), last_sync.numel() != weight.numel(), block))

    def dense_step(self, weight, momentum, gradient, lr, kept, taken, beta2, eps, decay, correction):
        num = weight.numel()
        if num:
            self._run["dense_step"]((self._ceil(num, STEP),), (weight, momentum, gradient),
                                    (num, lr, kept, taken, beta2, 1 - beta2, eps, decay, correction), (correction != 1.0, STEP))

    def sum_of_squares(self, tensor):
        num, result = tensor.numel(), torch.zeros(1, dtype=torch.float64, device=tensor.device)
        if not num:
            return result
        lanes = min(LANES, 1 << (num - 1).bit_length())
        sums = torch.empty(lanes, dtype=torch.float64, device=tensor.device)
        self._run["lane_sums"]((self._ceil(lanes, STEP),), (tensor, sums), (num, lanes), (STEP,))
        while lanes > 2048:
            lanes //= 16
            self._run["halve"]((self._ceil(lanes, SPARSE),), (sums,), (lanes,), (SPARSE,))
        self._run["last_halves"]((1,), (sums, result), (lanes,))
        return result

    # --- the next mask ------------------------------------------------------------------------------------------------------------------
    def select(self, rank_by, square, last_sync, step, max_age, segments, chosen=None, empty=None, hints=None):
        device, empty = rank_by.device, empty or empty_beside(rank_by)
        plan = plans.select_plan(segments, rank_by.numel(), device)
        chosen = torch.empty(rank_by.numel(), dtype=torch.bool, device=device) if chosen is None else chosen
        num_tiles, num_searches, flags = len(plan.search_of_tile), len(plan.searches), _bits(chosen)
        if len(plan.fills):
            self._run["fill_bytes"]((len(plan.fills), 32), (flags, plan.fills), (), (2048,))
        if not num_searches:
            return chosen
        room = 4 * self._ceil(num_tiles, 4)                                            # each part begins at a multiple of 16 bytes
        sizes = (8 * num_searches, plans.HISTOGRAM * num_searches, plans.MAX_NOTES * room, 16 * room, room, room)
        whole = empty(sum(sizes), torch.int32)
        state, histograms, notes, words, num_notes, num_equal = whole.split(sizes)
        whole[:sizes[0] + sizes[1]].zero_()
        data = (rank_by, rank_by if square is None else square, last_sync)
        place, kind = (plan.search_of_tile, plan.searches, state), square is not None
        for again in range(2):
            groups = [self._ceil(num_tiles, rows) if again == 0 else min(FEW, self._ceil(num_tiles, rows)) for rows in (32, 1)]
            self._run["sample"]((groups[0],), (*data, *place, histograms), (num_tiles, step, max_age, again), (kind, 32))
            self._run["set_bracket"]((num_searches,), (plan.searches, state, histograms), (again,))
            numbers = num_tiles, step, max_age, again
            self._run["clear"]((groups[1],), (*data, flags, *place, words), numbers, (kind,))
            self._run["unclear"]((groups[0],), (*data, flags, *place, histograms, words, notes, num_notes), numbers, (kind, 32))
            self._run["settle_two"]((num_searches,), (plan.searches, state, histograms), (again,))
        numbers, grid = (num_tiles, step, max_age), (self._ceil(num_tiles, 32),)
        self._run["third"](grid, (*data, *place, histograms, notes, num_notes), numbers, (kind, 32))
        self._run["settle_three"]((num_searches,), (state, histograms))
        self._run["equal"](grid, (*data, *place, notes, num_notes, num_equal), numbers, (kind, 32))
        self._run["equal_before"]((num_searches,), (plan.searches, state, num_equal), (), (1024,))
        self._run["finish"](grid, (*data, flags, *place, words, notes, num_notes, num_equal), numbers, (kind, 32))
        return chosen
