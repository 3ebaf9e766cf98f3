"""The golden inputs: integer arithmetic on the index alone, so that they are the same for ever and everywhere."""
from typing import NamedTuple

import torch

from ds_zipccl.codec.codec import Codec, compress
from ds_zipccl.codec.dtypes import BY_TORCH

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
_INTS = {2: torch.int16, 4: torch.int32}


class Case(NamedTuple):
    """A zipped frame of the given layout; ``capacity`` None: what ``compress`` stores. ``step``: how far exponents fall at a time."""
    name: str
    dtype: torch.dtype
    numel: int
    capacity: tuple[int, int] | None = (35, 64)
    window_lo: int = -1
    zeros_percent: int = 0
    step: int = 1
    integrity: str = "off"
    level: int = 1


CASES = (
    Case("bf16_worked_example", BF16, 3, (35, 0)),
    Case("bf16_empty", BF16, 0),
    Case("bf16_partial_block", BF16, 77),
    Case("bf16_three_blocks", BF16, 2500),
    Case("bf16_zero_mode", BF16, 1500, zeros_percent=40),
    Case("bf16_spread", BF16, 2100, (400, 64), step=2),
    Case("bf16_spread_zero_mode", BF16, 2100, (400, 64), zeros_percent=40, step=2),
    Case("bf16_given_window", BF16, 1100, window_lo=119),
    Case("bf16_no_slots_all_spill", BF16, 3000, (0, 2000)),
    Case("bf16_two_tiles_with_spill", BF16, 33000, (5, 1200)),
    Case("fp16_two_blocks", FP16, 1300),
    Case("fp32_two_blocks", FP32, 1300, (60, 64)),
    Case("bf16_checksum", BF16, 9000, None, integrity="checksum"),
    Case("bf16_stored_raw", BF16, 50, None),
    Case("int64_stored_raw_checksum", torch.int64, 40, None, integrity="checksum"),
    Case("level2_worked_example", BF16, 3, (95, 0), level=2),
    Case("level2_empty", BF16, 0, (95, 64), level=2),
    Case("level2_three_blocks", BF16, 2500, (95, 64), level=2),
    Case("level2_spread", BF16, 2100, (400, 64), step=2, level=2),
    Case("level2_few_zeros", BF16, 2100, (200, 64), zeros_percent=8, level=2),
    Case("level2_many_zeros", BF16, 2100, (200, 64), zeros_percent=40, level=2),
    Case("level2_no_slots_all_spill", BF16, 3000, (0, 4000), level=2),
    Case("level2_two_tiles_with_spill", BF16, 33000, (60, 2000), level=2),
    Case("level2_checksum", BF16, 9000, None, integrity="checksum", level=2),
)


def _mix(i: torch.Tensor) -> torch.Tensor:
    """32 well-mixed bits of each index (Wang's integer hash), int64."""
    i = (i ^ 61 ^ (i >> 16)) & 0xFFFFFFFF
    i = i * 9 & 0xFFFFFFFF
    i = i ^ i >> 4
    i = i * 0x27D4EB2D & 0xFFFFFFFF
    return i ^ i >> 15


def golden_input(case: Case) -> torch.Tensor:
    """Random sign and mantissa; exponents fall by a step with probability 1/2 each (like small Gaussians), some are zero."""
    if case.name.endswith("worked_example"):
        return torch.tensor([1.0, -80.0, 0.0078125], dtype=BF16)
    index = torch.arange(case.numel, dtype=torch.int64) + 1000003 * len(case.name)
    if case.dtype not in BY_TORCH:
        return _mix(index) << 31 | _mix(index + 77)
    row = BY_TORCH[case.dtype]
    chance, rest = _mix(index), _mix(index + 0x51ED27)
    falls = sum((chance & (1 << k) - 1 == 0).to(torch.int64) for k in range(1, 14))       # trailing zero bits
    exponent = row.bias - 3 - case.step * falls + (_mix(index + 0xBEEF) % 97 == 0) * 3
    exponent = torch.where(_mix(index + 0xF00D) % 100 < case.zeros_percent, 0, exponent)
    mantissa, sign = rest & (1 << row.mantissa_bits) - 1, rest >> 31
    bits = sign << 8 * row.itemsize - 1 | exponent << row.mantissa_bits | mantissa
    return (bits - (sign << 8 * row.itemsize)).to(_INTS[row.itemsize]).view(case.dtype)


def golden_frame(case: Case, kernels: str) -> torch.Tensor:
    x = golden_input(case)
    if case.capacity is None:
        return compress(x, kernels=kernels, level=case.level, integrity=case.integrity)
    codec = Codec.of(case.dtype, case.numel, "cpu", escapes_per_block=case.capacity[0], spill_per_tile=case.capacity[1],
                     window_lo=case.window_lo, level=case.level, kernels=kernels)
    frames, status = codec.empty_frames(1, "cpu"), torch.zeros(1, dtype=torch.int32)
    codec.encode(x.view(1, -1), frames, status)
    assert not int(status) & 1 << 16, f"{case.name} overflows: choose a larger capacity"
    return frames[0]
