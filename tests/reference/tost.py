"""Slow plain twin of the verdict's statistics: densities summed by hand, no scipy and no quantile function.

Two one-sided tests (Schuirmann 1987): equivalent at 5 % if both "the gap is at most -margin" and "the gap is at least
+margin" are rejected at 5 %. The fast code asks whether the 90 % interval lies inside the margin, which is the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def t_cdf(x: float, df: int, num_slices: int = 2_000) -> float:
    """Student's t by Simpson's rule from 0 to ``x``."""
    scale = math.exp(math.lgamma((df + 1) / 2) - math.lgamma(df / 2)) / math.sqrt(df * math.pi)
    width = x / num_slices
    total = 0.0
    for i in range(num_slices + 1):
        weight = 1 if i in (0, num_slices) else 4 if i % 2 else 2
        total += weight * (1 + (i * width) ** 2 / df) ** (-(df + 1) / 2)
    return 0.5 + scale * total * width / 3


def chi2_cdf(x: float, df: int, num_slices: int = 2_000) -> float:
    """The chi-square distribution for df >= 2, by Simpson's rule."""
    scale = 1 / (2 ** (df / 2) * math.gamma(df / 2))
    width = x / num_slices
    total = 0.0
    for i in range(num_slices + 1):
        weight = 1 if i in (0, num_slices) else 4 if i % 2 else 2
        u = i * width
        total += weight * (u ** (df / 2 - 1)) * math.exp(-u / 2)
    return scale * total * width / 3


def one_sided_p(differences: Sequence[float], border: float, above: bool) -> float:
    """p value of "the mean is not above ``border``" (or not below it)."""
    n = len(differences)
    mean = sum(differences) / n
    sd = math.sqrt(sum((d - mean) ** 2 for d in differences) / (n - 1))
    t = (mean - border) / (sd / math.sqrt(n))
    return 1 - t_cdf(t, n - 1) if above else t_cdf(t, n - 1)


def word(differences: Sequence[float], margin: float) -> str:
    """The verdict as five tests at 5 %."""
    if one_sided_p(differences, margin, above=False) < 0.05:
        return "equivalent" if one_sided_p(differences, -margin, above=True) < 0.05 else "not worse"
    if one_sided_p(differences, margin, above=True) < 0.05:
        return "materially worse"
    return "worse" if one_sided_p(differences, 0.0, above=True) < 0.05 else "inconclusive"


def settled_share(gap: float, sd: float, margin: float, n: int, num_draws: int, seed: int = 0) -> tuple[float, float]:
    """By simulation: how often n normal differences rule out the margin, and how often they rule out 0."""
    import random

    draw = random.Random(seed)
    t95 = next(x / 1000 for x in range(1000, 10_000) if t_cdf(x / 1000, n - 1, 400) >= 0.95)
    below = above = 0
    for _ in range(num_draws):
        values = [draw.gauss(gap, sd) for _ in range(n)]
        mean = sum(values) / n
        half = t95 * math.sqrt(sum((v - mean) ** 2 for v in values) / (n - 1) / n)
        below += mean + half < margin
        above += mean - half > 0
    return below / num_draws, above / num_draws
