"""Draw docs/communication.svg: the error of a mean of gradients over 2 to 1024 ranks, by how they travel.

Run ``python benchmarks/figure_communication.py``; it prints the figures too. Gradients are N(0, 1) noise, which is what
those of many ranks mostly are, and the error is relative to the size of their mean, in units of one rounding to bf16,
r = 0.00165 (root mean square, of a normal number). Dots are simulated in torch, lines computed:

    wire=bf16       every rank's number is rounded, and the mean: sqrt(r^2 + r^2) = 1.41 r
    bf16 ring       each of n - 1 additions rounds a sum of k numbers, of size sqrt(k), and the n numbers are rounded:
                    sqrt(n + 2 + 3 + ... + n) against sqrt(n), so sqrt((n + 1) / 2 + 1 - 1 / n) r
    fp32            the same, with r / 2^16
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import torch
from chart import COLORS, Chart

NUM_RANKS = [2**power for power in range(1, 11)]
SIZE = 2**14


def ring(gradients: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The sum goes from rank to rank in ``dtype``, as a ring's does. Each rank has divided its own by a power of 2."""
    total = gradients[0].to(dtype)
    for gradient in gradients[1:]:
        total = total + gradient.to(dtype)
    return total.double() / len(gradients)


def wire(gradients: torch.Tensor) -> torch.Tensor:
    return gradients.bfloat16().sum(0, dtype=torch.float32).div_(len(gradients)).bfloat16().double()


def of_ring(num: int) -> float:
    return math.sqrt((num + 1) / 2 + 1 - 1 / num)


WAYS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[int], float]]] = {
    "bf16 all-reduce (ring)": (lambda gradients: ring(gradients, torch.bfloat16), of_ring),
    "wire=bf16": (wire, lambda num: math.sqrt(2)),
    "fp32": (lambda gradients: ring(gradients, torch.float32), lambda num: of_ring(num) / 2**16),
}


def size(x: torch.Tensor) -> float:
    return x.square().mean().sqrt().item()


def measure() -> dict[str, list[float]]:
    """The error of each way, by number of ranks, in roundings."""
    generator = torch.Generator().manual_seed(0)
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    for num in NUM_RANKS:
        gradients = torch.randn(num, SIZE, generator=generator)
        true = gradients.double().mean(0)
        one = size(true.float().bfloat16().double() - true)
        for way, (mean_of, _) in WAYS.items():
            found[way].append(size(mean_of(gradients) - true) / one)
    return found


def draw(found: dict[str, list[float]]) -> str:
    x_ticks = {float(math.log2(num)): str(num) for num in NUM_RANKS if math.log2(num) % 3 == 1}
    x_ticks[0.0] = ""
    y_ticks = {0.0: "0", 1.0: "1", **{float(y): str(y) for y in range(5, 26, 5)}}
    chart = Chart("Error of a mean of gradients over ranks", "ranks", x_ticks, y_ticks)
    for (way, (_, computed)), color in zip(WAYS.items(), COLORS, strict=True):
        chart.line([(math.log2(num), computed(num)) for num in NUM_RANKS], color)
        chart.dots([(math.log2(num), error) for num, error in zip(NUM_RANKS, found[way], strict=True)], color)
        chart.label(computed(NUM_RANKS[-1]), way, color)
    return chart.svg()


if __name__ == "__main__":
    found = measure()
    for way, errors in found.items():
        computed = WAYS[way][1]
        pairs = (f"{error:.3g} ({computed(num):.3g})" for num, error in zip(NUM_RANKS, errors, strict=True))
        print(f"{way}: simulated (computed) {', '.join(pairs)}")
    (Path(__file__).parent.parent / "docs" / "communication.svg").write_text(draw(found))
