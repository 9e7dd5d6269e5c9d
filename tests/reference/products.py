"""Slow plain twins of 16-bit products, and the measure that tells a right one from one that sums in 16 bit.

A product of two 16-bit numbers is exact in float64 (22 bits of mantissa at most) and float64 sums are exact for our
purpose: their error is 2^-29 of fp32's. So :func:`exact` is what the result would be without any rounding, and
:func:`product` rounds it once, which is the best that a 16-bit result can be.

The measure is the backward error: the distance to :func:`exact` in units of ``eps x |A||B|``. One rounding of the
result costs 0.5 at most, whatever the sizes; K sums in fp32 add K x 2^-24 / eps (:func:`bound`). The relative error of
an element tells nothing: where a sum cancels, it is large for a right product too.
"""

from __future__ import annotations

import torch

FP32_UNIT = 2.0**-24
"""Largest relative error of one fp32 rounding."""


def exact(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A B in float64, one summand after the other."""
    a, b = a.double(), b.double()
    total = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float64)
    for k in range(a.shape[1]):
        total += a[:, k, None] * b[None, k, :]
    return total


def rounded(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """float64 to 16 bit in one rounding, to nearest and ties to even.

    torch goes through fp32, which can make a tie of what was none. Rounding to odd on the way cannot: a value between
    two fp32 numbers takes the one with the odd last bit, and 24 bits are more than 11 + 2 (Boldo and Melquiond 2008).
    """
    fp32 = values.float()
    wide = fp32.double()
    is_even = fp32.view(torch.int32) & 1 == 0
    towards = torch.where(wide < values, torch.inf, -torch.inf).float()
    odd = torch.where((wide != values) & is_even & torch.isfinite(wide), torch.nextafter(fp32, towards), fp32)
    return odd.to(dtype)


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The 16-bit product A B with exact products and sums, rounded once."""
    return rounded(exact(a, b), a.dtype)


def product_that_sums_in_16_bit(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The wrong one: every partial sum is rounded to the format of its inputs."""
    total = torch.zeros(a.shape[0], b.shape[1], dtype=a.dtype)
    for k in range(a.shape[1]):
        total = (total.float() + a[:, k, None].float() * b[None, k, :].float()).to(a.dtype)
    return total


def error(result: torch.Tensor, exact: torch.Tensor, magnitude: torch.Tensor) -> float:
    """Largest distance of ``result`` to ``exact`` in units of eps x ``magnitude``, which is |A||B|.

    Below the smallest normal number the format's step is fixed, and the unit is that step. An infinity counts as the
    number that would follow the format's largest one, since that is what it was rounded from.
    """
    if result.numel() == 0:
        return 0.0
    info = torch.finfo(result.dtype)
    beyond = 2.0 * info.max - info.max * (1 - info.eps / (2 - info.eps))
    got = result.double()
    got = torch.where(torch.isinf(got), torch.sign(got) * beyond, got)
    unit = torch.clamp(info.eps * magnitude.double(), min=info.smallest_normal * info.eps)
    return ((got - exact.double()).abs() / unit).max().item()


def bound(num_terms: float, dtype: torch.dtype, num_roundings: int = 1) -> float:
    """What :func:`error` may be: half a unit for each rounding to 16 bit, and one fp32 rounding for each term."""
    return 0.5 * num_roundings + num_terms * FP32_UNIT / torch.finfo(dtype).eps
