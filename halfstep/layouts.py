"""Layouts of master weights: how the weight that the optimizer moves is kept beside a 16-bit one.

A layout stores an fp32 weight as a ``high`` part, which is the 16-bit weight that the model computes with, and a
``low`` part that the optimizer alone needs:

    layout      high          low             bytes  what survives a step
    copy        nearest       fp32            2 + 4  all of fp32
    split16     nearest       int16           2 + 2  all of fp32 (fp16: down to 2^-40)
    split8      nearest       int8            2 + 1  8 bits more than the 16-bit weight has
    kahan       nearest       bf16            2 + 2  8 significant bits of the rounding error
    stochastic  drawn         none            2 + 0  the 16-bit weight; an update survives on average

``read`` gives the fp32 weight, ``write`` stores one. Reading and writing back changes no bit in any of them, so a step
that the optimizer skips on the device leaves the weights as they are. All work on flat tensors, in place.
"""

from __future__ import annotations

import torch

_HALF_UP = 0x8000
_HIGH_BITS = -0x10000
_MANTISSA_BITS, _LOWEST_EXPONENT = 10, -14  # of fp16


class Copy:
    """The fp32 weight itself is the low part, the 16-bit one is its rounding, to nearest, ties to even."""

    name = "copy"
    low_dtype: torch.dtype | None = torch.float32

    def read(self, high: torch.Tensor, low: torch.Tensor | None) -> torch.Tensor:
        """The fp32 weight. It may share memory with ``low``, so it is only moved between a read and a write."""
        assert low is not None
        return low

    def write(self, weight: torch.Tensor, high: torch.Tensor, low: torch.Tensor | None, seed: int) -> None:
        """Store ``weight``, which is scratch afterwards. ``seed`` fixes what is drawn, where a layout draws."""
        assert low is not None
        if weight.untyped_storage()._cdata != low.untyped_storage()._cdata:
            low.copy_(weight)
        high.copy_(weight)


class Split(Copy):
    """The low part is the rounding error in units of the 16-bit weight's ulp, divided into 2^8 or 2^16 steps.

    bf16 is the upper half of fp32, so the rounding error is the lower half, as a signed number: rounded half up,
    ``high = (bits + 0x8000) >> 16`` and ``low = bits - (high << 16)``, which lies in [-0x8000, 0x7fff]. With ties to
    even it would also be +0x8000, which 16 bits do not hold: one tie in two would be lost.

    fp16 has another exponent than fp32. There ``low`` is the difference of the magnitudes in units of ulp(high) / 2^16,
    with ``high`` rounded half up for the same reason. fp32 has 13 bits more than fp16's 11, so this is exact down to
    fp16's smallest normal, 6e-5. Below that fp16's ulp stays at 2^-24, and our unit at 2^-40, which is fp32's own ulp
    down to 2^-17 = 7.6e-6; a weight smaller than that is kept to within 2^-40 = 9e-13.
    """

    def __init__(self, bits: int) -> None:
        self.name = f"split{bits}"
        self._bits = bits
        self.low_dtype = {8: torch.int8, 16: torch.int16}[bits]

    def read(self, high: torch.Tensor, low: torch.Tensor | None) -> torch.Tensor:
        assert low is not None
        if high.dtype == torch.bfloat16:
            weight = high.float()
            weight.view(torch.int32).add_(low, alpha=1 << (16 - self._bits))
            return weight
        weight = high.float()
        rest = low.float().mul_(_fp16_ulp(weight, -self._bits))
        return rest.add_(weight.abs()).copysign_(weight)

    def write(self, weight: torch.Tensor, high: torch.Tensor, low: torch.Tensor | None, seed: int) -> None:
        assert low is not None
        if high.dtype == torch.bfloat16:
            bits = weight.view(torch.int32)
            # The lower half, read as a signed number, is bits - (high << 16).
            rest = low if self._bits == 16 else torch.empty_like(low, dtype=torch.int16)
            rest.copy_(bits)
            high.view(torch.int16).copy_(bits.add_(_HALF_UP).bitwise_right_shift_(16))
            if self._bits == 8:
                low.copy_(rest.clamp_(max=0x7F7F).add_(0x80).bitwise_right_shift_(8))
        else:
            unit = _fp16_ulp(weight)
            rounded = weight.abs().div_(unit).add_(0.5).floor_().mul_(unit)
            high.copy_(rounded.copysign(weight))
            unit = _fp16_ulp(rounded, -self._bits)
            half = 1 << (self._bits - 1)
            low.copy_(weight.abs_().sub_(rounded).div_(unit).round_().clamp_(-half, half - 1))


