"""More non-finite gradient elements than a loss scale that finds its level explains."""

from __future__ import annotations

import math
from collections.abc import Mapping

from halfstep.errors import and_more
from halfstep.watch.rule import Finding, Rule
from halfstep.watch.window import SIZE, Window


def check(window: Window, limits: Mapping[str, float]) -> Finding | None:
    pct = 100 * window.share
    if pct <= limits["share_pct"]:
        return None
    bad = [step for step, share in zip(window.steps, window.shares, strict=True) if share]
    names = and_more(list(dict.fromkeys(name for step in bad for name in step.parameters)))
    where = f" in {names}" if names else ""
    what = f"{pct:.3g} % of the gradient elements of the last {SIZE} steps were inf or NaN{where}"
    first = bad[0].step
    if any(not math.isfinite(step.loss) for step in bad):
        return Finding(
            f"{what}, and so was the loss: the fault is in the forward pass or the data, no loss scale can mend it",
            "Find the operation with Stepper(explain=True) or halfstep trace, and keep its module in fp32.",
            "forward",
            first,
            "error",
        )
    if not window.run.has_dynamic_scale:
        return Finding(
            what,
            "Look at the batch and the learning rate of these steps; there is no dynamic loss scale to lower.",
            "no scale",
            first,
        )
    if window.num_reductions >= 2:
        return Finding(
            f"{what}, although the loss scale was lowered twice: no scale can mend this",
            "Find the operation with Stepper(explain=True) or halfstep trace; bf16 has the range that fp16 lacks.",
            "exhausted",
            first,
            "error",
        )
    return Finding(
        f"{what} at a loss scale of {window.last.scale:g}, which is lowered once",
        "Nothing, if it stays at this; else look at the module named here with halfstep ranges.",
        f"lowered {window.num_reductions}",
        first,
        lowers_scale=True,
    )


RULE = Rule(
    name="nonfinite-gradients",
    severity="warning",
    summary="More than 0.1 % of the gradient elements of a window were inf or NaN.",
    why="",
    check=check,
    limits={"share_pct": 0.1},
    limit_notes={"share_pct": "% of the gradient elements of a window"},
)
