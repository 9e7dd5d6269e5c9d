"""One rank whose loss is not finite again and again, and of no other."""

from __future__ import annotations

import math
from collections.abc import Mapping

from halfstep.watch.rule import Finding, Rule
from halfstep.watch.window import Window


def check(window: Window, limits: Mapping[str, float]) -> Finding | None:
    rank = window.last.bad_rank
    if rank is None:
        return None
    bad = [step for step in window.steps if not math.isfinite(step.loss)]
    if len(bad) < limits["steps"] or any(step.bad_rank != rank for step in bad):
        return None
    return Finding(
        f"the loss of rank {rank} was not finite in {len(bad)} of the last {len(window.steps)} steps, and that of no "
        "other rank",
        "Look at the data that this rank reads, and run halfstep doctor on its host: the others skip those steps too.",
        str(rank),
    )


RULE = Rule(
    name="bad-rank",
    severity="error",
    summary="The loss of one rank is not finite in step after step, and of that rank alone.",
    why="""\
All ranks skip a step in which the loss of one is not finite, so that one bad rank can bring a whole job to a stand
without an error: the loss scale falls to its floor, and nothing is learnt. Weights are the same on every rank. If they
were at fault, or the model, all losses would be NaN or inf; if the loss is NaN on one rank alone, and again and again,
then what differs is: its part of the data, or its hardware.

The rank is named by two numbers that travel in the verdict's one collective, how many ranks found their loss not
finite and the sum of their numbers, so that every rank knows in the same step. Three such steps of the last 100 are
told. Steps in which several ranks were bad excuse it: see [loss-not-finite](loss-not-finite.md). A gradient that is not
finite has no rank: it is averaged before anybody looks.
""",
    check=check,
    limits={"steps": 3.0},
    limit_notes={"steps": "of the last 100 in which its loss was not finite"},
)
