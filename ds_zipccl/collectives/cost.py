"""What a collective costs on one group, by each of three ways, as functions of size and ratio. Pure: same numbers, same answer.

Noise must not decide, and nothing counts as gained that was not seen: a way must be MIN_GAIN times as fast as the one in use, and outside
of the measured sizes the gain is that of the nearest one, for a line through two noisy points leads anywhere. A call that finds its GPU
idle waits for its own launch, one amid others has that behind them, and which ones will come nobody knows: a way may be slower in neither,
and its gain is the mean of both. (That it gain in both was asked too much: single calls of 16 MiB over host memory took as long zipped,
while calls back to back took 0.86 of the time.)
"""
import math
from dataclasses import dataclass, replace

NATIVE, ZIPPED, ONE_SIDED = "native", "zipped", "one_sided"
#: Frames over the group's own collectives, and over symmetric memory (one_sided.py).
WAYS = ZIPPED, ONE_SIDED
MIN_GAIN = 1.03             # another way must be this much faster than the present one
GAIN_TO_STAY = 1.0          # the present one stays until native is really faster: no flapping at the border


@dataclass(frozen=True)
class Curve:
    """Microseconds over bytes. Between measured points straight lines, as latency plus bytes through a link makes them; below them as long
    as the smallest one; above them as fast, in bytes a second, as the largest one. At least two points, sizes ascending."""
    sizes: tuple[int, ...]
    times_us: tuple[float, ...]

    def at(self, num_bytes: float) -> float:
        if num_bytes <= self.sizes[0]:
            return self.times_us[0]
        if num_bytes >= self.sizes[-1]:
            return self.times_us[-1] * num_bytes / self.sizes[-1]
        i = self._segment(num_bytes)
        share = (num_bytes - self.sizes[i]) / (self.sizes[i + 1] - self.sizes[i])
        return self.times_us[i] * (1 - share) + self.times_us[i + 1] * share

    def us_per_byte(self, num_bytes: float) -> float:
        """Of the link at that size: what one byte more costs. Never negative: a larger message that was measured faster than a smaller one
        is noise."""
        i = self._segment(num_bytes)
        return max(0.0, (self.times_us[i + 1] - self.times_us[i]) / (self.sizes[i + 1] - self.sizes[i]))

    def _segment(self, num_bytes: float) -> int:
        return next((i for i in range(len(self.sizes) - 2) if num_bytes <= self.sizes[i + 1]), len(self.sizes) - 2)


@dataclass(frozen=True)
class Costs:
    """Measured for one collective and dtype of a group, of calls that find nothing under way. ``ratio``: of the data that ``zipped`` and
    ``one_sided`` were measured with. ``burst``: of calls back to back; None: they are nothing else (on a CPU).

    Infinite times mean that such calls cannot go that way; so does no curve at all.
    """
    native: Curve
    zipped: Curve
    ratio: float
    one_sided: Curve | None = None
    burst: "Costs | None" = None

    def gain(self, num_bytes: int, ratio: float, native_bytes: int | None = None, way: str = ZIPPED) -> float:
        """Native time / time by ``way`` of a call of ``num_bytes`` (of the whole tensor) whose frames have ``ratio``: codec and latency as
        measured, and the link's part of the time as the bytes on the wire. ``native_bytes``: of the whole tensor natively, if others.
        The geometric mean of a single call's and of one's amid others; the smaller of them where that is a loss."""
        single = self._gain(num_bytes, ratio, native_bytes, way)
        if self.burst is None:
            return single
        amid = self.burst._gain(num_bytes, ratio, native_bytes, way)
        return math.sqrt(single * amid) if min(single, amid) >= 1 else min(single, amid)

    def _gain(self, num_bytes: int, ratio: float, native_bytes: int | None, way: str) -> float:
        curve = getattr(self, way)
        time = math.inf if curve is None else curve.at(num_bytes)
        if not math.isfinite(time):
            return 0.0
        # Native may be another collective, which sends its bytes more than once, or both ways of a link where ours needs one.
        link = min(self.native.us_per_byte(num_bytes), time / max(1, num_bytes) * self.ratio)
        time += num_bytes * link * (1 / ratio - 1 / self.ratio)
        return self.native.at(num_bytes if native_bytes is None else native_bytes) / max(time, 1e-3)

    def gains(self, num_bytes: int, ratio: float, native_bytes: int | None = None) -> dict[str, float]:
        """By way."""
        return {NATIVE: 1.0} | {way: self.gain(num_bytes, ratio, native_bytes, way) for way in WAYS}

    def first(self, way: str, from_bytes: int = 1 << 10, natively: bool = True) -> int | None:
        """The smallest power of two >= ``from_bytes``, up to 4 GiB, at which calls with the measured ratio go ``way``."""
        sizes = (1 << bits for bits in range(max(10, (from_bytes - 1).bit_length()), 33))
        return next((size for size in sizes if fastest(self.gains(size, self.ratio), natively=natively) == way), None)

    def zipped_from(self) -> int | None:
        """The same of calls that are zipped, whichever way; for reports."""
        return min((size for way in WAYS if (size := self.first(way)) is not None), default=None)

    def without_one_sided(self) -> "Costs":
        return replace(self, one_sided=None, burst=self.burst and self.burst.without_one_sided())

    def as_dict(self) -> dict:
        """For logs: {"bytes": sizes, way: microseconds of a single call, "way_burst": of one amid others}; null: not that way."""
        def curves(costs: Costs, suffix: str = "") -> dict:
            return {way + suffix: [round(t, 1) if math.isfinite(t) else None for t in curve.times_us]
                    for way in (NATIVE, *WAYS) if (curve := getattr(costs, way)) is not None}

        return {"bytes": list(self.native.sizes)} | curves(self) | (curves(self.burst, "_burst") if self.burst else {})


def fastest(gains: dict[str, float], present: str = NATIVE, natively: bool = True) -> str:
    """The way of calls with these ``gains`` that went ``present`` so far. ``natively`` False: native is no choice."""
    if present == NATIVE and not natively:
        present = ZIPPED
    best = max(WAYS, key=gains.get)
    if present != NATIVE and gains[present] > (GAIN_TO_STAY if natively else 0) and gains[best] <= MIN_GAIN * gains[present]:
        return present
    if natively and gains[best] <= MIN_GAIN:
        return NATIVE
    spares_memory = best == ONE_SIDED and gains[ZIPPED] > MIN_GAIN and gains[ONE_SIDED] <= MIN_GAIN * gains[ZIPPED]
    return ZIPPED if spares_memory else best
