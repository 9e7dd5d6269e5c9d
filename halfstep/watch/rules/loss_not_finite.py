"""A loss that is NaN or inf."""

from __future__ import annotations

import math
from collections.abc import Mapping

from halfstep.watch.rule import Finding, Rule
from halfstep.watch.window import Window


def check(window: Window, limits: Mapping[str, float]) -> Finding | None:
    last = window.last
    if math.isfinite(last.loss):
        return None
    number = sum(not math.isfinite(step.loss) for step in window.steps)
    others = f"; {number} of the last {len(window.steps)} losses were not finite" if len(window.steps) > 1 else ""
    return Finding(
        f"the loss is {_text(last.loss)} and the gradient norm {_text(last.grad_norm)}{others}",
        "Find the operation that made it with Stepper(explain=True) or halfstep trace; no loss scale can mend a loss.",
    )


def _text(value: float) -> str:
    return f"{value:.4g}" if math.isfinite(value) else "NaN" if math.isnan(value) else "inf" if value > 0 else "-inf"


RULE = Rule(
    name="loss-not-finite",
    severity="error",
    summary="The loss is NaN or inf.",
    why="""\
A loss scale multiplies the loss after it is there. When the loss itself is NaN or inf, the fault is in the forward
pass, in the loss function or in the batch, so that the calibration of a scale does not excuse it: the rule fires at the
first such loss, in the first step as in any other.

The step was not applied, so weights and optimizer states are still those of before. If the fault is in one batch, the
next step is finite again, and the rule says no more. If every loss is NaN, the weights hold a NaN already or an
operation overflows with every batch: in fp16 an activation above 65504, the largest fp16 number, becomes inf, and
inf - inf, inf / inf and 0 x inf are NaN. bf16 reaches to 3.4e38 as fp32 does, so that there the usual causes are a
division by zero, a logarithm of zero, a root of a negative number, or a mean over an empty mask.

The message says whether the gradient was finite too, and how many losses of the window were not. NaN and inf stay in
the log as they are, and no median of another rule takes them in.
""",
    check=check,
)
