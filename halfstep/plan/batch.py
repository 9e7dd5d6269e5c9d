"""The size of a batch: the largest that fits, and the smallest from which on a policy saves memory.

With the batch every storage grows in a line (``StepTrace.growth``), so the memory at one time is a line, and the peak
is the largest of these lines: convex, of few straight pieces, and known for every batch once its pieces are.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from halfstep.plan.step_trace import StepTrace

LIMIT = 2**20
"""Samples of the largest micro-batch that is tried."""

_LEAP = 16
"""Times the batch that fits, at most, which the next one is that is tried."""

Number = int | Fraction
"""Bytes. A growth that is no whole number makes fractions, all others stay whole numbers."""


@dataclass(frozen=True)
class PeakLine:
    """The peak of every batch: the largest of ``nbytes + growth * samples`` over ``pieces``.

    pieces: (nbytes, growth) of the lines that are the largest somewhere from 0 samples on, by rising growth.
    starts: the number of samples, not always whole, from which on each one is; the first is 0.
    """

    pieces: Sequence[tuple[Number, Number]]
    starts: Sequence[Number]

    @classmethod
    def of(cls, trace: StepTrace) -> PeakLine:
        """Of a trace with growth. ``trace.with_batch`` rounds storages to bytes; here nothing is rounded."""
        assert trace.growth is not None, "a trace without growth tells of its own batch alone"
        fixed: list[Number] = [0] * (trace.num_events + 1)
        growth: list[Number] = [0] * (trace.num_events + 1)
        for storage, measured in zip(trace.storages, trace.growth, strict=True):
            # A difference of bytes over a difference of samples, which a float may not hold exactly.
            slope = int(measured) if measured == int(measured) else Fraction(measured).limit_denominator(LIMIT)
            rest = storage.nbytes - slope * trace.batch_size
            fixed[storage.born] += rest
            growth[storage.born] += slope
            if storage.died is not None:
                fixed[storage.died] -= rest
                growth[storage.died] -= slope
        largest: dict[Number, Number] = {}
        nbytes: Number = 0
        slope = 0
        for more_bytes, more_growth in zip(fixed, growth, strict=True):
            nbytes += more_bytes
            slope += more_growth
            largest[slope] = max(nbytes, largest.get(slope, nbytes))
        return cls(*_envelope(largest))

    def piece(self, batch_size: Number) -> tuple[Number, Number]:
        """The line that is the largest from ``batch_size`` samples on, as (nbytes, growth)."""
        return self.pieces[bisect.bisect_right(self.starts, batch_size) - 1]

    def at(self, batch_size: int) -> Number:
        """Bytes at the peak of a step with ``batch_size`` samples in a micro-batch."""
        nbytes, growth = self.piece(batch_size)
        return nbytes + growth * batch_size


def _envelope(lines: dict[Number, Number]) -> tuple[list[tuple[Number, Number]], list[Number]]:
    """Pieces and starts of a PeakLine from bytes by growth."""
    pieces: list[tuple[Number, Number]] = []
    starts: list[Number] = []
    for growth, nbytes in sorted(lines.items()):
        start: Number = 0
        while pieces:
            start = Fraction(pieces[-1][0] - nbytes) / (growth - pieces[-1][1])  # where it overtakes the last one
            if start > starts[-1]:
                break
            pieces.pop()
            starts.pop()
            start = 0
        pieces.append((nbytes, growth))
        starts.append(start)
    return pieces, starts


def saves_from(reference: StepTrace, trace: StepTrace) -> int | None:
    """Samples of the smallest micro-batch from which on the peak of ``trace`` is below that of ``reference``.

    Below for that batch and for every larger one, without a limit. None if there is no such batch, or if it is not
    known how one of the two grows.
    """
    if reference.growth is None or trace.growth is None:
        return None
    theirs, ours = PeakLine.of(reference), PeakLine.of(trace)
    # Between two of these starts the difference of the peaks is one line. The last batch that saves nothing is looked
    # for from the largest batches down.
    end: int | None = None
    for start in sorted({*theirs.starts, *ours.starts}, reverse=True):
        first = max(1, math.ceil(start))
        (their_bytes, their_growth), (our_bytes, our_growth) = theirs.piece(start), ours.piece(start)
        more, growth = our_bytes - their_bytes, our_growth - their_growth
        if end is None and (growth > 0 or (growth == 0 and more >= 0)):
            return None
        if end is None or first <= end:
            if end is not None and more + growth * end >= 0:
                return end + 1
            if more + growth * first >= 0:
                return math.floor(Fraction(more) / -growth) + 1
            end = first - 1
    return 1


def largest_batch(trace: StepTrace, need_of: Callable[[StepTrace], int], capacity: int) -> int | None:
    """Samples of the largest micro-batch that needs at most ``capacity`` bytes; 0 if not even one sample does.

    need_of: bytes that a step needs; it must not fall as the batch grows. It is asked about few batches where it is
             nearly a line, as it mostly is.

    The answer is LIMIT at most, and None if it is not known how the step grows.
    """
    if trace.growth is None:
        return None
    fits, used, slope = 0, 0, 0.0  # the largest batch that is known to fit, what it needs, what a sample more took
    over, is_halved = LIMIT + 1, True  # the smallest that is known not to fit, once there is one
    needed: int | None = None
    while over - fits > 1:
        if needed is None:
            guess = fits + math.ceil((capacity - used) / slope) if slope > 0 else 2 * fits
            guess = min(max(guess, fits + 1), max(_LEAP * fits, 1), LIMIT)
        elif is_halved:
            guess = fits + (capacity - used) * (over - fits) // (needed - used)
            guess = min(max(guess, fits + 1), over - 1)
        else:
            guess = (fits + over) // 2
        need, before = need_of(trace.with_batch(guess)), over - fits
        if need <= capacity:
            slope = (need - used) / (guess - fits) if fits else 0.0
            fits, used = guess, need
        else:
            over, needed = guess, need
        is_halved = 2 * (over - fits) <= before
    return fits
