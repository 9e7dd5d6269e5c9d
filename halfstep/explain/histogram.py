"""Magnitudes by power of two, and what a number format loses of them at any loss scale.

A loss scale is a power of two, 2^k, so scaling moves every value by k bins and rounds none. With fp16's limits as the
example, of a value x in bin e (2^e <= |x| < 2^(e+1)):

    flushed to zero     |x| 2^k <= 2^-25, half the smallest subnormal       e + k < -25
    subnormal           2^-25 < |x| 2^k < 2^-14, the smallest normal        -25 <= e + k < -14
    overflow            |x| 2^k rounds beyond the largest number            asked of the largest |x|, which is known

All limits but the last are borders of bins, so the counts are exact, but for a value that lies on the first border
itself: it ties to zero, and is counted as subnormal. What is subnormal in fp32 already shares one bin, -127.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from halfstep.formats import Format
from halfstep.record import Values

_FP32_POWERS = (-126, 127)


@dataclass(frozen=True)
class Loss:
    """What a format loses of a histogram's non-zero values.

    flushed, subnormal: how many. lost_sum_pct: the flushed ones' part of the sum of all magnitudes, estimated from the
    bins. headroom_bits: log2 of the largest number over the largest value, negative where it is too large, None without
    any value. overflows: whether the largest value rounds to inf.
    """

    flushed: int
    subnormal: int
    lost_sum_pct: float
    headroom_bits: float | None
    overflows: bool


@dataclass(frozen=True)
class Histogram:
    """exponents: ``{e: n}`` for 2^e <= |x| < 2^(e+1). largest: magnitude of the largest finite value."""

    exponents: Mapping[int, int] = field(default_factory=dict)
    largest: float = 0.0
    num_zeros: int = 0
    num_nonfinite: int = 0

    @classmethod
    def of(cls, values: Iterable[Values], scale: float = 1.0) -> Histogram:
        """Of the values of several tensors together, which hold the true ones times ``scale``, a power of two."""
        values = list(values)
        exponents: Counter[int] = Counter()
        for one in values:
            exponents.update(one.exponents)
        power = _power_of(scale)
        return cls(
            {e - power: n for e, n in sorted(exponents.items())},
            max((one.largest for one in values), default=0.0) / scale,
            sum(one.num_zeros for one in values),
            sum(one.num_nan + one.num_inf for one in values),
        )

    @property
    def num_nonzero(self) -> int:
        """How many values are finite and not zero; shares are of these."""
        return sum(self.exponents.values())

    def share(self, count: int) -> float:
        """``count`` in percent of the non-zero values; 0 where there are none."""
        return 100.0 * count / self.num_nonzero if count else 0.0

    def num_below(self, power: int) -> int:
        """How many of the non-zero values are below 2^power."""
        return sum(n for e, n in self.exponents.items() if e < power)

    def loss(self, format: Format, scale: float = 1.0) -> Loss:
        """What ``format`` loses of the values times ``scale``, a power of two."""
        power = _power_of(scale)
        zero, tiny = _power_of(format.smallest_subnormal) - 1 - power, _power_of(format.tiny) - power
        flushed = self.num_below(zero)
        # The middle of a bin stands for its values.
        total, lost = (sum(n * 1.5 * 2.0**e for e, n in self.exponents.items() if e < end) for end in (128, zero))
        largest = self.largest * scale
        return Loss(
            flushed,
            self.num_below(tiny) - flushed,
            100.0 * lost / total if flushed else 0.0,
            math.log2(format.max) - math.log2(self.largest) - power if self.largest else None,
            largest > format.tiny and not format.fits(largest),
        )


def best_scale(histograms: Sequence[tuple[Histogram, Format]]) -> float | None:
    """The loss scale at which the histograms together, each in its format, lose least. None if all values are zero.

    No value may overflow, with one bit to spare. Of what is left it flushes fewest to zero, of those it makes fewest
    subnormal, and of those it is the nearest to 1.
    """
    used = [(histogram, format) for histogram, format in histograms if histogram.largest]
    if not used:
        return None
    low, high = _FP32_POWERS
    top = max(low, min(high, *(_largest_power(h.largest, format) - 1 for h, format in used)))
    # A larger scale never loses more to zero and to subnormals, until it overflows.
    least = _cost(used, top)
    power = min(top, 0)
    while _cost(used, power) != least:
        power += 1
    return 2.0**power


def _cost(histograms: Sequence[tuple[Histogram, Format]], power: int) -> tuple[int, int]:
    return (
        sum(h.num_below(_power_of(format.smallest_subnormal) - 1 - power) for h, format in histograms),
        sum(h.num_below(_power_of(format.tiny) - power) for h, format in histograms),
    )


def _largest_power(largest: float, format: Format) -> int:
    """The largest k at which ``largest`` times 2^k still rounds to a finite number."""
    power = _power_of(format.max) - _power_of(largest)
    return power if largest * 2.0**power <= format.max or format.fits(largest * 2.0**power) else power - 1


def _power_of(value: float) -> int:
    """The exponent of the power of two at or below ``value``."""
    return math.frexp(value)[1] - 1
