"""The reference kernels in plain torch: the law for every other implementation. What the functions do: ops.py.

They run on any device and with any float dtype, and hold temporaries of the size of what they work on. Every operation rounds on its own,
in the order written: no fused multiply-add anywhere, here or in another implementation.
"""
import numpy
import torch

#: Elements converted at a time: 64 MiB in fp32.
CHUNK = 1 << 24
#: Squares that are added up side by side, in double precision: 4 MiB.
LANES = 1 << 19
#: Elements of a block of the index encoding.
BLOCK = 1 << 16
#: Keeps the score of a coordinate finite whose gradients were all zero.
SCORE_EPS = 1e-9
#: Positions in parts of so many elements and more have 8 bytes, in others 4, which are a number without a sign.
LONG = 1 << 32
_INT = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def empty_beside(tensor: torch.Tensor):
    """Makes tensors on its device: empty(numel, dtype)."""
    return lambda numel, dtype: torch.empty(numel, dtype=dtype, device=tensor.device)


# --- masks ------------------------------------------------------------------------------------------------------------------------------
def pack_mask(mask: torch.Tensor, dense: tuple, encoding: str, max_ones: int) -> torch.Tensor:
    free = mask & ~_ranges(dense, mask.numel(), mask.device)
    return pack_bits(free) if encoding == "bits" else pack_indices(free, max_ones)


def unpack_mask(message: torch.Tensor, numel: int, dense: tuple, encoding: str, sizes: tuple, counts: tuple):
    free = unpack_bits(message, numel) if encoding == "bits" else unpack_indices(message, numel)
    if free is None:
        return [], [-1] * len(sizes)
    parts = (free | _ranges(dense, numel, free.device)).split(sizes)
    found = [part.nonzero().view(-1).to(position_dtype(sizes)) for part in parts]
    return found, [len(positions) for positions in found]


def position_dtype(sizes) -> torch.dtype:
    """Of positions in parts of these sizes."""
    return torch.int32 if max(sizes, default=0) < LONG else torch.int64


def places(index: torch.Tensor) -> torch.Tensor:
    """int64, of positions of 4 bytes or of 8."""
    return index.to(torch.int64).bitwise_and_(0xFFFFFFFF) if index.dtype == torch.int32 else index


def _ranges(ranges, numel, device) -> torch.Tensor:
    positions = torch.zeros(numel, dtype=torch.bool, device=device)
    for start, stop in ranges:
        positions[start:stop] = True
    return positions


def pack_bits(mask: torch.Tensor) -> torch.Tensor:
    """bool [n] -> uint8 [ceil(n / 8)]."""
    padded = torch.nn.functional.pad(mask.view(torch.uint8), (0, -mask.numel() % 8)).view(-1, 8)
    weights = 1 << torch.arange(8, dtype=torch.uint8, device=mask.device)
    return (padded * weights).sum(1, dtype=torch.uint8)


