"""Masks: which infinities were written on purpose, as an attention mask is, and which came out of arithmetic.

docs/trace.md has the rule in words.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from halfstep.formats import FORMATS
from halfstep.record.recorder import Operation
from halfstep.record.values import Values

MAIN_OUTPUT_ONLY = ("_scaled_dot_product", "_flash", "_efficient", "_ctc_loss", "_cudnn", "_thnn", "mkldnn_rnn")
"""Operations whose further outputs are for their own backward, where -inf may stand for nothing at all."""

_FILLS = {"masked_fill", "fill", "full", "full_like", "new_full", "index_fill", "fill_diagonal", "scatter"}
_SUMS = {"add", "sub", "rsub", "where", "baddbmm", "minimum"}
_PRODUCTS = {"mul", "div", "mm", "bmm", "addmm", "baddbmm", "convolution", "convolution_backward"}
_CASTS = {"_to_copy", "copy"}
_POLES = {"log", "log2", "log10", "reciprocal", "rsqrt", "div"}
_SHAPES_MASKS = {"_to_copy", "clone", "sub", "rsub", "mul", "tril", "triu"}
_BEYOND = 26
"""2^26, about 7e7: no computed score comes near, and every constant such as -1e8 or -1e9 is beyond."""

Makers = Mapping[int, Operation]
"""The operation that made each value, by the value's ``id``."""


def outputs_of(operation: Operation) -> tuple[Values, ...]:
    """The outputs that the model gets; others are notes of an operation to its own backward."""
    return operation.outputs[:1] if operation.op.startswith(MAIN_OUTPUT_ONLY) else operation.outputs


def kind_of(operation: Operation) -> str | None:
    """``nan`` or ``inf`` if the output holds one, NaN first."""
    return max((value.kind for value in outputs_of(operation) if value.kind), default=None)


def is_mask(values: Values) -> bool:
    """Whether the only non-finite values are -inf, if there are any."""
    return not values.num_nan and values.num_inf == values.num_negative_inf


def is_meant(operation: Operation, handed: Sequence[Values], makers: Makers, weights: Collection[str] = ()) -> bool:
    """Whether what is not finite in the output is a mask: -inf alone, written on purpose or carried from there.

    handed:  those of its inputs that are not finite.
    weights: names of the parameters that are trained; what is not finite in them is no mask.
    """
    if not all(is_mask(value) for value in (*outputs_of(operation), *handed)):
        return False
    if any(value.name in weights for value in handed):
        return False
    if not handed:
        return is_written(operation, makers)
    # A gradient times -inf is none.
    return operation.site.phase == "forward" or operation.op.rstrip("_") not in _PRODUCTS


def is_written(operation: Operation, makers: Makers) -> bool:
    """Whether an operation with finite inputs was told to write what is not finite in its output, of either sign.

    That is a filling operation, one that has no floating input at all, or one with a constant that is at the end
    of the output's format or beyond.
    """
    name, output = operation.op.rstrip("_"), operation.outputs[0]
    if operation.fills_inf or name in _FILLS or not operation.inputs:
        return True
    has_one_sign = output.num_inf and output.num_negative_inf in (0, output.num_inf)
    format = FORMATS.get(output.format)
    if output.num_nan or not has_one_sign or format is None:
        return False
    if any(value.smallest == value.largest and value.largest >= format.max for value in operation.inputs):
        return True  # zeros and one constant, such as a mask of -1e9 that is cast, or finfo.min times 2
    if name in _SUMS and any(value.largest == format.max for value in operation.inputs):
        return True  # a score, or a second mask, added to finfo.min
    if name in _CASTS and _has_gap(operation.inputs[0], math.frexp(format.max)[1] - 1):
        return True
    # The logarithm of a mask of zeros and ones, or a multiple of it by a constant that does not fit.
    return name in ("log", "mul") and any(_is_zero_one(value, makers) for value in operation.inputs)


def is_pole(operation: Operation) -> bool:
    """Whether it may be inf at a zero that it was given, and not for want of range: ``log(0)``, ``1 / 0``.

    Such an infinity is often left behind, by ``where`` or by a sum of exponentials.
    """
    name = operation.op.rstrip("_")
    if name not in _POLES or kind_of(operation) != "inf" or not operation.inputs:
        return False
    return operation.inputs[-1].num_zeros > 0


def _has_gap(values: Values, exponent: int) -> bool:
    """Whether what is beyond a format, whose largest number is 2^exponent and some, is far beyond: scores with a mask
    of -1e9 in them, and not scores that grew."""
    return values.largest >= 2.0**_BEYOND and not any(exponent < e < _BEYOND for e in values.exponents)


def _is_zero_one(values: Values, makers: Makers) -> bool:
    """Whether it is a mask of zeros and ones, and not a probability that rounds to them."""
    if values.largest not in (0.0, 1.0) or values.smallest not in (None, 1.0) or values.kind:
        return False
    maker = makers.get(id(values))
    if maker is None or not maker.inputs:
        return True
    return maker.op in _SHAPES_MASKS and all(_is_zero_one(value, makers) for value in maker.inputs)
