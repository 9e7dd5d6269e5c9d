"""Slow plain twin of what a recorder says of a tensor: one Python float after the other."""

from __future__ import annotations

import math
import struct

import torch

LARGEST = struct.unpack("f", struct.pack("I", 0x7F7FFFFF))[0]
SMALLEST = 2.0**-149


def plain_values(tensor: torch.Tensor) -> dict[str, object]:
    """Histogram of exponents, counts and extremes of a tensor's values, taken one by one."""
    if tensor.is_complex():
        tensor = torch.stack([tensor.real, tensor.imag])
    values = [in_fp32(value) for value in tensor.detach().double().flatten().tolist()]
    finite = [abs(value) for value in values if math.isfinite(value) and value != 0]
    exponents: dict[int, int] = {}
    for value in finite:
        exponent = max(math.frexp(value)[1] - 1, -127)
        exponents[exponent] = exponents.get(exponent, 0) + 1
    return {
        "exponents": exponents,
        "num_zeros": sum(value == 0 for value in values),
        "num_nan": sum(math.isnan(value) for value in values),
        "num_inf": sum(math.isinf(value) for value in values),
        "num_negative_inf": values.count(-math.inf),
        "largest": max(finite, default=0.0),
        "smallest": min(finite, default=None),
    }


def in_fp32(value: float) -> float:
    """A float64 number as fp32 has it; beyond its ends, at its ends."""
    if value == 0 or not math.isfinite(value):
        return value
    rounded = LARGEST if abs(value) > LARGEST else struct.unpack("f", struct.pack("f", abs(value)))[0]
    return math.copysign(rounded or SMALLEST, value)