def unpack_bits(packed: torch.Tensor, numel: int) -> torch.Tensor:
    """uint8 [ceil(n / 8)] -> bool [n]."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return (packed[:, None] >> shifts & 1).view(-1)[:numel].to(torch.bool)


def index_bytes(numel: int, max_ones: int) -> int:
    """Size of the index encoding of ``numel`` elements with at most ``max_ones`` ones."""
    return 4 * -(-numel // BLOCK) + 2 * max_ones


def pack_indices(mask: torch.Tensor, max_ones: int) -> torch.Tensor:
    """bool [n] -> uint8 [index_bytes(n, max_ones)]; unused offsets are 0."""
    blocks = torch.nn.functional.pad(mask, (0, -mask.numel() % BLOCK)).view(-1, BLOCK)
    offsets = mask.nonzero().view(-1) % BLOCK
    out = torch.zeros(index_bytes(mask.numel(), max_ones), dtype=torch.uint8, device=mask.device)
    counts = blocks.sum(1, dtype=torch.int32)
    out[:4 * len(counts)] = counts.view(torch.uint8)
    out[4 * len(counts):4 * len(counts) + 2 * len(offsets)] = offsets.to(torch.int16).view(torch.uint8)
    return out


def unpack_indices(packed: torch.Tensor, numel: int) -> torch.Tensor | None:
    """The inverse, bool [n]; offsets beyond n count for nothing. None where the blocks' counts do not fit the size."""
    num_blocks = -(-numel // BLOCK)
    counts = packed[:4 * num_blocks].clone().view(torch.int32).to(torch.int64)
    offsets = packed[4 * num_blocks:].clone().view(torch.int16).to(torch.int64) & BLOCK - 1
    if bool((counts < 0).any()) or int(counts.sum()) > offsets.numel():
        return None
    starts = torch.repeat_interleave(torch.arange(num_blocks, device=packed.device) * BLOCK, counts)
    mask = torch.zeros(num_blocks * BLOCK, dtype=torch.bool, device=packed.device)
    mask[starts + offsets[:len(starts)]] = True
    return mask[:numel]


# --- a worker's residual ------------------------------------------------------------------------------------------------------------------
def enter(residual: torch.Tensor, gradient: torch.Tensor | None, factor: float, index: torch.Tensor | None, values: torch.Tensor | None,
          first: int, square: torch.Tensor | None, own_start: int, beta2: float) -> None:
    if gradient is not None and square is not None:
        track_square(square, gradient[own_start:own_start + square.numel()], factor, beta2)
    if gradient is not None:
        for part, fresh in zip(residual.split(CHUNK), gradient.split(CHUNK), strict=True):
            part.add_(fresh if factor == 1.0 else scaled(fresh, factor, residual.dtype))
    if values is None:
        return
    if index is None:
        values.copy_(residual)
        residual.sub_(values)               # in the residual's precision, whatever the wire's
    else:
        at = places(index) - first
        before = residual[at]
        values.copy_(before)
        residual[at] = before.sub_(values)


def scaled(gradient: torch.Tensor, factor: float, dtype: torch.dtype) -> torch.Tensor:
    """``factor * gradient`` in ``dtype``, one rounding; ``gradient`` itself where that changes nothing."""
    return gradient.to(dtype) if factor == 1.0 else gradient.to(dtype, copy=True).mul_(factor)


def track_square(square: torch.Tensor, gradient: torch.Tensor, factor: float, beta2: float) -> None:
    own = scaled(gradient, factor, square.dtype)
    square.mul_(beta2).add_((own * own).mul_(1 - beta2))


def scatter(target: torch.Tensor, index: torch.Tensor, values: torch.Tensor) -> None:
    target[places(index)] = values


# --- ages that pass with a residual -------------------------------------------------------------------------------------------------------
def take_ages(last_sync: torch.Tensor, index: torch.Tensor | None, first: int, step: int, out: torch.Tensor) -> None:
    at = slice(None) if index is None else places(index) - first
    out.copy_(last_sync[at])
    last_sync[at] = stamp(step, last_sync.dtype)


def mark_overdue(rank_by: torch.Tensor, last_sync: torch.Tensor, step: int, max_age: int) -> None:
    upper, half = upper_halves(rank_by), 1 << 31            # of NaN too
    upper.bitwise_and_(half - 1)
    upper[ages(last_sync, step) >= max_age] |= -half


def upper_halves(x: torch.Tensor) -> torch.Tensor:
    """int32: the 32 bits with the sign, of floats of 4 or 8 bytes. A view."""
    return x.view(torch.int32)[x.element_size() // 4 - 1::x.element_size() // 4]


# --- the next mask ------------------------------------------------------------------------------------------------------------------------
def select(rank_by: torch.Tensor, square: torch.Tensor | None, last_sync: torch.Tensor, step: int, max_age: int,
           segments: tuple, chosen: torch.Tensor | None = None, empty=None, hints: dict | None = None) -> torch.Tensor:
    scores = rank_by if square is None else score_residual(rank_by, square)
    found = select_scores(scores, ages(last_sync, step) >= max_age, segments)
    return found if chosen is None else chosen.copy_(found)


def ages(last_sync: torch.Tensor, step: int) -> torch.Tensor:
    """int32: steps since the last synchronisation; where int16 is kept of that, modulo 65,536."""
    since = step - last_sync.to(torch.int32)
    return since if last_sync.dtype == torch.int32 else since & 0xFFFF


def stamp(step: int, dtype: torch.dtype) -> int:
    """What is kept of a step's number, in int16 or int32."""
    half = 1 << 8 * dtype.itemsize - 1
    return (step + half) % (2 * half) - half


def score_residual(residual: torch.Tensor, square: torch.Tensor) -> torch.Tensor:
    """|r| / (sqrt(q) + 1e-9), a new tensor."""
    return residual.abs().div_(root_(square.clone()).add_(SCORE_EPS))


def select_scores(scores: torch.Tensor, overdue: torch.Tensor, segments: tuple) -> torch.Tensor:
    """bool [P] from scores, float [P] >= 0 (the bits of such floats order like integers; NaN is above all), and overdue, bool [P]."""
    chosen = torch.zeros(scores.numel(), dtype=torch.bool, device=scores.device)
    for start, stop, count in segments:
        if count == stop - start:
            chosen[start:stop] = True
        elif count:
            # Keys: scores from the lowest integer up, overdue coordinates above all of them.
            key = scores[start:stop].abs().view(_INT[scores.element_size()]).to(torch.int64)
            key = torch.where(overdue[start:stop], key, key + torch.iinfo(torch.int64).min)
            last = torch.topk(key, count, sorted=False).values.min()
            above, equal = key > last, key == last
            chosen[start:stop] = above | equal & (equal.cumsum(0) <= count - above.sum())
    return chosen


# --- the norm -----------------------------------------------------------------------------------------------------------------------------
def sum_of_squares(tensor: torch.Tensor) -> torch.Tensor:
    lanes = min(LANES, 1 << (max(1, tensor.numel()) - 1).bit_length())
    sums = torch.zeros(lanes, dtype=torch.float64, device=tensor.device)
    for row in tensor.split(lanes):
        sums[:len(row)] += row.to(torch.float64, copy=True).square_()
    while len(sums) > 1:
        sums = sums[:len(sums) // 2].add_(sums[len(sums) // 2:])
    return sums


# --- the owner's step ---------------------------------------------------------------------------------------------------------------------
def owner_step(weight: torch.Tensor, momentum: torch.Tensor, last_sync: torch.Tensor, mean_value: torch.Tensor, index: torch.Tensor | None,
               step: int, tables: tuple, decay: torch.Tensor | None, lr: float, beta2: float, eps: float, catch_up: bool,
               out: torch.Tensor) -> None:
    index = None if index is None else places(index)
    w, m = (t if index is None else t[index] for t in (weight, momentum))
    is_whole = index is not None and last_sync.numel() == weight.numel()
    last = last_sync[index] if is_whole else last_sync
    catch_up_step(w, m, mean_value, ages(last, step - 1) + 1, tables, decay, lr=lr, beta2=beta2, eps=eps, catch_up=catch_up)
    last_sync[index if is_whole else slice(None)] = stamp(step, last_sync.dtype)
    if index is not None:
        weight[index], momentum[index] = w, m
    out.copy_(w)


def catch_up_step(weight: torch.Tensor, momentum: torch.Tensor, mean_value: torch.Tensor, age: torch.Tensor, tables: tuple,
                  decay: torch.Tensor | None, *, lr: float, beta2: float, eps: float, catch_up: bool = True) -> None:
    """The rule itself, in place, for coordinates [k] that lie together; age: int [k] >= 1."""
    if decay is not None:
        weight.mul_(decay[age.clamp(max=decay.numel() - 1)])
    counted = age.clamp(max=tables[0].numel() - 1) if catch_up else torch.ones_like(age)
    kept, taken, moved, gradient_moved = (table[counted] for table in tables)
    steps = counted.to(weight.dtype)
    gradient = mean_value / steps
    divisor = normaliser(momentum, mean_value * mean_value / steps, beta2=beta2, eps=eps)
    update = (moved * momentum).add_(gradient_moved * gradient).div_(divisor)
    weight.sub_(update.mul_(lr))
    momentum.mul_(kept).add_(taken.mul_(gradient))


def dense_step(weight: torch.Tensor, momentum: torch.Tensor, gradient: torch.Tensor, lr: float, kept: float, taken: float, beta2: float,
               eps: float, decay: float, correction: float) -> None:
    divide = correction if correction != 1.0 else None
    if divide is not None and weight.element_size() >= 4:
        # A tensor: by a plain number, torch divides on a CPU and multiplies with the reciprocal on a GPU.
        divide = torch.tensor(correction, dtype=weight.dtype, device=weight.device)
    divisor = normaliser(momentum if divide is None else momentum / divide, gradient * gradient, beta2=beta2, eps=eps)
    momentum.mul_(kept).add_(gradient * taken)
    update = (momentum if divide is None else momentum / divide) / divisor
    weight.mul_(decay).sub_(update.mul_(lr))


def normaliser(momentum: torch.Tensor, gradient_squared: torch.Tensor, *, beta2: float, eps: float) -> torch.Tensor:
    """sqrt(b2 * m^2 + (1 - b2) * g^2) + eps, a new tensor."""
    return root_((momentum * momentum).mul_(beta2).add_(gradient_squared * (1 - beta2))).add_(eps)


def root_(x: torch.Tensor) -> torch.Tensor:
    """The square root in place, rounded correctly. torch's own is not, on CPUs: it asks MKL, whose last bit is as it comes."""
    if x.device.type != "cpu" or x.element_size() < 4:
        return x.sqrt_()
    with numpy.errstate(invalid="ignore"):
        numpy.sqrt(x.numpy(), out=x.numpy())
    return x
