"""Level 2 of the reference kernels: blocks of exponents to codes and streams, and back (docs/format.md, section 9). impl_reference.py does
the rest, which is the same at every level.

Blocks are [tile, block, 1024] in element order, int64; ``lo`` and ``mode`` [tile, block].
"""
import torch

BLOCK = 1024
CODE_BYTES = 256
MAX_STREAM_BYTES = 256 + 512 + 1024          # second codes, nibbles and raw exponents of a block of nothing else
STREAM_UNIT = 4                              # bytes
TOP_LO = 250                                 # the six exponents of the window end at 255
TOP_MODE = 5
CLASS_B, ZERO_SECOND, ZERO_FIRST = 1, 2, 4   # the bits of a block mode

# First codes 1, 2, 3 and second codes 1, 2, 3 as exponents above `lo`, by block mode; ZERO stands for the exponent 0.
ZERO = -1000
_CLASS_A, _CLASS_B = ((2, 3, 4), (0, 1, 5)), ((3, 4, 5), (0, 1, 2))
_WINDOWS = torch.tensor([_CLASS_A, _CLASS_B, (_CLASS_A[0], (ZERO, 1, 5)), (_CLASS_B[0], (ZERO, 1, 2)),
                         ((ZERO, 3, 4), (1, 2, 5)), ((ZERO, 3, 4), (1, 2, 5))], device="cpu")

# Element 256 j + 8 lane + 4 k + 2 w + h, the axes of a block: the orders in which second codes, then nibbles, follow each other.
_ELEMENTS = torch.arange(BLOCK, device="cpu").view(4, 32, 2, 2, 2)                  # j, lane, k, w, h
_SECOND_ORDER = _ELEMENTS.permute(1, 2, 4, 3, 0).flatten()            # lane, k, h, w, j
_NIBBLE_ORDER = _ELEMENTS.permute(1, 4, 3, 0, 2).flatten()            # lane, h, w, j, k


