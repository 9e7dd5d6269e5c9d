"""The last steps of a run, and what came before them in short: what the rules look at."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise

from halfstep.errors import HalfstepError
from halfstep.policy import LossScale
from halfstep.watch.entry import Entry, RunStart, Step
from halfstep.watch.golden import Band
from halfstep.watch.level import NUM_CLEAN, Level

SIZE = 100
"""Steps in a window, and in a block."""
PACE = 10
"""Steps over which a pause is taken."""
NUM_SKIPS = 5
"""Skipped steps at one distance that make a period."""


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


@dataclass(frozen=True, slots=True)
class Fault:
    """The gradient of a step that was not finite, other than by a loss scale that finds its level.

    share:      of the gradient's elements that were inf or NaN; where nobody counted, the most that it can be.
    scale:      the lowest loss scale that it happened at. is_forward: whether the loss was not finite either.
    modules:    whose gradient it was, from the loss backwards: that is the way in which it spreads.
    """

    step: int
    share: float
    scale: float
    is_forward: bool
    modules: Sequence[str]


class Window:
    """What the rules look at. They read it, and the guard alone moves it.

    steps:     the last SIZE steps, in order. blocks: each SIZE steps before and with them, from the start of the run.
    faults:    those of ``steps``, in order, and since the scale was last lowered by the guard or a module was promoted:
               what happened before has had its answer.
    share:     of the non-finite gradient elements of ``faults`` in all gradient elements of SIZE steps.
    num_skipped: how many of ``steps`` were skipped, other than by a loss scale that finds its level.
    skips:     numbers of the last NUM_SKIPS skipped steps of the run, without those of the first calibration and those
               right after a growth of the scale. skip_period: their distance, while it is one and the same.
    calibrated_at: the step from which on the dynamic scale is known to hold; None before, and without one.
    num_reductions: how often in a row the guard has lowered the scale without a clean window after it.
    reduced_at: the last step before it was lowered last; None before, and after a clean window.
    promoted:  the module that went to fp32 last, else empty.
    layers:    the last three entries of kind layers in which all norms are finite.
    resting:   names of parameters whose gradient was exactly 0 in an entry of kind layers and not in a later one.
    updates, ranges: the last entry of that kind. ranks: the last two of that kind.
    now:       the time of the look, in seconds; later than the last step's when the run has been silent.
    """

    def __init__(self, run: RunStart, golden: Band | None = None) -> None:
        self.run, self.golden = run, golden
        self.scale = _scale_of(run.scale)
        self.blocks: list[Block] = []
        self.promoted = ""
        self.now = run.time
        self.updates: Entry | None = None
        self.ranges: Entry | None = None
        self.ranks: deque[Entry] = deque(maxlen=2)
        self.resting: set[str] = set()
        self._is_dynamic = self.scale.kind == "dynamic"
        self._start(Level(self.scale))

    def _start(self, level: Level) -> None:
        self.steps: deque[Step] = deque(maxlen=SIZE)
        self.faults: deque[Fault] = deque()
        self.share = 0.0
        self.num_skipped = 0
        self.skips: deque[int] = deque(maxlen=NUM_SKIPS)
        self.skip_period: int | None = None
        self.calibrated_at: int | None = None
        self.num_reductions = 0
        self.reduced_at: int | None = None
        self.layers: deque[Entry] = deque(maxlen=3)
        self._level = level
        self._skipped: deque[int] = deque()  # those of num_skipped
        self._answered = 0  # the last step whose faults have had their answer
        self._last_fault = 0
        self._has_changed = False  # whether the share is no longer that of the faults
        self._resting: set[str] = set()  # those with a gradient of 0 in the last entry of kind layers
        self._overflows: dict[int, list[Entry]] = {}
        self._block: list[Step] = []
        self._before_block: Step | None = None

    @property
    def last(self) -> Step:
        return self.steps[-1]

    def add(self, step: Step) -> None:
        """One more step. Steps come in order; one that does not follow starts the window anew (see :meth:`resume`)."""
        number = step.step
        if self.steps and number != self.steps[-1].step + 1:
            self.resume(number - 1)
        overflows = self._overflows.pop(number, None) if self._overflows else None
        if step.applied and overflows is None:
            if self._is_dynamic:
                self._level.clean(step.scale)
                if self.calibrated_at is None and self._level.is_calibrated:
                    self.calibrated_at = number
            if self.skip_period is not None and number - self.skips[-1] >= self.skip_period:
                self.skip_period = None
        else:
            self._add_bad(step, overflows or ())
        self.steps.append(step)
        self.now = step.time
        self._forget(number - SIZE)
        self._block.append(step)
        if len(self._block) == SIZE:
            self.blocks.append(_block(self._before_block, self._block))
            self._before_block, self._block = step, []

    def _add_bad(self, step: Step, overflows: Sequence[Entry]) -> None:
        """A step that was skipped, or had to run again."""
        tries = [(e["overflowed_at"], e["nonfinite_share"], e["parameters"]) for e in overflows]
        if not step.applied:
            share = step.nonfinite_at_most if step.nonfinite_share is None else step.nonfinite_share
            scale = overflows[-1]["scale"] if overflows else step.scale
            tries.append((scale, share, step.parameters))
        is_forward = not math.isfinite(step.loss)
        was_calibrated = self._level.is_calibrated
        counted = [one for one in tries if not self._is_search(one[0], is_forward)]
        if not step.applied:
            if counted:
                self.num_skipped += 1
                self._skipped.append(step.step)
            if counted or (was_calibrated and not self._level.is_probe):
                self.skips.append(step.step)
                self.skip_period = _period(self.skips)
        self._level.end(step.scale)
        share = max((share for _, share, _ in counted), default=0.0)
        if share and step.step > self._answered:
            modules = _modules_of(name for _, _, names in counted for name in reversed(names))
            scale = min(scale for scale, _, _ in counted)
            self.faults.append(Fault(step.step, share, scale, is_forward, modules))
            self._last_fault = step.step
            self._has_changed = True

    def _is_search(self, scale: float, is_forward: bool) -> bool:
        # A loss that is not finite is no matter of the scale, although the scale falls by it.
        return self._is_dynamic and self._level.overflow(scale) and not is_forward

    def _forget(self, step: int) -> None:
        """Let go of what the window does not hold any more: ``step`` and what is before."""
        if self._skipped and self._skipped[0] <= step:
            self._skipped.popleft()
            self.num_skipped -= 1
        if self.faults and self.faults[0].step <= step:
            self.faults.popleft()
            self._has_changed = True
        if self._has_changed:
            self._sum_up()
        if self.num_reductions and max(self._last_fault, self.reduced_at or 0) <= step:
            self.num_reductions, self.reduced_at = 0, None

    def _sum_up(self) -> None:
        # Summed anew each time: what is added to and taken off drifts.
        self.share = math.fsum(fault.share for fault in self.faults) / SIZE
        self._has_changed = False

    def _answer(self, step: int) -> None:
        self._answered = step
        while self.faults and self.faults[0].step <= step:
            self.faults.popleft()
        self._sum_up()

    def overflow(self, entry: Entry) -> None:
        """A micro-batch of a step to come ran again."""
        self._overflows.setdefault(entry["step"], []).append(entry)

    def reduce(self, step: int) -> None:
        """The guard has lowered the scale after ``step``."""
        self.num_reductions += 1
        self.reduced_at = step
        self._answer(step)

    def promote(self, entry: Entry) -> None:
        """A module went to fp32 in a step: what is not finite from then on is another matter."""
        self.promoted = entry["module"]
        self.num_reductions, self.reduced_at = 0, None
        self._answer(entry["step"])

    def add_layers(self, entry: Entry) -> None:
        """The norms of all parameters in one step. One that is not finite is a text, and says nothing of the others."""
        norms = entry["norms"]
        if len(norms) != len(entry["parameters"]) or any(isinstance(norm, str) for norm in norms):
            return
        zeros = {name for name, norm in zip(entry["parameters"], norms, strict=True) if norm == 0}
        self.resting |= self._resting.difference(zeros).intersection(entry["parameters"])
        self._resting = zeros
        self.layers.append(entry)

    def resume(self, step: int) -> None:
        """Go on after ``step``: what is later does not count, and the first pause is not one of the run."""
        self.blocks = [block for block in self.blocks if block.last <= step]
        self._start(Level(self.scale, is_resumed=step >= NUM_CLEAN))


def spread(values: Sequence[float], middle: float) -> float:
    """1.4826 x the median of |value - middle|: the standard deviation of a normal sample, untouched by outliers."""
    return 1.4826 * statistics.median(abs(value - middle) for value in values)


def pauses(times: Sequence[float]) -> list[float]:
    """Seconds a step, each over PACE steps, or over all where there are fewer.

    times: of steps that follow one another, in seconds. The host of a GPU runs ahead of it, by up to PACE steps, and
    then waits, so that single pauses are near 0 but for one.
    """
    pace = min(PACE, len(times) - 1)
    return [(late - early) / pace for early, late in zip(times, times[pace:], strict=False)] if pace > 0 else []


def _scale_of(settings: Mapping[str, object]) -> LossScale:
    known = {f.name for f in fields(LossScale)}
    try:
        return LossScale(**{name: value for name, value in settings.items() if name in known})  # type: ignore[arg-type]
    except (TypeError, HalfstepError):
        return LossScale()  # the line is none of ours: as a run without a scale, of which nothing is excused


def _modules_of(parameters: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(name.rpartition(".")[0] or name for name in parameters))


def _period(skips: Sequence[int]) -> int | None:
    """The distance of skipped steps that all have the same, other than 1: those are one block."""
    distances = {late - early for early, late in pairwise(skips)}
    distance = distances.pop() if len(skips) == NUM_SKIPS else 1
    return distance if distance > 1 and not distances else None


def _block(before: Step | None, steps: Sequence[Step]) -> Block:
    finite = [step for step in steps if step.is_finite]
    losses = [step.loss for step in finite]
    middle = statistics.median(losses) if losses else None
    all_steps = steps if before is None else [before, *steps]
    between = pauses([step.time for step in all_steps])
    seconds = statistics.median(between) if between else None
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
