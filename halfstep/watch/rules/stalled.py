"""A run that has gone silent."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import islice

from halfstep.watch.rule import Finding, Rule
from halfstep.watch.window import Window, pauses

LIMITS = {"factor": 20.0, "seconds": 60.0}
UNKNOWN_SECONDS = 600.0
"""Of silence that are well, at least, while nobody knows how long a step of this run takes."""


def longest_pause(usual: float | None, limits: Mapping[str, float] = LIMITS) -> float:
    """Seconds of silence after which a run is stalled. usual: see :func:`usual_pause`. limits: of the rule."""
    return max(limits["seconds"], UNKNOWN_SECONDS if usual is None else limits["factor"] * usual)


def usual_pause(times: Sequence[float]) -> float | None:
    """Usual seconds between two steps of a run, from the ``times`` of the last that followed one another.

    The median of their pauses over ten steps; None while fewer than two pauses are known, or a time is no number.
    """
    usual = statistics.median(pauses(times)) if len(times) > 2 else math.nan
    return usual if math.isfinite(usual) else None


def check(window: Window, limits: Mapping[str, float]) -> Finding | None:
    steps = window.steps
    num_before = len(steps)
    if window.now == steps[-1].time and num_before > 1:  # a step has come: was it late?
        num_before -= 1
    before = steps[num_before - 1]
    silent = window.now - before.time
    if silent <= limits["seconds"]:
        return None
    usual = usual_pause([step.time for step in islice(steps, num_before)])
    if silent <= longest_pause(usual, limits):
        return None
    known = "" if usual is None else f", where {usual:.3g} s is usual"
    return Finding(
        f"no step for {silent:.0f} s after step {before.step}{known}",
        "Look whether the process lives, and what it waits for: a collective of another rank, the data, the disk.",
        str(before.step),
        before.step,
    )


RULE = Rule(
    name="stalled",
    severity="warning",
    summary="The run has made no step for 20 times its usual pause, and at least for a minute.",
    why="""\
A hung collective, a dead data loader or a full disk raises nothing: the process waits. While it does, a clock of the
log's thread asks this rule about once a second; in a replay of the log the gap between two steps shows the same.

The limit is 20 times the usual pause, and never less than 60 s, so that an evaluation of a minute is no alert. The
usual pause is the median over the last 100 steps, with the time from a step to the tenth after it taken as ten pauses:
the host runs ahead of a GPU and then waits, so that most single pauses are near 0. Until two pauses are known, at a
start and after a resume, the limit is at least 600 s: the first step may compile, and nobody knows yet how long a step
takes. The timeouts of torch.distributed are 10 minutes for NCCL and 30 for the others. A run whose evaluations take
longer needs larger limits: `seconds` is the longest pause that is well.

Each silence is told once, with the step before it. The pause across a resumed checkpoint does not count.
`halfstep watch check` also tells of a run whose process is gone without a word of its end, as an error.
""",
    check=check,
    limits=LIMITS,
    limit_notes={"factor": "times the usual pause between two steps", "seconds": "s, at least"},
)
