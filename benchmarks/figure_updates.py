"""Draw docs/lost-updates.svg: the share of AdamW's updates that a bf16 weight loses, by learning rate.

Run ``python benchmarks/figure_updates.py``; it prints the figures too. Dots are what UpdateMeter measures in step 100
of gradients that are pure noise, with the weights as they were initialised. Lines are computed:

    update      lr x m / sqrt(v), where m is the mean of N(0, 1) gradients with weights (1 - b1) b1^k and v is near 1:
                a normal number of standard deviation s = sqrt((1 - b1) / (1 + b1)) = 0.23 for b1 = 0.9
    lost        if |update| < h, half the distance to the neighbour on its side: erf(h / (lr s sqrt(2)))
    share       the mean of that over both sides and over the bf16 numbers, each with its probability
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import torch
from chart import COLORS, Chart
from torch import nn

from halfstep.updates import UpdateMeter

FAN_IN, NUM_ROWS, NUM_STEPS, BETA1 = 1024, 256, 100, 0.9
RATES = [10 ** (-6 + half / 2) for half in range(11)]
Cdf = Callable[[float], float]


def near_one(x: float) -> float:
    """P(weight < x) of N(1, 0.02^2), as a norm's weight is after some training."""
    return (1 + math.erf((x - 1) / (0.02 * math.sqrt(2)))) / 2


def default_init(x: float) -> float:
    """P(weight < x) of nn.Linear's uniform start in +-1 / sqrt(fan_in)."""
    return min(1.0, max(0.0, (1 + x * math.sqrt(FAN_IN)) / 2))


CURVES: dict[str, tuple[Cdf, str]] = {
    "weights near 1": (near_one, COLORS[0]),
    f"nn.Linear({FAN_IN})": (default_init, COLORS[1]),
}


def probabilities(cdf: Cdf) -> list[tuple[float, float, float]]:
    """(probability, half the distance outwards, half of it inwards) for the bf16 numbers from 2^-40 to 2."""
    found = []
    for exponent in range(-40, 1):
        for mantissa in range(128):
            outward = math.ldexp(1.0, exponent - 8)
            inward = outward / (1 if mantissa else 2)
            size = math.ldexp(1 + mantissa / 128, exponent)
            # What rounds to this number, and to its negative.
            mass = cdf(size + outward) - cdf(size - inward) + cdf(-size + inward) - cdf(-size - outward)
            if mass > 0:
                found.append((mass, outward, inward))
    return found


def computed_pct(cdf: Cdf, lr: float) -> float:
    spread = lr * math.sqrt((1 - BETA1) / (1 + BETA1)) * math.sqrt(2)
    return 100 * sum(p * (math.erf(a / spread) + math.erf(b / spread)) / 2 for p, a, b in probabilities(cdf))


def measured_pct(cdf: Cdf, lr: float) -> float:
    torch.manual_seed(0)
    model = nn.Linear(FAN_IN, NUM_ROWS, bias=False)
    if cdf is near_one:
        nn.init.normal_(model.weight, 1.0, 0.02)
    model = model.bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(BETA1, 0.999), weight_decay=0.0, fused=True)
    meter = UpdateMeter(model, optimizer, every=NUM_STEPS, num_samples=16384)
    for number in range(NUM_STEPS):
        # The moments settle while the weights stay.
        optimizer.param_groups[0]["lr"] = lr if number == NUM_STEPS - 1 else 0.0
        model.weight.grad = torch.randn_like(model.weight)
        optimizer.step()
    measured = meter.report().unmoved_pct
    assert measured is not None
    return measured


def draw(measured: dict[str, list[float]]) -> str:
    chart = Chart(
        "AdamW updates lost by plain bf16 weights: computed (lines), measured (dots)",
        "learning rate",
        {power: f"1e{power}" for power in range(-6, 0)},
        {pct: f"{pct}%" for pct in range(0, 101, 25)},
    )
    for row, (name, (cdf, color)) in enumerate(CURVES.items()):
        powers = [-6 + step / 20 for step in range(101)]
        chart.line([(power, computed_pct(cdf, 10**power)) for power in powers], color)
        chart.dots([(math.log10(lr), pct) for lr, pct in zip(RATES, measured[name], strict=True)], color)
        chart.label(95 - 7 * row, name, color)
    return chart.svg()


if __name__ == "__main__":
    torch.set_num_threads(1)
    measured = {name: [measured_pct(cdf, lr) for lr in RATES] for name, (cdf, _) in CURVES.items()}
    print("| lr | " + " | ".join(f"{name}, measured | computed" for name in CURVES) + " |")
    for place, lr in enumerate(RATES):
        cells = [f"{measured[n][place]:.1f} | {computed_pct(cdf, lr):.1f}" for n, (cdf, _) in CURVES.items()]
        print(f"| {lr:.1e} | " + " | ".join(cells) + " |")
    (Path(__file__).parent.parent / "docs" / "lost-updates.svg").write_text(draw(measured))
