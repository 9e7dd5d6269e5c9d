"""One operation again in float64, on the inputs that it had: how far is its result from the exact one, in its units?"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from halfstep.explain.error import difference, in_units, largest, relative, scale_of, stored_format, unit_of, widen
from halfstep.explain.exact import NotExact, is_plain, run_magnitude, run_wide
from halfstep.formats import FORMATS, Format
from halfstep.record.recorder import floats, op_name

PRODUCT, ULP, SHADOW = "u |A||B|", "u max|x|", "u max|x|, whole step"
"""The units: of a product or sum, of any other operation, and of an operation that is right but loses digits."""

INEXACT, OVERFLOW, UNDERFLOW = "inexact", "overflow", "underflow"
CANCELLATION, ACCUMULATION = "cancellation", "accumulation"

LIMITS = {PRODUCT: 1.0, ULP: 4.0}
"""Units that a right kernel may be off: a product is rounded once, another formula perhaps at each of its steps."""

_FP32_LIMIT = 2.0**12
"""The same in fp32, where a formula may cancel inside, as 1 - p of a sure classifier does. That is half of one rounding
to fp16: what computes in 16 bit inside fails."""

PRODUCTS = frozenset(
    {"mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "vdot", "addbmm", "addr", "linear"}
    | {"convolution", "convolution_backward", "cudnn_convolution", "mkldnn_convolution"}
)
SUMS = frozenset(
    {"sum", "nansum", "mean", "cumsum", "index_add", "scatter_add", "index_put", "_index_put_impl"}
    | {"embedding_dense_backward", "avg_pool2d", "avg_pool3d", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d"}
    | {"nll_loss_forward", "nll_loss2d_forward"}
)
"""Sums are products with a matrix of ones, or of shares."""

_MASKS = frozenset({"masked_fill", "where"})

Source = tuple[str, str | None, int | None]
"""An operation, its file and its line."""


@dataclass
class Call:
    """One call of an operation; the fields are those of ``AuditedOp``."""

    error: float | None
    unit: str
    limit: float | None
    kind: str | None = None
    drift: float = 0.0
    growth: float = 0.0
    sources: tuple[Source, ...] = ()
    note: str | None = None
    is_mask: bool = False
    """What is not finite is -inf alone: a mask, if the step is finite in the end."""
    makes: bool = False
    """Of finite inputs it makes inf or NaN, in float64 as well: a fault, if the step is not finite in the end."""
    distance: float = 0.0
    """Of the result from float64 on the same inputs, relative to the largest of the result."""

    @property
    def rank(self) -> tuple[bool, float]:
        """How bad it is."""
        return self.kind is not None, -1.0 if self.error is None or not self.limit else self.error / self.limit

    def settled(self, is_finite: bool) -> Call:
        """This call once it is known whether loss and gradient are finite in the end."""
        if is_finite and self.is_mask:
            return replace(self, error=0.0, kind=None, note=None)
        if not is_finite and self.makes and self.kind is None:
            note = "it makes inf or NaN of finite numbers, in float64 as well"
            return replace(self, error=math.inf, kind=OVERFLOW, note=note)
        return self


class Replay:
    """An operation on copies of its inputs in float64, or in fp32 where that is the widest it has.

    Made before the operation runs, since that may change its inputs.
    """

    def __init__(self, func: Any, named: dict[str, Any], uses_tf32: bool) -> None:
        name = op_name(func).removesuffix("_")
        read = [tensor for tensor in floats(list(named.values())) if is_plain(tensor)]
        self._uses_tf32 = uses_tf32 and name in PRODUCTS
        self._makes_masks = name in _MASKS
        self._num_terms = max(tensor.numel() for tensor in read)
        self._read = [] if func._schema.is_mutable else read
        self._exact: Any = None
        self._magnitude: Any = None
        self._note: str | None = None
        convert, dtype = widen, torch.float64
        try:
            self._exact = run_wide(func, named, widen)
        except NotExact:
            if all(tensor.dtype.itemsize >= 4 for tensor in read):
                self._note = "exists in fp32 only"
                return
            convert, dtype = (lambda tensor: tensor.detach().to(torch.float32, copy=True)), torch.float32
            try:
                self._exact = run_wide(func, named, convert, dtype)
            except NotExact:
                self._note = "exists in this format only"
                return
            self._note = "against fp32, for it has no float64"
        if name in PRODUCTS | SUMS:
            self._magnitude = run_magnitude(func, named, convert)

    def judge(self, outputs: list[torch.Tensor]) -> Call:
        """What the operation gave against what it should have: the worst of its outputs."""
        worst = Call(None, "-", None, note=self._note or "not in a format that training uses")
        if self._exact is None:
            return worst
        exacts, magnitudes = matched(outputs, self._exact), matched(outputs, self._magnitude)
        for output, exact, magnitude in zip(outputs, exacts, magnitudes, strict=True):
            format = stored_format(output.dtype)
            if format is None or exact is None:
                continue
            if self._uses_tf32 and format.name == "fp32" and output.is_cuda:
                format = FORMATS["tf32"]
            call = self._judge(output, exact, magnitude, format)
            distance = max(worst.distance, call.distance)
            worst = call if worst.error is None or call.rank > worst.rank else worst
            worst.distance = distance
        return worst

    def _judge(self, output: torch.Tensor, exact: torch.Tensor, magnitude: torch.Tensor | None, format: Format) -> Call:
        unit = ULP if magnitude is None else PRODUCT
        # fp32 sums of n terms walk away from the exact one by about sqrt(n) of their own roundings.
        most = _FP32_LIMIT if unit == ULP and format.name == "fp32" else LIMITS[unit]
        limit = most + math.sqrt(self._num_terms) * unit_of(FORMATS["fp32"]) / unit_of(format)
        distance, size = difference(output, exact), scale_of(exact)
        error = in_units(distance, format, size if magnitude is None else magnitude)
        call = Call(error, unit, limit, note=self._note, distance=relative(largest(distance), size))
        if math.isinf(error):
            lost = ~output.isfinite() & exact.isfinite()
            beyond = scale_of(torch.where(lost, exact, 0.0))
            fits = "fits" if beyond <= format.max else "does not fit"
            call.kind, call.is_mask = OVERFLOW, bool((output[lost] == -math.inf).all())
            call.note = f"{beyond:.3g} {fits} into {format.name}, whose largest number is {format.max:.5g}"
        elif error > limit:
            call.kind = INEXACT
        elif self._read and not self._makes_masks and not math.isfinite(largest(output)):
            call.makes = all(math.isfinite(largest(tensor)) for tensor in self._read)
        return call


def matched(outputs: list[torch.Tensor], twins: Any) -> list[torch.Tensor | None]:
    """For each output its twin among ``twins``, by order and shape; None where there is none."""
    found = _floating(twins)
    padded = [*found, *[None] * (len(outputs) - len(found))][: len(outputs)]
    pairs = zip(outputs, padded, strict=True)
    return [twin if twin is not None and twin.shape == output.shape else None for output, twin in pairs]


def _floating(values: Any) -> list[torch.Tensor]:
    tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
    return [tensor for tensor in tensors if tensor.is_floating_point() or tensor.is_complex()]
