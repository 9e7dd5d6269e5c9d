"""A run that has gone silent."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from itertools import pairwise

from halfstep.watch.rule import Finding, Rule
from halfstep.watch.window import Window

FACTOR, SECONDS = 20.0, 60.0


def longest_pause(usual: float | None, factor: float = FACTOR, seconds: float = SECONDS) -> float:
    """Seconds of silence after which a run is stalled, whose ``usual`` pause between two steps is so many seconds."""
    return max(seconds, factor * (usual or 0.0))


def check(window: Window, limits: Mapping[str, float]) -> Finding | None:
    steps = window.steps
    before, until = steps[-1], window.now
    if until == before.time and len(steps) > 1:  # a step has come: was it late?
        before, until = steps[-2], steps[-1].time
    silent = until - before.time
    if silent <= limits["seconds"]:
        return None
    usual = usual_pause(window)
    if silent <= longest_pause(usual, limits["factor"], limits["seconds"]):
        return None
    known = "" if usual is None else f", where {usual:.3g} s is usual"
    return Finding(
        f"no step for {silent:.0f} s after step {before.step}{known}",
        "Look whether the process lives, and what it waits for: a collective of another rank, the data, the disk.",
        str(before.step),
        before.step,
    )


def usual_pause(window: Window) -> float | None:
    """Seconds between two steps: the median over the last block, or over the steps there are; None if too few."""
    if window.blocks and (seconds := window.blocks[-1].seconds) is not None:
        return seconds
    pauses = [late.time - early.time for early, late in pairwise(window.steps)]
    return statistics.median(pauses) if pauses else None


RULE = Rule(
    name="stalled",
    severity="warning",
    summary="The run has made no step for 20 times its usual pause, and at least for a minute.",
    why="""\
A hung collective, a dead data loader or a full disk raises nothing: the process waits. While it does, a clock of the
log's thread asks this rule about once a second; in a replay of the log the gap between two steps shows the same.

The limit is 20 times the usual pause, the median of the last 100 steps that are complete, and never less than 60 s, so
that compiling, or an evaluation of a minute, is no alert. The timeouts of torch.distributed are 10 minutes for NCCL and
30 for the others. A run whose evaluations take longer needs larger limits: `seconds` is the longest pause that is well.

Each silence is told once, with the step before it. The pause across a resumed checkpoint does not count.
`halfstep watch check` also tells of a run whose process is gone without a word of its end, as an error.
""",
    check=check,
    limits={"factor": FACTOR, "seconds": SECONDS},
    limit_notes={"factor": "times the usual pause between two steps", "seconds": "s, at least"},
)