class Kahan(Copy):
    """The low part is the rounding error of the 16-bit weight, in bf16: Kahan's compensated sum.

    The next update is added to weight and error together, in fp32, and what its rounding loses is the new error. The
    error is cut to its 8 leading bits towards zero: rounded up to half an ulp it could tip the weight over.
    """

    name = "kahan"
    low_dtype = torch.bfloat16

    def read(self, high: torch.Tensor, low: torch.Tensor | None) -> torch.Tensor:
        assert low is not None
        return high.float().add_(low)

    def write(self, weight: torch.Tensor, high: torch.Tensor, low: torch.Tensor | None, seed: int) -> None:
        assert low is not None
        high.copy_(weight)
        error = weight.neg_().add_(high).neg_()  # -0.0 where there is none, which keeps the sign of a zero
        error.view(torch.int32).bitwise_and_(_HIGH_BITS)
        low.copy_(error)


class Stochastic(Copy):
    """No low part: the weight is rounded up with the probability that makes its mean exact, else down.

    The random numbers come from a generator of their own, seeded by the caller: the same on every replica, whatever
    else has drawn from torch's. In bf16 they are 16 bits, added to the 16 that are cut off. In fp16 they are 13 bits,
    all that fp32 has beyond a normal fp16 number; of a subnormal the probability is right to 2^-13.
    """

    name = "stochastic"
    low_dtype = None

    def read(self, high: torch.Tensor, low: torch.Tensor | None) -> torch.Tensor:
        return high.float()

    def write(self, weight: torch.Tensor, high: torch.Tensor, low: torch.Tensor | None, seed: int) -> None:
        drawn = _draw(weight, seed)
        if high.dtype == torch.bfloat16:
            weight.view(torch.int32).add_(drawn).add_(0x8000).bitwise_and_(_HIGH_BITS)
        else:
            unit = _fp16_ulp(weight)
            weight.div_(unit).add_(drawn.bitwise_and_(0x1FFF).float().mul_(2.0**-13)).floor_().mul_(unit)
        high.copy_(weight)


LAYOUTS: dict[str, Copy] = {layout.name: layout for layout in (Copy(), Split(16), Split(8), Kahan(), Stochastic())}
"""The layouts by name. ``fp32``, autocast's way, needs none: the weight of the model is the master."""


def _draw(weight: torch.Tensor, seed: int) -> torch.Tensor:
    """16 random bits for each weight, in [-0x8000, 0x7fff]: four from each word, since words are what costs time."""
    generator = torch.Generator(weight.device).manual_seed(seed)
    words = torch.empty(-(-weight.numel() // 4), dtype=torch.int64, device=weight.device)
    words.random_(-(1 << 63), None, generator=generator)
    return words.view(torch.int16)[: weight.numel()].view(weight.shape)


def _fp16_ulp(weight: torch.Tensor, shift: int = 0) -> torch.Tensor:
    """The distance from an fp32 number to the next one that fp16 holds, times 2^shift, from its exponent."""
    exponent = weight.view(torch.int32).bitwise_right_shift(23).bitwise_and_(0xFF)
    exponent.clamp_(min=127 + _LOWEST_EXPONENT).add_(shift - _MANTISSA_BITS)
    return exponent.bitwise_left_shift_(23).view(torch.float32)
