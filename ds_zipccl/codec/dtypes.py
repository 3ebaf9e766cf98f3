"""The element types the codec knows: one row each. A new dtype is a new row (and nothing else in Python)."""
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class DType:
    """How one float type is split into exponent and remainder (docs/format.md, section 1).

    ``code`` is the value in the frame header; ``byte_planes`` whole-byte remainder planes; ``extra_plane`` tells
    whether three more remainder bits are packed like codes (FP16: 1 + 10 = 8 + 3 bits). ``levels``: the compression levels that are
    defined for it, ascending.
    """
    torch_dtype: torch.dtype
    code: int
    itemsize: int
    exponent_bits: int
    mantissa_bits: int
    byte_planes: int
    extra_plane: bool
    levels: tuple[int, ...] = (1,)

    @property
    def name(self) -> str:
        return str(self.torch_dtype).removeprefix("torch.")

    @property
    def bias(self) -> int:
        return (1 << (self.exponent_bits - 1)) - 1

    @property
    def top_lo(self) -> int:
        """Largest window base of level 1: the window then ends at the largest exponent."""
        return (1 << self.exponent_bits) - 8

    def level(self, at_most: int) -> int:
        """The highest level that is defined and not above ``at_most`` (>= 1)."""
        return max(level for level in self.levels if level <= at_most)


TABLE = (
    DType(torch.bfloat16, code=1, itemsize=2, exponent_bits=8, mantissa_bits=7, byte_planes=1, extra_plane=False,
          levels=(1, 2)),
    DType(torch.float16, code=2, itemsize=2, exponent_bits=5, mantissa_bits=10, byte_planes=1, extra_plane=True),
    DType(torch.float32, code=3, itemsize=4, exponent_bits=8, mantissa_bits=23, byte_planes=3, extra_plane=False),
)
BY_TORCH = {row.torch_dtype: row for row in TABLE}
BY_CODE = {row.code: row for row in TABLE}
RAW_CODE = 0        # frame header: plain bytes, no float structure