def _window(exponents: torch.Tensor, present: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    nonzero = ((exponents > 0) & present).sum(-1)
    total, squares = (exponents * present).sum(-1), (exponents * exponents * present).sum(-1)
    num_present = present.sum(-1)
    zeros = 1024 * (num_present - nonzero)
    zero_mode = torch.where(zeros > 170 * num_present, ZERO_FIRST, torch.where(zeros > 26 * num_present, ZERO_SECOND, 0))
    spread = nonzero * squares - total * total > 3 * nonzero * nonzero
    above = 32 * total - torch.where(spread, 31, 33) * nonzero
    usable, unit = (nonzero > 0) & (above >= 0), 32 * nonzero.clamp(min=1)
    base, rest = above // unit, above % unit
    class_b = usable & ~spread & (rest < 13 * nonzero)
    lo = torch.where(usable, base - 1 - class_b.to(torch.int64), 0).clamp(0, TOP_LO)
    return lo, class_b * CLASS_B | zero_mode


def _codes(exponents: torch.Tensor, lo: torch.Tensor, mode: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """First and second codes, 0 where the exponent has none. An exponent 0 that has a code of its own has no other."""
    values = torch.where(exponents == 0, ZERO, exponents - lo[..., None])
    distance = torch.where((mode >= ZERO_SECOND)[..., None], values, exponents - lo[..., None])
    windows = _WINDOWS.to(exponents.device)[mode]                                                # [tile, block, 2, 3]
    first, second = (sum((distance == windows[..., level, i, None]) * (i + 1) for i in range(3)) for level in range(2))
    return first, second


def _lowest(lo: torch.Tensor, mode: torch.Tensor) -> torch.Tensor:
    """The lowest exponent of the window: zeros with a code of their own take the place of ``lo``."""
    return lo + (mode >= ZERO_SECOND).to(torch.int64)


def _nibbles(exponents: torch.Tensor, lo: torch.Tensor, mode: torch.Tensor) -> torch.Tensor:
    """1: exponent 0, 2..10: the nine below the window, 11..15: the five above it, 0: another one."""
    below, above = exponents - _lowest(lo, mode)[..., None] + 9, exponents - lo[..., None] - 6
    far = torch.where((above >= 0) & (above < 5), above + 11, 0)
    return torch.where(exponents == 0, 1, torch.where((below >= 0) & (below < 9), below + 2, far))


def _pack_first(first: torch.Tensor) -> torch.Tensor:
    """[..., 1024] -> uint8 [..., 256]: byte w + 2 h of word k of a lane has its elements j = 0..3."""
    fields = first.unflatten(-1, (4, 32, 2, 2, 2))                                               # j, lane, k, w, h
    octets = sum(fields.select(-5, j) << 2 * j for j in range(4))                                # lane, k, w, h
    return octets.movedim((-3, -1), (-4, -2)).flatten(-4).to(torch.uint8)                        # k, lane, h, w


def _unpack_first(packed: torch.Tensor) -> torch.Tensor:
    """Inverse of _pack_first."""
    octets = packed.to(torch.int64).unflatten(-1, (2, 32, 2, 2)).movedim((-4, -2), (-3, -1))     # lane, k, w, h
    return torch.stack([octets >> 2 * j & 3 for j in range(4)], -5).flatten(-5)


def _parts(second_at: torch.Tensor, nibble_at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the nibbles (in nibbles) and the raw exponents (in bytes) of streams with so many second codes and nibbles begin."""
    first_nibble = (second_at + 1) // 2
    return first_nibble, (first_nibble + nibble_at + 1) // 2


def _rank(mask: torch.Tensor) -> torch.Tensor:
    """How many of the elements before are set."""
    return mask.cumsum(-1) - mask.to(torch.int64)


def encode_blocks(exponents: torch.Tensor, present: torch.Tensor, g):
    """See impl_reference._encode_blocks."""
    lo, mode = _window(exponents, present)
    exponents = torch.where(present, exponents, lo[..., None] + 3)
    first, second = _codes(exponents, lo, mode)
    order2, order3 = _SECOND_ORDER.to(exponents.device), _NIBBLE_ORDER.to(exponents.device)
    is_second = (first == 0)[..., order2]
    is_nibble = ((first == 0) & (second == 0))[..., order3]
    raws, nibbles = exponents[..., order3], _nibbles(exponents, lo, mode)[..., order3]
    is_raw = is_nibble & (nibbles == 0)
    first_nibble, first_raw = (t[..., None] for t in _parts(is_second.sum(-1), is_nibble.sum(-1)))
    counts = (first_raw[..., 0] + is_raw.sum(-1) + STREAM_UNIT - 1) // STREAM_UNIT * STREAM_UNIT

    # A stream in units of 2 bits, 4 a byte.
    fields = torch.zeros(*counts.shape, 4 * MAX_STREAM_BYTES, dtype=torch.uint8, device=exponents.device)
    start = torch.arange(counts.numel(), device=exponents.device).view(counts.shape)[..., None] * fields.shape[-1]
    parts = ((is_second, _rank(is_second), second[..., order2], 1), (is_nibble, 2 * (first_nibble + _rank(is_nibble)), nibbles, 2),
             (is_raw, 4 * (first_raw + _rank(is_raw)), raws, 4))
    for mask, at, values, num_fields in parts:
        at, values = (start + at)[mask], values[mask]
        for i in range(num_fields):
            fields.view(-1)[at + i] = (values >> 2 * i & 3).to(torch.uint8)
    octets = sum(fields[..., i::4] << 2 * i for i in range(4))
    inside = torch.arange(MAX_STREAM_BYTES, device=exponents.device) < counts[..., None]
    return lo, mode, _pack_first(first), counts, [tile[mask] for tile, mask in zip(octets, inside, strict=True)]


def decode_blocks(packed: torch.Tensor, lo: torch.Tensor, mode: torch.Tensor, counts: torch.Tensor,
                  stored: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Exponents of blocks, and the bytes that each one's stream turns out to have: another number than ``counts`` is corrupt.
    ``stored``: of each tile, all its streams."""
    index = torch.arange(MAX_STREAM_BYTES, device=packed.device)
    before = counts.cumsum(-1) - counts
    octets = torch.zeros(*counts.shape, MAX_STREAM_BYTES, dtype=torch.int64, device=packed.device)
    for tile, data in enumerate(stored):
        inside = index < counts[tile, :, None]
        octets[tile][inside] = data[(before[tile, :, None] + index)[inside]].to(torch.int64)
    fields = torch.stack([octets >> 2 * i & 3 for i in range(4)], -1).flatten(-2)
    windows = _WINDOWS.to(packed.device)[mode]

    first = _unpack_first(packed)
    order2, order3 = _SECOND_ORDER.to(packed.device), _NIBBLE_ORDER.to(packed.device)
    is_second = (first == 0)[..., order2]
    second = torch.empty_like(first)
    second[..., order2] = torch.where(is_second, fields.gather(-1, _rank(is_second)), 0)
    is_nibble = ((first == 0) & (second == 0))[..., order3]
    first_nibble, first_raw = (t[..., None] for t in _parts(is_second.sum(-1), is_nibble.sum(-1)))
    at = 2 * (first_nibble + _rank(is_nibble))
    nibbles = fields.gather(-1, at) | fields.gather(-1, at + 1) << 2
    is_raw = is_nibble & (nibbles == 0)
    raws = octets.gather(-1, first_raw + _rank(is_raw))
    lengths = (first_raw[..., 0] + is_raw.sum(-1) + STREAM_UNIT - 1) // STREAM_UNIT * STREAM_UNIT

    below, above = _lowest(lo, mode)[..., None] - 11 + nibbles, lo[..., None] - 5 + nibbles
    rare = torch.where(is_raw, raws, torch.where(nibbles == 1, 0, torch.where(nibbles < 11, below, above)))
    exponents = torch.empty_like(first)
    exponents[..., order3] = rare
    for codes, level in ((second, 1), (first, 0)):
        value = windows[..., level, :].gather(-1, (codes - 1).clamp(min=0))
        exponents = torch.where(codes > 0, torch.where(value == ZERO, 0, lo[..., None] + value), exponents)
    return exponents & 255, lengths
