"""Shared by the codec's tests: adversarial data, canaries, and one round trip that checks everything."""
import pytest
import torch

from ds_zipccl.codec import format as fmt
from ds_zipccl.codec.codec import Codec, compress, decompress, split_status
from ds_zipccl.codec.dtypes import BY_TORCH, TABLE
from tests.helpers.bits import assert_same_bits, gaussian, random_bits

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = pytest.mark.parametrize("dtype", (BF16, FP16, FP32), ids=("bf16", "fp16", "fp32"))
LEVELS = pytest.mark.parametrize("level", (1, 2), ids=("level1", "level2"))
FORMATS = pytest.mark.parametrize("dtype, level", [(row.torch_dtype, level) for row in TABLE for level in row.levels],
                                  ids=[f"{row.name}-level{level}" for row in TABLE for level in row.levels])
CANARY = 0xA5
GUARD = 256


class Guarded:
    """``data`` [num_elems] of a dtype, its bytes 0xAA, ``offset`` elements behind an aligned address, between canaries."""

    def __init__(self, num_elems: int, dtype=torch.uint8, offset: int = 0):
        itemsize = torch.empty((), dtype=dtype).element_size()
        self._bytes = num_elems * itemsize
        self._first = GUARD + offset * itemsize
        self._all = torch.full((self._first + -(-self._bytes // itemsize) * itemsize + GUARD,), CANARY, dtype=torch.uint8)
        inner = self._all[self._first:self._first + self._bytes]
        inner.fill_(0xAA)
        self.data = inner.view(dtype)

    def assert_untouched(self, where: str = "") -> None:
        end = self._first + self._bytes
        before, after = self._all[:self._first], self._all[end:]
        assert bool((before == CANARY).all()), f"{where}: written before the buffer"
        assert bool((after == CANARY).all()), f"{where}: written past the buffer"


def guarded_copy(x: torch.Tensor, offset: int = 0) -> torch.Tensor:
    """A contiguous copy of ``x``, flat, ``offset`` elements behind an aligned address."""
    copy = Guarded(x.numel(), x.dtype, offset).data
    copy.view(torch.uint8).copy_(x.contiguous().view(-1).view(torch.uint8))
    return copy


def zip_frame(x: torch.Tensor, kernels: str, capacity=(None, fmt.DEFAULT_SPILL_PER_TILE), window_lo: int = -1,
              level: int = 1) -> torch.Tensor:
    """A zipped frame of flat ``x``, raw or not paying notwithstanding; the capacity the data needs when this one overflows."""
    for _ in range(2):
        codec = Codec.of(x.dtype, x.numel(), "cpu", escapes_per_block=capacity[0], spill_per_tile=capacity[1],
                         window_lo=window_lo, level=level, kernels=kernels)
        frame, status = Guarded(codec.frame_bytes), torch.full((1,), -1, dtype=torch.int32)
        codec.encode(x.view(1, -1), frame.data.view(1, -1), status)
        frame.assert_untouched(f"{kernels}: frame of {x.numel()} x {x.dtype}")
        overflow, need = split_status(int(status))
        if not overflow:
            return frame.data
        capacity = (need, capacity[1])
    raise AssertionError(f"{kernels}: a frame with the capacity that was asked for overflowed")


def unzip(frame: torch.Tensor, like: torch.Tensor, kernels: str, offset: int = 0) -> torch.Tensor:
    """The frame decoded into 0xAA bytes between canaries."""
    out = Guarded(like.numel(), like.dtype, offset)
    decompress(frame, out.data, kernels=kernels)
    out.assert_untouched(f"{kernels}: output of {like.numel()} x {like.dtype}")
    return out.data


def header_of(frame: torch.Tensor) -> fmt.Header:
    return fmt.parse_header(bytes(frame[:fmt.HEADER_BYTES].tolist()))


def round_trip(x: torch.Tensor, kernels: str, where: str = "", level: int = 1) -> torch.Tensor:
    """Flat ``x`` through ``compress``, and zipped if that chose raw; both must give its bits. Returns the stored frame."""
    where = f"{kernels}, level {level}, {x.numel()} x {x.dtype} {where}"
    before = x.clone()
    frame = compress(x, kernels=kernels, level=level)
    assert frame.numel() <= fmt.raw_frame_bytes(x.nbytes), f"{frame.numel()} bytes, {where}"
    assert_same_bits(unzip(frame, x, kernels), x, f"stored, {where}")
    if x.dtype in BY_TORCH and header_of(frame).mode == fmt.MODE_RAW:
        assert_same_bits(unzip(zip_frame(x, kernels, level=level), x, kernels), x, f"zipped, {where}")
    elif x.dtype in BY_TORCH and header_of(frame).mode != fmt.MODE_ZERO_BLOCKS:
        assert header_of(frame).level == level, where
    assert_same_bits(x, before, f"the input was changed, {where}")
    return frame


def data(kind: str, dtype: torch.dtype, numel: int, seed: int = 0) -> torch.Tensor:
    """Position-dependent, random data of a kind (never a constant alone: C16, C17)."""
    generator = torch.Generator().manual_seed(1000 + seed)
    if kind == "random bits":
        return random_bits(numel, seed, dtype)
    x = gaussian(numel, seed, FP32)
    if kind.endswith("% zeros"):
        x[torch.rand(numel, generator=generator) < float(kind.split("%")[0]) / 100] = 0.0
    elif kind == "zero rows":                            # C23: a capacity-padded expert batch, 60 % of its rows zero
        x = x * (torch.rand(-(-numel // 512), generator=generator) > 0.6).repeat_interleave(512)[:numel]
    elif kind == "mixed scales":                         # C22: layers of standard deviation 1e-4..1e-1 in one flat buffer
        x = x * torch.logspace(-4, -1, 16).repeat_interleave(-(-numel // 16))[:numel] * 50
    elif kind == "extremes":                             # C05: exponents 1 and the largest finite one in turn
        tiny, huge = torch.finfo(dtype).tiny, torch.finfo(dtype).max
        x = torch.where(torch.arange(numel) % 2 == 0, tiny * (1 + x.abs()), huge * (1 - x.abs()))
    elif kind == "denormals":
        info = torch.finfo(dtype)
        bits = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
        mask = int(torch.tensor(info.tiny, dtype=dtype).view(bits)) - 1
        sign = 1 << (8 * dtype.itemsize - 1)
        return (random_bits(numel, seed, dtype).view(bits) & (mask | -sign)).view(dtype)
    elif kind == "specials":
        x = x.to(dtype)
        special = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), torch.finfo(dtype).max, torch.finfo(dtype).tiny]).to(dtype)
        at = torch.rand(numel, generator=generator)
        x = torch.where(at < 0.05, special[torch.randint(0, len(special), (numel,), generator=generator)], x)
        return torch.where(at > 0.97, nans(numel, seed, dtype), x)
    else:
        assert kind == "gaussian", kind
    return x.to(dtype)


def nans(numel: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    """NaNs of both signs, quiet and signalling, with random payloads."""
    bits = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    infinity = int(torch.tensor(float("inf"), dtype=dtype).view(bits))
    return (random_bits(numel, seed, dtype).view(bits) | infinity | 1).view(dtype)


KINDS = ("gaussian", "random bits", "10% zeros", "60% zeros", "zero rows", "mixed scales", "extremes", "denormals", "specials")
