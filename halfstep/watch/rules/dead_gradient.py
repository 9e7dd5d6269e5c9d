"""Parameters whose gradient is exactly zero, or is flushed there at the loss scale in use."""

from __future__ import annotations

from collections.abc import Mapping

from halfstep.errors import and_more
from halfstep.watch.entry import Entry
from halfstep.watch.rule import Finding, Rule
from halfstep.watch.window import Window

_GRADIENTS = ("gradient", "weight gradient")


def check(window: Window, limits: Mapping[str, float]) -> Finding | None:
    return _flushed(window.ranges, limits) or _zero(window, int(limits["samples"]))


def _flushed(ranges: Entry | None, limits: Mapping[str, float]) -> Finding | None:
    rows = () if ranges is None else ranges["modules"]
    flushed = {
        row["module"] or "the model itself": row
        for row in rows
        if row["kind"] in _GRADIENTS
        and row["meets"]
        and row["zero_pct"] > limits["flushed_pct"]
        and row["lost_sum_pct"] > limits["lost_sum_pct"]
    }
    if ranges is None or not flushed:
        return None
    names = sorted(flushed, key=lambda name: -flushed[name]["zero_pct"])
    worst = flushed[names[0]]
    best, scale = ranges["best_scale"], ranges["scale"]
    raises = best is not None and best > scale
    others = f", and so in {and_more(names[1:])}" if names[1:] else ""
    return Finding(
        f"{worst['format']} flushes {worst['zero_pct']:.3g} % of the {worst['kind']} of {names[0]} to zero at a loss"
        f" scale of {scale:g}{others}",
        f"Raise the loss scale: {best:g} loses least of all gradients together."
        if raises
        else "No loss scale suits all gradients: keep the modules with the largest ones in fp32, or train in bf16.",
        "flushed",
    )


def _zero(window: Window, num_samples: int) -> Finding | None:
    samples = list(window.layers)[-num_samples:]
    if len(samples) < num_samples:
        return None
    norms = [dict(zip(sample["parameters"], sample["norms"], strict=True)) for sample in samples]
    dead = [name for name in norms[-1] if name not in window.resting and all(of.get(name) == 0 for of in norms)]
    if not dead or not any(norms[-1].values()):
        return None
    steps = ", ".join(str(sample["step"]) for sample in samples)
    is_scaled = window.scale.kind != "none"
    cause = "is flushed to zero at this loss scale, or dead units or" if is_scaled else "dies in dead units, or"
    return Finding(
        f"the gradient of {and_more(dead)} was exactly 0 in steps {steps}, while that of others was not",
        f"Look with halfstep ranges whether it {cause} a part of the model that nothing uses explain it.",
        "zero",
    )


RULE = Rule(
    name="dead-gradient",
    severity="warning",
    summary="The gradient of a parameter is exactly zero, or flushed there, while others learn.",
    why="""\
fp16 has no number between 0 and 6e-8: a gradient whose elements are below half of that is zero as a whole, and its
parameter stands still without any error. Layers far from the loss are hit first.

Every 100 steps the log keeps the norm of each parameter's gradient. The rule fires when one is exactly 0 in three of
these in a row while others are not. Parameters that are frozen or unused have no gradient and are not in the list; one
that was 0 before and came back, as an expert that few tokens reach, is at rest at times and is left alone from then on.
Adapters whose second matrix starts at zero have a gradient of zero in the first step only. What remains may also be a
layer of dead units, which the gradient does not leave either.

Where ranges were recorded (`stepper.record(halfstep.explain.ranges_of(...))`), the rule also fires when more than 1 %
of the non-zero values of a gradient and more than 0.1 % of their sum are flushed to zero at the scale in use: the same
limits as those of halfstep ranges. Zeros that were there before the cast, as a ReLU makes them, do not count.
""",
    check=check,
    limits={"samples": 3, "flushed_pct": 1.0, "lost_sum_pct": 0.1},
    limit_notes={
        "samples": "norms in a row that are 0, at most 3",
        "flushed_pct": "% of the non-zero values of a gradient that become 0",
        "lost_sum_pct": "% of the sum of their sizes that is lost so",
    },
    kinds=("layers", "ranges"),
)
