"""The layouts of master weights, one number at a time in exact arithmetic: slow, plain, and not made of bit tricks."""

from fractions import Fraction
from math import floor

import torch

MANTISSA_BITS = {torch.bfloat16: 7, torch.float16: 10, torch.float32: 23}
LOWEST_EXPONENT = {torch.bfloat16: -126, torch.float16: -14, torch.float32: -126}


def ulp(value, dtype):
    """The distance between the numbers of ``dtype`` around ``value``, on the side away from zero."""
    magnitude, exponent = abs(value), LOWEST_EXPONENT[dtype]
    while magnitude >= Fraction(2) ** (exponent + 1):
        exponent += 1
    return Fraction(2) ** (exponent - MANTISSA_BITS[dtype])


def half_up(value, unit):
    """``value`` rounded to a multiple of ``unit``, halves away from zero."""
    rounded = floor(abs(value) / unit + Fraction(1, 2)) * unit
    return rounded if value >= 0 else -rounded


def half_even(value, unit):
    return round(value / unit) * unit


def toward_zero(value, unit):
    rounded = floor(abs(value) / unit) * unit
    return rounded if value >= 0 else -rounded


def step_of(weight, high, dtype, bits):
    """What ``low`` counts. For bf16 the numbers of fp32, which lie closer below a power of two; else ulp(high)."""
    return ulp(min(weight, high, key=abs) if dtype == torch.bfloat16 else high, dtype) / 2**bits


def split(weight, dtype, bits):
    """(high, low) of one weight: ``high`` is nearest, and ``low`` counts steps from it, away from zero."""
    weight = Fraction(weight)
    high = half_up(weight, ulp(weight, dtype))
    rest = (abs(weight) - abs(high)) / step_of(weight, high, dtype, bits)
    rest = floor(rest + Fraction(1, 2)) if dtype == torch.bfloat16 else round(rest)
    return high, max(-(2 ** (bits - 1)), min(2 ** (bits - 1) - 1, rest))


def join(high, low, dtype, bits, is_negative):
    """The weight that (high, low) stand for, before fp32 rounds it."""
    high = abs(Fraction(high))
    just_below = high - ulp(high, dtype) / 2**30 if high and low < 0 else high
    magnitude = high + low * step_of(just_below, high, dtype, bits)
    return -magnitude if is_negative else magnitude


def kahan(weight, dtype):
    """(high, error): to nearest even, and what that lost, cut to the eight bits of a bf16."""
    weight = Fraction(weight)
    high = half_even(weight, ulp(weight, dtype))
    error = weight - high
    return high, toward_zero(error, ulp(error, torch.bfloat16))


def chance_up(weight, dtype):
    """(number towards zero, number away from zero, chance of the latter) for a mean that is ``weight``."""
    weight = Fraction(weight)
    unit = ulp(weight, dtype)
    down = toward_zero(weight, unit)
    up = down + unit if weight >= 0 else down - unit
    return down, up, abs(weight - down) / unit
