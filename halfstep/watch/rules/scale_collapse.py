"""A loss scale that falls far and fast, after it had found its level."""

from __future__ import annotations

from collections.abc import Mapping

from halfstep.watch.rule import Finding, Rule
from halfstep.watch.window import SIZE, Window


def check(window: Window, limits: Mapping[str, float]) -> Finding | None:
    since, steps = window.calibrated_at, window.steps
    if since is None or len(steps) < 2 or steps[-1].scale >= steps[-2].scale:
        return None
    highest, scale = max(step.scale for step in steps if step.step >= since), window.last.scale
    if highest < limits["factor"] * scale:
        return None
    return Finding(
        f"the loss scale fell from {highest:g} to {scale:g} within {SIZE} steps, although {highest:g} had held before",
        "Look at the loss and the gradient norm just before: the run may diverge. A module that makes inf by itself"
        " drags the scale down, too; Stepper(explain=True) names it.",
    )


RULE = Rule(
    name="scale-collapse",
    severity="warning",
    summary="The loss scale fell by a factor of 32 or more within a window, after it had found its level.",
    why="""\
A scale that has found its level (20 clean steps in a row) changes by a factor of 2 now and then, and of 4 where the
guard lowers it once more. Five halvings within 100 steps are another thing: gradients grow without bound, or something
makes inf or NaN whatever the scale is, so that each step halves it for nothing. It takes 2000 clean steps to win each
factor of 2 back, and small gradients are flushed to zero meanwhile.

The fall from the first scale to the first level does not count: with a usable scale of 32 it is 11 halvings.
""",
    check=check,
    limits={"factor": 32.0},
    limit_notes={"factor": "times that the scale fell within a window"},
)
