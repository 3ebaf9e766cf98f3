"""What a collective costs on one group, natively and zipped, as functions of size and ratio. Pure: same numbers, same answer."""
import math
from dataclasses import dataclass

MIN_GAIN = 1.03             # zipped must be this much faster: below it, noise would decide
GAIN_TO_STAY = 1.0          # once zipped, it stays so until native is really faster: no flapping at the border


@dataclass(frozen=True)
class Curve:
    """Microseconds over bytes: straight lines between measured points, the outer ones continued. At least two points, sizes ascending."""
    sizes: tuple[int, ...]
    times_us: tuple[float, ...]

    def at(self, num_bytes: float) -> float:
        i = 0
        while i + 2 < len(self.sizes) and num_bytes > self.sizes[i + 1]:
            i += 1
        return max(0.0, self.times_us[i] + (num_bytes - self.sizes[i]) * self._slope(i))

    def us_per_byte(self, num_bytes: float) -> float:
        """Of the link at that size: what one byte more costs."""
        i = 0
        while i + 2 < len(self.sizes) and num_bytes > self.sizes[i + 1]:
            i += 1
        return self._slope(i)

    def _slope(self, i: int) -> float:
        """Never negative: a larger message that was measured faster than a smaller one is noise."""
        return max(0.0, (self.times_us[i + 1] - self.times_us[i]) / (self.sizes[i + 1] - self.sizes[i]))


@dataclass(frozen=True)
class Costs:
    """Measured for one collective and dtype of a group. ``ratio``: of the data that ``zipped`` was measured with.

    Infinite times in ``zipped`` mean that such calls cannot be zipped.
    """
    native: Curve
    zipped: Curve
    ratio: float

    def gain(self, num_bytes: int, ratio: float, native_bytes: int | None = None) -> float:
        """Native time / zipped time of a call of ``num_bytes`` (of the whole tensor) whose frames have ``ratio``: codec and latency as
        measured, and the link's part of the time as the bytes on the wire. ``native_bytes``: of the whole tensor natively, if others."""
        zipped = self.zipped.at(num_bytes)
        if not math.isfinite(zipped):
            return 0.0
        zipped += num_bytes * self.native.us_per_byte(num_bytes) * (1 / ratio - 1 / self.ratio)
        return self.native.at(num_bytes if native_bytes is None else native_bytes) / max(zipped, 1e-3)

    def zipped_is_faster(self, num_bytes: int, ratio: float, is_zipped: bool = False, native_bytes: int | None = None) -> bool:
        """``is_zipped``: what such calls did so far."""
        return self.gain(num_bytes, ratio, native_bytes) > (GAIN_TO_STAY if is_zipped else MIN_GAIN)

    def zipped_from(self) -> int | None:
        """The smallest power of two, up to 4 GiB, from which calls with the measured ratio are zipped; for reports."""
        return next((1 << bits for bits in range(10, 33) if self.zipped_is_faster(1 << bits, self.ratio)), None)
