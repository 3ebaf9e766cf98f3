"""The reference kernels in plain torch: the law for every other implementation, written to read like docs/format.md.

They run on any device and hold a few temporaries of 4 to 8 bytes an element for one group of tiles at a time.
"""
import torch

from ds_zipccl.errors import FrameError
from ds_zipccl.kernels import reference_level2 as level2
from ds_zipccl.kernels.geometry import Geometry
from ds_zipccl.kernels.rank_order import sum_in_order
from zipscape.errors import describe

BLOCK = 1024
ZERO_MODE = 1
ZERO_CODE = 7
SPILL_UNIT = 4               # bytes
CODE_BYTES = {1: 384, 2: level2.CODE_BYTES}          # of a block, by level
levels = (1, 2)
_INT_VIEW = {2: torch.int16, 4: torch.int32}


def _bits(x: torch.Tensor) -> torch.Tensor:
    """Bit patterns as non-negative int64."""
    return x.view(_INT_VIEW[x.element_size()]).to(torch.int64) & ((1 << 8 * x.element_size()) - 1)


def _from_bits(bits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    itemsize = dtype.itemsize
    half = 1 << (8 * itemsize - 1)
    return ((bits + half) % (2 * half) - half).to(_INT_VIEW[itemsize]).view(dtype)


def _scan_order(t: torch.Tensor) -> torch.Tensor:
    """[..., 1024] in element order -> [..., 32 lanes, 2 halves, 16 pairs]: the order of escapes."""
    return t.unflatten(-1, (4, 32, 4, 2)).movedim((-3, -1), (-4, -3)).flatten(-2)


def _element_order(t: torch.Tensor) -> torch.Tensor:
    """Inverse of _scan_order."""
    return t.unflatten(-1, (4, 4)).movedim((-4, -3), (-3, -1)).flatten(-4)


def _code_shifts(device) -> tuple[torch.Tensor, torch.Tensor]:
    """For (half, pair) and word k: the bit where the code sits, as [2, 16, 3], and which of its bits go there (a
    mask)."""
    shift = torch.zeros(2, 16, 3, dtype=torch.int64, device="cpu")
    mask = torch.zeros(2, 16, 3, dtype=torch.int64, device="cpu")
    for h in range(2):
        for p in range(15):
            shift[h, p, p % 3], mask[h, p, p % 3] = 3 * (p // 3) + 16 * h, 7
        for k in range(3):
            shift[h, 15, k], mask[h, 15, k] = 15 + 16 * h - k, 1 << k
    return shift.to(device), mask.to(device)


def _pack_codes(codes: torch.Tensor) -> torch.Tensor:
    """3-bit codes [..., 1024] in element order -> packed bytes [..., 384]."""
    shift, mask = _code_shifts(codes.device)
    words = ((_scan_order(codes)[..., None] & mask) << shift).sum((-3, -2))          # [..., lane, word]
    words = words.movedim(-1, -2).flatten(-2)                                        # word-major
    return torch.stack([words >> 8 * i & 255 for i in range(4)], -1).to(torch.uint8).flatten(-2)


def _unpack_codes(packed: torch.Tensor) -> torch.Tensor:
    """Inverse of _pack_codes."""
    shift, mask = _code_shifts(packed.device)
    octets = packed.to(torch.int64).unflatten(-1, (3, 32, 4))
    words = sum(octets[..., i] << 8 * i for i in range(4)).movedim(-2, -1)           # [..., lane, word]
    return _element_order(((words[..., None, None, :] >> shift) & mask).sum(-1))


def _window(exponents: torch.Tensor, present: torch.Tensor, g: Geometry) -> tuple[torch.Tensor, torch.Tensor]:
    """Window base and block mode, [..., 1] each, of blocks [..., 1024] (format.md, section 5)."""
    top = (1 << g.exponent_bits) - 8
    nonzero = ((exponents > 0) & present).sum(-1, keepdim=True)
    total = (exponents * present).sum(-1, keepdim=True)
    squares = (exponents * exponents * present).sum(-1, keepdim=True)
    num_present = present.sum(-1, keepdim=True)
    mode = ((num_present - nonzero) * 1024 > 26 * num_present).to(torch.int64)
    if g.window_lo >= 0:
        return (g.window_lo + mode).clamp(max=top), mode
    spread = nonzero * squares - total * total > 3 * nonzero * nonzero
    tenths = torch.where(mode == ZERO_MODE, torch.where(spread, 29, 34), torch.where(spread, 36, 43))
    lo = torch.div(10 * total - tenths * nonzero, (10 * nonzero).clamp(min=1), rounding_mode="floor")
    return torch.where(nonzero > 0, lo, 0).clamp(0, top), mode


def _codes(exponents: torch.Tensor, lo: torch.Tensor, mode: torch.Tensor) -> torch.Tensor:
    distance = exponents - lo
    width = 7 - mode
    codes = torch.where((distance >= 1) & (distance <= width), distance, 0)
    return torch.where((mode == ZERO_MODE) & (exponents == 0), ZERO_CODE, codes)


def _tiles(frame: torch.Tensor, g: Geometry, first: int, count: int, last: bool):
    """Views of the sections of ``count`` equal tiles: tile headers, block headers, slots, codes, extra codes, byte
    planes."""
    nb = g.last_blocks if last else g.tile_blocks
    escapes, codes, extra, planes = (
        (g.last_escapes_offset, g.last_codes_offset, g.last_extra_offset, g.last_planes_offset) if last else
        (g.escapes_offset, g.codes_offset, g.extra_offset, g.planes_offset))
    end = planes + BLOCK * g.byte_planes * nb
    start = g.tiles_offset + first * g.tile_bytes
    tiles = frame.narrow(0, start, count * end).view(count, end)
    return (tiles[:, :16], tiles[:, 16:escapes].unflatten(1, (nb, 4)), tiles[:, escapes:codes],
            tiles[:, codes:extra].unflatten(1, (nb, CODE_BYTES[g.level])),
            tiles[:, extra:planes].unflatten(1, (nb, 384)) if g.extra_plane else None,
            tiles[:, planes:].unflatten(1, (nb, g.byte_planes, BLOCK)))


def _u32_bytes(values: torch.Tensor) -> torch.Tensor:
    return torch.stack([values >> 8 * i & 255 for i in range(4)], -1).to(torch.uint8)


def _u32(octets: torch.Tensor) -> torch.Tensor:
    return sum(octets[..., i].to(torch.int64) << 8 * i for i in range(4))


def _runs(g: Geometry, group: int):
    """The group's tiles as (first tile, count, is the frame's last tile): tiles of one run have equal size."""
    first, end = group * g.group_tiles, min((group + 1) * g.group_tiles, g.num_tiles)
    if end < g.num_tiles:
        return [(first, end - first, False)]
    return [run for run in ((first, end - 1 - first, False), (end - 1, 1, True)) if run[1]]


def _pool(frame: torch.Tensor, g: Geometry, group: int) -> torch.Tensor:
    size = g.last_pool_bytes if group == g.num_groups - 1 else g.pool_bytes
    return frame.narrow(0, g.pools_offset + group * g.pool_bytes, size)


def _encode_blocks(exponents: torch.Tensor, present: torch.Tensor, g: Geometry):
    """Window bases, block modes [tile, block] and packed codes [tile, block, bytes] of blocks [tile, block, 1024]; then what goes to the
    slots: its bytes per block [tile, block], and each tile's own."""
    lo, mode = _window(exponents, present, g)
    codes = torch.where(present, _codes(exponents, lo, mode), 1)
    escaped = _scan_order(codes == 0).flatten(1)                     # [tile, block * lane * half * pair]
    scanned = _scan_order(exponents).flatten(1)
    return lo[..., 0], mode[..., 0], _pack_codes(codes), (codes == 0).sum(-1), [e[m].to(torch.uint8)
                                                                               for e, m in zip(scanned, escaped, strict=True)]


def _encode_run(x: torch.Tensor, frame: torch.Tensor, g: Geometry, run) -> tuple[list[torch.Tensor], int]:
    """Writes one run of tiles but for spill offsets; returns each tile's escapes and the run's need."""
    first, count, last = run
    nb = g.last_blocks if last else g.tile_blocks
    head, block_head, slots, codes_out, extra_out, planes_out = _tiles(frame, g, first, count, last)
    start = first * g.tile_blocks * BLOCK
    data = x[start:start + count * nb * BLOCK]
    absent = count * nb * BLOCK - data.numel()
    bits = torch.nn.functional.pad(_bits(data), (0, absent)).view(count, nb, BLOCK)
    present = (torch.arange(count * nb * BLOCK, device=x.device) < data.numel()).view(count, nb, BLOCK)
    exponents = bits >> g.mantissa_bits & ((1 << g.exponent_bits) - 1)
    remainder = bits >> (g.exponent_bits + g.mantissa_bits) << g.mantissa_bits | bits & ((1 << g.mantissa_bits) - 1)

    encode_blocks = level2.encode_blocks if g.level == 2 else _encode_blocks
    lo, mode, codes, counts, escapes = encode_blocks(exponents, present, g)
    codes_out.copy_(codes)
    if extra_out is not None:
        extra_out.copy_(_pack_codes(remainder >> 8))
    for plane in range(g.byte_planes):
        planes_out[:, :, plane] = (remainder >> 8 * plane & 255).to(torch.uint8)

    block_head.copy_(_u32_bytes(lo | mode << 8 | counts << 16))
    head.zero_()
    head[:, :4] = _u32_bytes(counts.sum(-1))
    slots.zero_()
    for t, e in enumerate(escapes):
        slots[t, :min(e.numel(), slots.shape[1])] = e[:slots.shape[1]]
    need = int((-(-counts.sum(-1) // nb)).max())
    return escapes, need


def _encode_frame(x: torch.Tensor, frame: torch.Tensor, g: Geometry) -> int:
    """Encodes one frame; returns its status word."""
    overflow, need, spill_need = False, 0, 0
    for group in range(g.num_groups):
        pool, used = _pool(frame, g, group), 0
        pool.zero_()
        for run in _runs(g, group):
            escapes, run_need = _encode_run(x, frame, g, run)
            need = max(need, run_need)
            head = _tiles(frame, g, *run)[0]
            capacity = g.last_escapes_capacity if run[2] else g.escapes_capacity
            for t, e in enumerate(escapes):
                spill = e[capacity:]
                if spill.numel():
                    head[t, 4:8] = _u32_bytes(torch.tensor(used, device=x.device))
                    if used + spill.numel() <= pool.numel():
                        pool[used:used + spill.numel()] = spill
                    else:
                        overflow = True
                    used += spill.numel()
        num_tiles = min(g.group_tiles, g.num_tiles - group * g.group_tiles)
        spill_need = max(spill_need, -(-used // (SPILL_UNIT * num_tiles)))
    status = need | overflow << 16 | spill_need << 17
    header = bytearray(g.header)
    header[20:24] = status.to_bytes(4, "little")
    frame[:len(header)] = torch.frombuffer(header, dtype=torch.uint8).to(frame.device)
    return status


def encode(x: torch.Tensor, frames: torch.Tensor, status: torch.Tensor, g: Geometry, skip: int = -1) -> None:
    """See kernels/ops.py."""
    words = [_encode_frame(x[i], frames[i], g) for i in range(x.shape[0]) if i != skip]
    fields = [[word & mask for word in words] for mask in (0xFFFF, 1 << 16, 0x7FFF << 17)]
    status.fill_(sum(max(field, default=0) for field in fields))


def _corrupt(what: str, **detail) -> FrameError:
    return FrameError(describe(f"corrupt frame: {what}", **detail))


def _stored(slots: torch.Tensor, pool: torch.Tensor, totals: list[int], offsets: list[int], g: Geometry, first: int) -> list[torch.Tensor]:
    """Of each of a run's tiles, the bytes in its slots and in its group's sub-pool, one after the other."""
    stored = []
    for t, (num, offset) in enumerate(zip(totals, offsets, strict=True)):
        spill = max(num - slots.shape[1], 0)
        if spill and (offset + spill > pool.numel() or g.level == 2 and offset % level2.STREAM_UNIT):
            within = ", or starts within a word" if g.level == 2 else ""
            raise _corrupt(f"a tile's spill lies outside its sub-pool{within}", got=offset + spill, expected=f"<= {pool.numel()}",
                           where=f"tile {first + t}")
        stored.append(torch.cat([slots[t, :num], pool[offset:offset + spill]]))
    return stored


def _decode_blocks(codes: torch.Tensor, lo: torch.Tensor, mode: torch.Tensor, stored: list[torch.Tensor]) -> torch.Tensor:
    """Exponents of blocks from codes [tile, block, 1024] and each tile's escapes."""
    exponents = torch.where((mode == ZERO_MODE) & (codes == ZERO_CODE), 0, lo + codes)
    scanned, escaped = _scan_order(exponents).flatten(1), _scan_order(codes == 0).flatten(1)
    for t, escapes in enumerate(stored):
        if escapes.numel():
            scanned[t] = scanned[t].masked_scatter(escaped[t], escapes.to(torch.int64))
    return _element_order(scanned.unflatten(1, (codes.shape[1], 32, 2, 16)))


def _decode_run(frame: torch.Tensor, pool: torch.Tensor, g: Geometry, run) -> torch.Tensor:
    """The bit patterns, int64 [elements], of one run of tiles."""
    first, count, last = run
    head, block_head, slots, codes_in, extra_in, planes_in = _tiles(frame, g, first, count, last)
    words = _u32(block_head)
    lo, mode, counts = (words & 255)[..., None], (words >> 8 & 255)[..., None], words >> 16
    totals, where = _u32(head[:, :4]), f"tiles {first}..{first + count - 1}"
    codes = _unpack_codes(codes_in) if g.level == 1 else None
    if codes is not None and not torch.equal(counts, (codes == 0).sum(-1)):
        raise _corrupt("a block's escape count differs from its codes", where=where)
    if not torch.equal(totals, counts.sum(-1)):
        raise _corrupt("a tile's escape count differs from its blocks'", where=where)
    top_lo, top_mode = ((1 << g.exponent_bits) - 8, ZERO_MODE) if g.level == 1 else (level2.TOP_LO, level2.TOP_MODE)
    if bool((mode > top_mode).any()) or bool((lo > top_lo).any()):
        raise _corrupt("block mode or window base out of range", where=where)
    stored = _stored(slots, pool, totals.tolist(), _u32(head[:, 4:8]).tolist(), g, first)
    if codes is None:
        exponents, lengths = level2.decode_blocks(codes_in, lo[..., 0], mode[..., 0], counts, stored)
        if not torch.equal(counts, lengths):
            raise _corrupt("a block's stream is not as long as its header says", where=where)
    else:
        exponents = _decode_blocks(codes, lo, mode, stored)

    remainder = torch.zeros_like(exponents)
    for plane in range(g.byte_planes):
        remainder |= planes_in[:, :, plane].to(torch.int64) << 8 * plane
    if extra_in is not None:
        remainder |= _unpack_codes(extra_in) << 8
    sign, mantissa = remainder >> g.mantissa_bits, remainder & ((1 << g.mantissa_bits) - 1)
    bits = sign << (g.exponent_bits + g.mantissa_bits) | exponents << g.mantissa_bits | mantissa
    return bits.flatten()


def _decode_frame(frame: torch.Tensor, out: torch.Tensor, g: Geometry) -> None:
    check_header(bytes(frame[:128].tolist()), g)
    for group in range(g.num_groups):
        pool = _pool(frame, g, group)
        for run in _runs(g, group):
            bits = _decode_run(frame, pool, g, run)
            start = run[0] * g.tile_blocks * BLOCK
            part = out[start:start + bits.numel()]
            part.copy_(_from_bits(bits[:part.numel()], out.dtype))


def check_header(data: bytes, g: Geometry) -> None:
    """Raises FrameError unless the header is the geometry's own, without overflow. A given window (byte 7) is its writer's: any valid
    one will do, at level 2 none."""
    top = (1 << g.exponent_bits) - 7 if g.level == 1 else 0
    if data[7] > top:
        raise _corrupt("its given window is out of range", got=f"byte 7 = {data[7]}", expected=f"<= {top}")
    if data[:7] != g.header[:7] or data[8:20] != g.header[8:20] or data[24:] != g.header[24:]:
        at = next(i for i in range(128) if data[i] != g.header[i] and i != 7 and not 20 <= i < 24)
        raise _corrupt("its header is not what this call expects", got=f"byte {at} = {data[at]}", expected=g.header[at])
    if data[22] & 1:
        raise _corrupt("it is marked as overflowed", got=data[20:24].hex(), expected="bit 16 clear")


def decode(frames: torch.Tensor, out: torch.Tensor, g: Geometry, skip: int = -1) -> None:
    """See kernels/ops.py."""
    for i in range(out.shape[0]):
        if i != skip:
            _decode_frame(frames[i], out[i], g)


def _rows_in_order(frames: torch.Tensor, own: torch.Tensor, own_index: int, g: Geometry):
    for i in range(frames.shape[0]):
        part = own
        if i != own_index:
            part = torch.empty_like(own)
            _decode_frame(frames[i], part, g)
        yield part


def decode_reduce(frames: torch.Tensor, own: torch.Tensor, own_index: int, out: torch.Tensor, g: Geometry) -> None:
    """See kernels/ops.py."""
    sum_in_order(_rows_in_order(frames, own, own_index, g), out)
