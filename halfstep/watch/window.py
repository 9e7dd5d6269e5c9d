"""The last steps of a run, and what came before them in short: what the rules look at."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from halfstep.watch.entry import Entry, RunStart, Step
from halfstep.watch.golden import Band

SIZE = 100
"""Steps in a window, and in a block."""
NUM_CLEAN = 20
"""Clean steps in a row that end the calibration of a loss scale."""


@dataclass(frozen=True)
class Block:
    """SIZE steps in short, by medians over the steps that were finite; None where there were none.

    loss_spread: of the losses, see :func:`spread`.
    seconds:     between two steps. count_per_s: what the windows held, a second.
    """

    first: int
    last: int
    loss: float | None
    loss_spread: float | None
    grad_norm: float | None
    seconds: float | None
    count_per_s: float | None


class Window:
    """What the rules look at. They read it, and the guard alone moves it.

    steps:     the last SIZE steps, in order. blocks: each SIZE steps before and with them, from the start of the run.
    excused:   for each of ``steps``, whether its overflow belongs to a loss scale that finds its level: the calibration
               at the start, until NUM_CLEAN clean steps in a row, or the probe after a growth.
    shares:    for each of ``steps``, the share of non-finite gradient elements that a rule should count: 0.0 for an
               excused one, and where nobody counted, the most that it can be.
    layers:    the last three entries of kind layers. updates, ranges: the last entry of that kind.
    now:       the time of the look, in seconds; later than the last step's when the run has been silent.
    num_reductions: how often in a row the guard has lowered the scale without a clean window after it.
    """

    def __init__(self, run: RunStart, golden: Band | None = None) -> None:
        self.run, self.golden = run, golden
        self.steps: deque[Step] = deque(maxlen=SIZE)
        self.excused: deque[bool] = deque(maxlen=SIZE)
        self.shares: deque[float] = deque(maxlen=SIZE)
        self.blocks: list[Block] = []
        self.layers: deque[Entry] = deque(maxlen=3)
        self.updates: Entry | None = None
        self.ranges: Entry | None = None
        self.now = run.time
        self.num_reductions = 0
        self._overflows: dict[int, list[Entry]] = {}
        self._is_calibrating = run.has_dynamic_scale
        self._num_clean = 0
        self._block: list[Step] = []
        self._before_block: Step | None = None

    @property
    def last(self) -> Step:
        return self.steps[-1]

    @property
    def share(self) -> float:
        """Non-finite gradient elements over all gradient elements of SIZE steps."""
        return sum(self.shares) / SIZE

    def overflow(self, entry: Entry) -> None:
        """A micro-batch of a step to come ran again."""
        self._overflows.setdefault(entry["step"], []).append(entry)

    def add(self, step: Step) -> None:
        """One more step. Steps come in order; one that does not follow starts the window anew (see :meth:`resume`)."""
        overflows = self._overflows.pop(step.step, [])
        excused = self._excuses(step, overflows)
        share = step.nonfinite_at_most if step.nonfinite_share is None else step.nonfinite_share
        share = max([share, *(entry.get("nonfinite_share") or 0.0 for entry in overflows)])
        self.steps.append(step)
        self.excused.append(excused)
        self.shares.append(0.0 if excused else share)
        self.now = step.time
        self._block.append(step)
        if len(self._block) == SIZE:
            self.blocks.append(_block(self._before_block, self._block))
            self._before_block, self._block = step, []

    def resume(self, step: int) -> None:
        """Go on after ``step``: what is later does not count, and the first pause is not one of the run."""
        for part in (self.steps, self.excused, self.shares, self.layers):
            part.clear()
        self.blocks = [block for block in self.blocks if block.last <= step]
        self._overflows.clear()
        self._block, self._before_block = [], None

    def _excuses(self, step: Step, overflows: Sequence[Entry]) -> bool:
        """Whether the overflow of ``step`` is one of a scale that finds its level; counts clean steps on the way."""
        if not self.run.has_dynamic_scale:
            return False
        overflowed = bool(overflows) or not step.applied
        self._num_clean = 0 if overflowed else self._num_clean + 1
        if self._num_clean >= NUM_CLEAN:
            self._is_calibrating = False
        if not overflowed or not math.isfinite(step.loss):
            return False  # a loss that is not finite is no matter of the scale
        if self._is_calibrating:
            return True
        # The scale it met first: a replay's event has the one that it runs with next.
        scale = overflows[0]["scale"] / self.run.scale["backoff"] if overflows else step.scale
        return bool(self.steps) and scale > self.steps[-1].scale


def spread(values: Sequence[float], middle: float) -> float:
    """1.4826 x the median of |value - middle|: the standard deviation of a normal sample, untouched by outliers."""
    return 1.4826 * statistics.median(abs(value - middle) for value in values)


def _block(before: Step | None, steps: Sequence[Step]) -> Block:
    finite = [step for step in steps if step.is_finite]
    losses = [step.loss for step in finite]
    middle = statistics.median(losses) if losses else None
    all_steps = steps if before is None else [before, *steps]
    pauses = [late.time - early.time for early, late in pairwise(all_steps)]
    seconds = statistics.median(pauses) if pauses else None
    count = statistics.median(step.count for step in steps)
    return Block(
        steps[0].step,
        steps[-1].step,
        middle,
        None if middle is None else spread(losses, middle),
        statistics.median(step.grad_norm for step in finite) if finite else None,
        seconds,
        count / seconds if seconds else None,
    )
