"""Slow plain twin of the ranges: values are rounded to the format and counted, at every scale anew."""

from __future__ import annotations

import math

import torch

from halfstep.formats import FORMATS


def counts(values, format, scale=1.0):
    """(flushed to zero, subnormal, overflowing) of fp32 ``values`` times ``scale``."""
    exact = values.double() * scale
    rounded = exact.float().to(FORMATS[format].dtype).float()
    flushed = (rounded == 0) & (values != 0)
    subnormal = (exact.abs() < FORMATS[format].tiny) & (values != 0) & ~flushed
    over = ~rounded.isfinite()
    if (
        format == "e4m3"
    ):  # it has no infinity, and torch gives its largest number for what is beyond 448 and half a step
        over |= exact.abs() > 464
    return int(flushed.sum()), int(subnormal.sum()), int(over.sum())


def brute_force_scale(parts):
    """Of all powers of two the one that loses least of the (values, format) parts, with a bit to spare."""
    best = None
    for power in range(-126, 128):
        found = [counts(values, format, 2.0**power) for values, format in parts]
        if any(counts(values, format, 2.0 ** (power + 1))[2] for values, format in parts):
            continue
        cost = (sum(flushed for flushed, _, _ in found), sum(subnormal for _, subnormal, _ in found), abs(power))
        best = min(best or (cost, power), (cost, power))
    return None if best is None else 2.0 ** best[1]


def gaussian_pct(sigma, format="fp16"):
    """Shares in percent of a Gaussian that ``format`` flushes, and makes subnormal, in closed form."""
    limits = FORMATS[format].smallest_subnormal / 2, FORMATS[format].tiny
    flushed, below = (100 * math.erf(limit / sigma / math.sqrt(2)) for limit in limits)
    return flushed, below - flushed


def spread(n, low=-45, high=12, seed=0):
    """Values whose exponents lie anywhere between ``low`` and ``high``, of both signs, with some zeros."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.rand(n, generator=generator, dtype=torch.double) * (high - low) + low
    values = (2**exponents * torch.randn(n, generator=generator, dtype=torch.double).sign()).float()
    values[::17] = 0
    return values
