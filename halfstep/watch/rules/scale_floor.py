"""A loss scale that has nothing left to fall."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice

from halfstep.policy import LossScale
from halfstep.watch.rule import Finding, Rule
from halfstep.watch.window import Window


def check(window: Window, limits: Mapping[str, float]) -> Finding | None:
    settings, scale = window.scale, window.last.scale
    if settings.kind != "dynamic" or not _is_low(settings, scale):
        return None
    num = int(limits["steps"])
    if len(window.steps) < num or not all(_is_low(settings, s.scale) for s in islice(reversed(window.steps), num)):
        return None
    is_floor = _is_floor(settings, scale)
    where = f"at its floor of {scale:g}" if is_floor else f"below 1, at {scale:g},"
    return Finding(
        f"the loss scale has been {where} for {num} steps: "
        + ("gradients are as good as not scaled" if scale <= 1.0 else "it cannot follow gradients that grow further"),
        "Look with halfstep ranges for what is so large that it needs this, and keep its module in fp32; or train in"
        " bf16, which needs no scale.",
        "floor" if is_floor else "below 1",
    )


def _is_low(settings: LossScale, scale: float) -> bool:
    return scale < 1.0 or _is_floor(settings, scale)


def _is_floor(settings: LossScale, scale: float) -> bool:
    return scale <= settings.floor < settings.init  # one that began there was put there


RULE = Rule(
    name="scale-floor",
    severity="warning",
    summary="The loss scale sits at its floor, or below 1.",
    why="""\
A loss scale is there to lift small gradients over the smallest numbers of fp16: one below 3e-8 becomes zero, and below
6.1e-5 it loses digits. A Gaussian gradient with a standard deviation of 1e-7 loses 23 % of its elements at a scale of
1, and one of 3e-8 loses 68 %. A scale at 1 or below gives no such help. It also means that something in the model makes
gradients of tens of thousands, and that the next one that overflows at the floor ends the run or is skipped.

The rule waits for 20 steps in a row, since one hard batch may bring the scale down for a moment, and is silent where
the policy starts the scale at its floor.
""",
    check=check,
    limits={"steps": 20},
    limit_notes={"steps": "in a row, of at most 100"},
)
