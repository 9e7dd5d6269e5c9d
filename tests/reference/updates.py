"""Slow plain twin of the numbers of a 16-bit format: all of them in a list, in exact integers.

A number is counted in units of 2^-UNIT, fine enough for a thousandth of bf16's smallest subnormal (2^-133).
"""

from __future__ import annotations

from bisect import bisect_left

UNIT = 133 + 12
BITS = {"bf16": (8, 7), "fp16": (5, 10)}
"""Exponent bits and mantissa bits."""


def magnitudes(format: str) -> list[int]:
    """Every finite number from 0 up. Its place is its bit pattern, so an even number stands in an even place."""
    exponent_bits, mantissa_bits = BITS[format]
    bias = 2 ** (exponent_bits - 1) - 1
    numbers = []
    for bits in range((2**exponent_bits - 1) << mantissa_bits):
        exponent, mantissa = bits >> mantissa_bits, bits & (2**mantissa_bits - 1)
        # Subnormal: the exponent of the smallest normal number, without the leading one.
        significand = mantissa + (2**mantissa_bits if exponent else 0)
        numbers.append(significand << UNIT + max(exponent, 1) - bias - mantissa_bits)
    return numbers


def ulp(numbers: list[int], place: int) -> int:
    """Distance to the next number away from zero; of the largest, to the one before."""
    place = min(place, len(numbers) - 2)
    return numbers[place + 1] - numbers[place]


def rounded(numbers: list[int], value: int) -> int | None:
    """To nearest, ties to even; None where that is infinite."""
    sign, size = (-1 if value < 0 else 1), abs(value)
    above = bisect_left(numbers, size)
    if above == len(numbers):
        half = ulp(numbers, above - 1) // 2
        return sign * numbers[-1] if size - numbers[-1] < half else None  # the largest number is odd
    if numbers[above] == size:
        return value
    low, high = numbers[above - 1], numbers[above]
    if 2 * size == low + high:
        return sign * (low if (above - 1) % 2 == 0 else high)
    return sign * (low if 2 * size < low + high else high)


def is_lost(numbers: list[int], weight: int, update: int) -> bool:
    """Whether rounding takes weight + update back to the weight."""
    return rounded(numbers, weight + update) == weight
