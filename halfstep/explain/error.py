"""Units of error: what a format itself costs, so that an error beyond it is somebody's fault.

    u         half the distance from 1 to the next number: 2^-24 in fp32, 2^-11 in tf32 and fp16, 2^-8 in bf16
    product   max_ij  |C - AB|_ij / (u x (|A||B|)_ij)
    other     max_i   |x - exact|_i / (u x max_i |exact|_i)

A result that is rounded once is at most 1 away, in either unit and in every format. The first is the backward error of
a matrix product (Higham, Accuracy and Stability of Numerical Algorithms, 2nd edition, section 3.5); elementwise
relative error would alarm at every result that cancels, and cannot tell a product that accumulates in fp16 from a right
one in bf16.
"""

from __future__ import annotations

import math

import torch

from halfstep.dtypes import FORMAT_OF
from halfstep.formats import Format


def stored_format(dtype: torch.dtype) -> Format | None:
    """The format of ``dtype``, None for one that a step does not compute in, such as float64."""
    return FORMAT_OF.get(dtype.to_real() if dtype.is_complex else dtype)


def unit_of(format: Format) -> float:
    """u, the largest relative error of one rounding to ``format``."""
    return format.eps / 2


def difference(value: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """|value - exact| in float64; 0 where both are the same inf or both NaN, inf where one alone is not finite."""
    value, exact = widen(value), widen(exact)
    distance = (value - exact).abs_() if not value.is_complex() else (value - exact).abs()
    if math.isfinite(largest(distance)):
        return distance
    same = (value == exact) | (value.isnan() & exact.isnan())
    return torch.where(same, 0.0, distance.nan_to_num_(nan=torch.inf, posinf=torch.inf))


def widen(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` in float64 (complex128), without its gradient; never the same memory."""
    return tensor.detach().to(torch.complex128 if tensor.is_complex() else torch.float64, copy=True)


def largest(tensor: torch.Tensor) -> float:
    """Largest magnitude, inf or NaN if there is one, 0 of an empty tensor. Waits for the device, as all below."""
    return tensor.detach().abs().max().item() if tensor.numel() else 0.0


def scale_of(tensor: torch.Tensor) -> float:
    """Largest finite magnitude, 0 if there is none."""
    size = largest(tensor)
    return size if math.isfinite(size) else largest(torch.where(tensor.isfinite(), tensor, 0.0))


def in_units(distance: torch.Tensor, format: Format, scale: float | torch.Tensor) -> float:
    """Worst ``distance``, of :func:`difference`, in units of u x ``scale``.

    scale: a number for the whole tensor, or a tensor with one for each element. Below the smallest normal number of
           ``format`` the step between numbers shrinks no further, so neither does the unit.
    """
    if not isinstance(scale, torch.Tensor):
        return largest(distance) / (unit_of(format) * max(scale, format.tiny))
    units = distance / (unit_of(format) * scale.double().clamp(min=format.tiny))
    return largest(torch.where(distance == 0, 0.0, units))


def relative(distance: float, scale: float) -> float:
    """``distance`` over ``scale``; 0 where both are, inf where only the scale is."""
    return distance / scale if scale else math.inf if distance else 0.0
