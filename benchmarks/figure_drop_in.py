"""Draw docs/drop-in.svg: the loss scale over overflows in a row, of torch's scaler and of ours.

Run ``python benchmarks/figure_drop_in.py``. Both scalers run; what is drawn is what they say.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from chart import COLORS, Chart

from halfstep import GradScaler, ScaleExhausted

NUM_OVERFLOWS = 180
ZERO = -160
"""Where a scale of 0 is drawn, below fp32's smallest number, 2^-149."""


def scales(scaler: torch.amp.GradScaler) -> list[float]:
    """The scale before each of NUM_OVERFLOWS overflows, or up to the one that ended the run."""
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    seen = []
    for _ in range(NUM_OVERFLOWS):
        scaler.scale(weight.sum()).backward()
        seen.append(scaler.get_scale())
        weight.grad = torch.full((1,), math.inf)
        scaler.step(optimizer)
        try:
            scaler.update()
        except ScaleExhausted:
            break
        optimizer.zero_grad()
    return seen


def draw() -> str:
    chart = Chart(
        "The loss scale over overflows in a row",
        "overflows in a row",
        {place: str(place) for place in range(0, NUM_OVERFLOWS + 1, 20)},
        {ZERO: "0"} | {float(power): f"2^{power}" for power in (-120, -80, -40, 0, 40)},
    )
    for name, scaler, color in (
        ("torch.amp", torch.amp.GradScaler("cpu"), COLORS[0]),
        ("halfstep", GradScaler("cpu"), COLORS[1]),
    ):
        seen = scales(scaler)
        end = f"0 after {seen.index(0.0)}" if 0.0 in seen else f"stops at {len(seen)}"
        points = [(float(place), math.log2(scale) if scale else ZERO) for place, scale in enumerate(seen)]
        chart.line(points, color)
        chart.dots(points[-1:], color)
        chart.label(points[-1][1], f"{name}: {end}", color)
    return chart.svg()


if __name__ == "__main__":
    (Path(__file__).parent.parent / "docs" / "drop-in.svg").write_text(draw())
