"""How often the verdict is wrong: the table of docs/verdict.md, by simulation.

    python benchmarks/verdict_calibration.py [EXPERIMENTS]

An experiment draws the final losses of FP32 over some seeds with sigma 1, and those of a candidate whose pairs
correlate by rho and whose true mean lies a gap above. ``judge`` sees the numbers alone. The last
part asks what other margins would have said of the same draws.
"""

from __future__ import annotations

import math
import random
import sys
from collections import Counter
from collections.abc import Callable
from statistics import stdev

from halfstep.compare.verdict import judge, sd_lower_bound

WORDS = ("equivalent", "not worse", "worse", "materially worse", "inconclusive")
Draw = Callable[[random.Random], float]

_LOG_VARIANCE = 0.5625  # of the lognormal, whose mean is e^(v/2) and whose variance is (e^v - 1) e^v

# Both have mean 0 and variance 1.
NOISE: dict[str, Draw] = {
    "normal": lambda draw: draw.gauss(0, 1),
    "skewed": lambda draw: (
        (draw.lognormvariate(0, math.sqrt(_LOG_VARIANCE)) - math.exp(_LOG_VARIANCE / 2))
        / math.sqrt((math.exp(_LOG_VARIANCE) - 1) * math.exp(_LOG_VARIANCE))
    ),
}


def upper_bound(values: list[float]) -> float:
    """The upper 95 % bound of sigma, which is the tempting choice."""
    from scipy.special import chdtri

    return stdev(values) * math.sqrt((len(values) - 1) / float(chdtri(len(values) - 1, 0.95)))


MARGINS: dict[str, Callable[[list[float]], float]] = {
    "lower bound (ours)": sd_lower_bound,
    "sd itself": stdev,
    "upper bound": upper_bound,
}


def simulate(
    num_seeds: int,
    gap: float,
    rho: float,
    num_experiments: int,
    noise: str = "normal",
    margin: Callable[[list[float]], float] | None = None,
) -> dict[str, float]:
    """Share of each word in percent."""
    draw, one, found = random.Random(0), NOISE[noise], Counter[str]()
    common, own = math.sqrt(rho), math.sqrt(1 - rho)  # what a seed does to both, and what a rounding error does to one
    for _ in range(num_experiments):
        shared = [common * one(draw) for _ in range(num_seeds)]
        reference = [s + own * one(draw) for s in shared]
        candidate = [gap + s + own * one(draw) for s in shared]
        found[judge(reference, candidate, margin(reference) if margin else None).word] += 1
    return {word: 100 * found[word] / num_experiments for word in WORDS}


def main(num_experiments: int) -> None:
    print(f"{num_experiments} experiments a line, share of each word in percent\n")
    print("| noise | true gap | rho | seeds | " + " | ".join(WORDS) + " |")
    print("|---|---|---|---|" + "---|" * len(WORDS))
    for noise, gaps in (("normal", (0.0, 1.0, 3.0)), ("skewed", (0.0,))):
        for gap in gaps:
            for rho in (0.0, 0.9):
                for num_seeds in (3, 5, 10):
                    shares = simulate(num_seeds, gap, rho, num_experiments, noise)
                    cells = " | ".join(f"{shares[word]:.1f}" for word in WORDS)
                    print(f"| {noise} | {gap:g} sigma | {rho:g} | {num_seeds} | {cells} |")
    print("\nCalled equivalent, in percent, by the margin that is learned from FP32's seeds (rho 0.9)\n")
    print("| margin | seeds | gap 0 | gap 1 sigma | gap 3 sigma |\n|---|---|---|---|---|")
    for name, margin in MARGINS.items():
        for num_seeds in (3, 5, 10):
            passed = [
                simulate(num_seeds, gap, 0.9, num_experiments, margin=margin)["equivalent"] for gap in (0.0, 1.0, 3.0)
            ]
            print(f"| {name} | {num_seeds} | " + " | ".join(f"{share:.1f}" for share in passed) + " |")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 2_000)
