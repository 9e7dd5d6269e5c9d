"""The number formats that training uses, and what each can hold.

A format is a sign, ``exponent_bits`` and ``mantissa_bits``; everything else follows (IEEE 754-2019, section 3.3):

    bias = 2^(exponent_bits - 1) - 1
    tiny = 2^(1 - bias)                      smallest normal number
    smallest_subnormal = tiny * eps
    eps = 2^-mantissa_bits                   distance from 1 to the next number
    max = 2^bias * (2 - eps)                 largest finite number, where all-ones exponents mean inf and NaN

``e4m3`` is the exception: it has no infinity and gives up one mantissa pattern only for NaN, so its largest number is
448 = 2^8 * 1.75 (OCP 8-bit floating point specification, revision 1.0). ``tf32`` is what a tensor core reads of a
float32: the exponent of fp32 with ten bits of mantissa; tensors are stored as float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from halfstep.errors import HalfstepError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Format:
    """One number format. ``torch_name`` is the dtype in which its values are stored."""

    name: str
    exponent_bits: int
    mantissa_bits: int
    torch_name: str
    has_inf: bool = True

    @property
    def bytes(self) -> int:
        """Bytes that one stored value takes; a tf32 value is stored as float32."""
        return 4 if self.torch_name == "float32" else (1 + self.exponent_bits + self.mantissa_bits) // 8

    @property
    def eps(self) -> float:
        """Distance from 1 to the next larger number."""
        return math.ldexp(1.0, -self.mantissa_bits)

    @property
    def tiny(self) -> float:
        """Smallest normal number. Below it a value loses bits, it does not vanish yet."""
        return math.ldexp(1.0, 2 - 2 ** (self.exponent_bits - 1))

    @property
    def smallest_subnormal(self) -> float:
        """Smallest number above zero; half of it and less rounds to zero."""
        return self.tiny * self.eps

    @property
    def max(self) -> float:
        """Largest finite number."""
        bias = 2 ** (self.exponent_bits - 1) - 1
        if not self.has_inf:
            return math.ldexp(2 - 2 * self.eps, bias + 1)
        return math.ldexp(2 - self.eps, bias)

    @property
    def dtype(self) -> torch.dtype:
        """The torch dtype that stores this format. Imports torch."""
        import torch

        dtype = getattr(torch, self.torch_name)
        assert isinstance(dtype, torch.dtype)
        return dtype

    def fits(self, value: float) -> bool:
        """Whether ``value`` rounds to a finite number of this format, and to zero only if it is zero.

        Rounding is to nearest, ties to even: less than half a step beyond ``max`` still rounds down to it, and exactly
        half the smallest subnormal rounds to zero. Exactly half a step beyond ``max`` is too large, except in e4m3,
        whose largest number is even.
        """
        if value == 0.0:
            return True
        if not math.isfinite(value):
            return False
        half_step_at_max = math.ldexp(self.eps, math.frexp(self.max)[1] - 2)
        limit = self.max + half_step_at_max
        is_low_enough = abs(value) < limit or (abs(value) == limit and not self.has_inf)
        return is_low_enough and abs(value) > self.smallest_subnormal / 2


FORMATS: dict[str, Format] = {
    format.name: format
    for format in (
        Format("fp32", 8, 23, "float32"),
        Format("tf32", 8, 10, "float32"),
        Format("bf16", 8, 7, "bfloat16"),
        Format("fp16", 5, 10, "float16"),
        Format("e4m3", 4, 3, "float8_e4m3fn", has_inf=False),
        Format("e5m2", 5, 2, "float8_e5m2"),
    )
}

SIXTEEN_BIT = frozenset({"bf16", "fp16"})
"""The formats that a mixed-precision region computes in."""


def get_format(name: str) -> Format:
    """The format called ``name``; HalfstepError lists the known ones otherwise."""
    try:
        return FORMATS[name]
    except KeyError:
        raise HalfstepError(
            f"format {name!r}", "no number format has this name", f"Use one of {', '.join(FORMATS)}."
        ) from None


def format_of(dtype: torch.dtype) -> Format:
    """The format that a tensor of ``dtype`` is stored in (float32 is fp32, never tf32)."""
    name = str(dtype).removeprefix("torch.")
    for format in FORMATS.values():
        if format.torch_name == name:
            return format
    raise HalfstepError(f"dtype {name}", "it is not a training format", f"Use one of {', '.join(FORMATS)}.")
