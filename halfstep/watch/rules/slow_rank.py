"""A rank that the others wait for."""

from __future__ import annotations

from collections.abc import Mapping

from halfstep.watch.rule import Finding, Rule
from halfstep.watch.window import Window


def check(window: Window, limits: Mapping[str, float]) -> Finding | None:
    looks = window.ranks
    if len(looks) < 2 or looks[0]["slowest"] != looks[-1]["slowest"]:
        return None
    if any(look["slowest_ms"] - look["others_ms"] <= limits["share"] * look["step_ms"] for look in looks):
        return None
    last = looks[-1]
    return Finding(
        f"rank {last['slowest']} (host {last['slowest_host']}) works {last['slowest_ms']:.3g} ms by itself in a step, "
        f"the others {last['others_ms']:.3g} ms: they wait {last['slowest_ms'] - last['others_ms']:.3g} ms of the "
        f"{last['step_ms']:.3g} ms that it takes",
        "Look at its data loader, at other jobs on its host, and at the clocks and temperature of its device.",
        str(last["slowest"]),
        last["step"],
    )


RULE = Rule(
    name="slow-rank",
    severity="warning",
    summary="One rank works so much longer than the others that they wait for a fifth of each step.",
    why="""\
Ranks meet in every step, so that a slow one makes all of them as slow as itself: with one card in 64 that is clocked
down to half, 63 wait for half of the time. How long a rank takes over a step does not tell who it is, since it is the
same everywhere. So each rank measures its own work: from the collective in which all met last, the verdict of a step,
to where it waits for others again. Under DistributedDataParallel that is its data, its forward passes, and backward
until the gradient of its first parameter is there. Under `fully_shard` ranks meet in every layer, and what can be seen
is the time between two micro-batches: the data, an evaluation, a checkpoint. On CUDA the device's time counts, between
two events in its stream, so that a slow card is seen as well as a slow loader.

A thread of each rank posts the sum once a second, without a collective, and rank 0 reads all every five seconds, or
ten steps if those take longer. What a step of the slowest takes longer than the median of the others is what they wait
for. It is told when that is more than a fifth of the step in two looks in a row, for the same rank, and so three looks
after a rank became slow at the latest: 15 s or 30 steps. A checkpoint that one rank writes now and then is not told.
""",
    check=check,
    limits={"share": 0.2},
    limit_notes={"share": "of a step's time that the others wait for it"},
    kinds=("ranks",),
)
