"""What each operation of one run gave, kept for a comparison with another run.

A tensor is kept as it was when it was made: whole up to :data:`SAMPLE` elements, as evenly strided elements beyond,
together with its exact largest magnitude and its exact number of values that are not finite. Everything stays on the
device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from halfstep.explain.error import stored_format, unit_of
from halfstep.explain.exact import arguments, is_random
from halfstep.explain.pairing import Key
from halfstep.formats import FORMATS
from halfstep.record.recorder import floats, inputs_of, is_uninitialised, op_name
from halfstep.record.walk import Site

SAMPLE = 65_536
"""Elements that are kept of a tensor."""
MASK = -1e6
"""What is below it stands for -inf, as in an attention mask, and may become -inf."""

_COPIES = frozenset(("_to_copy", "copy_", "copy", "clone", "lift_fresh", "lift_fresh_copy", "_conj_physical"))
_CONSTANTS = ("zero", "ones", "full", "new_", "fill", "arange", "linspace", "eye", "scalar_tensor")
_PRODUCTS = {
    "mm": (0, 1), "bmm": (0, 1), "mv": (0, 1), "dot": (0, 1), "convolution": (0, 1),
    "addmm": (1, 2), "baddbmm": (1, 2), "addmv": (1, 2),
}  # fmt: skip
_TOTALS = frozenset(("sum", "nansum", "mean"))


class Kept(NamedTuple):
    """A tensor as it was when an operation made it.

    sample:   its elements, or some of them; real and imaginary parts.
    extremes: float64 [2], its largest magnitude that does not stand for infinity, and how many are not finite. Of whole
              numbers and truth values, a sum in which each place has another weight.
    terms:    float64 scalar, or None. Of a sum of many terms, sqrt(number of terms) x the root mean square of a term:
              how large it is if signs are random, and what the rounding errors of the terms are in proportion to.
    """

    format: str
    shape: tuple[int, ...]
    sample: torch.Tensor
    extremes: torch.Tensor
    terms: torch.Tensor | None = None

    @property
    def is_discrete(self) -> bool:
        return not self.sample.is_floating_point()


class Source(NamedTuple):
    """Where a tensor comes from: which output of which number in the stream."""

    number: int
    output: int


@dataclass(frozen=True, eq=False)
class Ran:
    """One operation that ran, or an edge between operations: a cast, a copy, a step with whole numbers.

    inputs:  where its inputs come from, without weights and batch.
    formats: of its floating inputs.
    outputs: what it gave; of an edge, nothing.
    into:    of a cast or a copy, the format of what it gives.
    lost:    of a cast, float64 [2]: the largest error that it makes, in proportion to the largest value and as it is.
    score:   of attention, how large its scores can be, |q||k| x the factor; a float64 scalar.
    """

    site: Site
    op: str
    inputs: tuple[Source, ...]
    formats: tuple[str, ...]
    outputs: tuple[Kept, ...] = ()
    into: str | None = None
    lost: torch.Tensor | None = None
    score: torch.Tensor | None = None
    is_edge: bool = False
    is_random: bool = False

    @cached_property
    def key(self) -> Key:
        site = self.site
        shapes = tuple(kept.shape for kept in self.outputs)
        return Key((site.module, site.phase), (site.function, site.file, site.line), self.op.rstrip("_"), shapes)

    @property
    def arrow(self) -> str:
        """``fp32+bf16 -> bf16``: the formats of what goes in and of what comes out."""
        made = [self.into] if self.into else [kept.format for kept in self.outputs]
        return f"{'+'.join(dict.fromkeys(self.formats)) or '-'} -> {'+'.join(dict.fromkeys(made))}"

    @property
    def unit(self) -> float:
        """Unit roundoff of the coarsest format that goes in or comes out, 0 of whole numbers."""
        names = (*self.formats, *(kept.format for kept in self.outputs), self.into)
        return max((unit_of(FORMATS[name]) for name in names if name in FORMATS), default=0.0)


class Stream:
    """The visitor of a walk that keeps what every operation gives, in ``ran``, in order of execution."""

    sees_views = False

    def __init__(self) -> None:
        self.ran: list[Ran] = []
        self._sources: dict[int, tuple[StorageWeakRef, Source]] = {}

    def visit(self, site: Site, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = op_name(func)
        if is_uninitialised(name) or name.startswith(_CONSTANTS) or (name.endswith("_like") and "rand" not in name):
            result = func(*args, **kwargs)
            self._forget(result)
            return result
        read = _tensors(inputs_of(func, args, kwargs))
        sources = tuple(dict.fromkeys(source for tensor in read if (source := self._source_of(tensor))))
        given = floats(read)
        formats = tuple(format_name(tensor.dtype) for tensor in given)
        draws = is_random(func, args, kwargs)
        result = func(*args, **kwargs)
        made = _tensors(result)
        ran = Ran(site, name, sources, formats, is_edge=True)
        with torch.no_grad():
            if name in _COPIES:
                if given and floats(made):
                    copy = floats(made)[0]
                    lost = lost_by_cast(given[0], copy)
                    ran = Ran(site, name, sources, formats, into=format_name(copy.dtype), lost=lost, is_edge=True)
            elif made and floats([*given, *made]):
                terms = _terms(name, args, made)
                outputs = tuple(keep(tensor)._replace(terms=t) for tensor, t in zip(made, terms, strict=True))
                score = _score(arguments(func, args, kwargs))
                ran = Ran(site, name, sources, formats, outputs, score=score, is_random=draws)
        for output, tensor in enumerate(made):
            storage = tensor.untyped_storage()
            source = Source(len(self.ran), 0 if ran.is_edge else output)
            self._sources[storage._cdata] = (StorageWeakRef(storage), source)
        self.ran.append(ran)
        return result

    def _source_of(self, tensor: torch.Tensor) -> Source | None:
        found = self._sources.get(tensor.untyped_storage()._cdata)
        return found[1] if found else None

    def _forget(self, result: Any) -> None:
        """A constant comes from nowhere, also one that was written over something else."""
        for tensor in _tensors(result):
            self._sources.pop(tensor.untyped_storage()._cdata, None)


def format_name(dtype: torch.dtype) -> str:
    """``bf16``, or the name of a dtype that is none of our formats."""
    format = stored_format(dtype)
    return format.name if format else str(dtype).removeprefix("torch.")


def keep(tensor: torch.Tensor) -> Kept:
    """A copy of ``tensor``, or of a sample of it."""
    tensor, format, shape = tensor.detach(), format_name(tensor.dtype), tuple(tensor.shape)
    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1)
    sample = flat[:: max(1, math.ceil(flat.numel() / SAMPLE))].clone()
    if not flat.is_floating_point():
        weights = torch.arange(flat.numel(), device=flat.device) % 8191 + 1
        total = (flat.long() * weights).sum().double()
        return Kept(format, shape, sample, torch.stack([total, torch.zeros_like(total)]))
    if not flat.is_cuda and flat.numel():
        low, high = torch.aminmax(flat)  # one pass, and reading costs nothing on a CPU
        if (largest := max(-low.item(), high.item())) < beyond(format):
            return Kept(format, shape, sample, torch.tensor([largest, 0.0], dtype=torch.float64))
    extremes = torch.stack([_largest(flat, format), (~flat.isfinite()).sum().double()])
    return Kept(format, shape, sample, extremes)


def beyond(format: str) -> float:
    """Magnitude from which a value of a format stands for infinity, as its lowest number does in a mask."""
    return 0.99 * FORMATS[format].max if format in FORMATS else math.inf


def lost_by_cast(source: torch.Tensor, made: torch.Tensor) -> torch.Tensor | None:
    """Largest error of a cast, float64 [2]: in proportion to the largest value, and as it is. None if it is no cast.

    inf where a value becomes inf.
    """
    if source.dtype == made.dtype or source.is_complex() or not source.numel():
        return None
    wide, narrow = source.detach(), made.detach()
    if wide.element_size() <= narrow.element_size():
        wide = wide.float()
    back = narrow.to(wide.dtype)
    alike = (back == wide) | wide.isnan() | ((wide < MASK) & (back == -math.inf))
    apart = torch.where(alike, 0.0, (back - wide).abs()).max().double()
    return torch.stack([torch.where(apart > 0, apart / _largest(wide, format_name(wide.dtype)), 0.0), apart])


def _largest(values: torch.Tensor, format: str) -> torch.Tensor:
    """Largest magnitude below what stands for infinity, a float64 scalar; 0 of nothing."""
    size = values.abs()
    size = torch.where(size < beyond(format), size, 0.0)
    return (size.max() if size.numel() else size.sum()).double()


def _terms(name: str, args: tuple[Any, ...], made: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """Of each output, the size of the sum that it is, as :class:`Kept` says."""
    if name in _PRODUCTS:
        left, right = (args[place] for place in _PRODUCTS[name])
        num_terms = right[0].numel() if name == "convolution" else left.shape[-1]
        return [_rms(left) * _rms(right) * math.sqrt(num_terms)]
    if name in _TOTALS:
        num_terms = args[0].numel() / max(1, made[0].numel())
        return [_rms(args[0]) * (num_terms**0.5 if name != "mean" else max(1, num_terms) ** -0.5)]
    if name.endswith("_backward") and ("norm" in name or name.startswith("convolution")):
        # The gradients of weights and biases; that of the input has its shape.
        gradient, x = args[0], args[1]
        size = _rms(gradient)
        of_weight = size * (_rms(x) if name.startswith("convolution") else 1.0)
        return [
            None
            if tensor.shape == x.shape
            else (of_weight if tensor.dim() > 1 else size) * math.sqrt(gradient.numel() / max(1, tensor.shape[0]))
            for tensor in made
        ]
    return [None] * len(made)


def _score(named: dict[str, Any]) -> torch.Tensor | None:
    """Bound of the scores of fused attention (Cauchy-Schwarz), a float64 scalar; None of another operation."""
    if not isinstance(named.get("query"), torch.Tensor) or not isinstance(named.get("key"), torch.Tensor):
        return None
    scale = named.get("scale")
    factor = 1 / math.sqrt(named["query"].shape[-1]) if scale is None else float(scale)
    query, key = (
        torch.linalg.vector_norm(named[name].detach(), dim=-1, dtype=torch.float32) for name in ("query", "key")
    )
    score: torch.Tensor = (query.max() * key.max()).double() * factor
    return score


def _rms(tensor: torch.Tensor) -> torch.Tensor:
    """Root mean square of a tensor, a float64 scalar."""
    norm: torch.Tensor = torch.linalg.vector_norm(
        tensor.detach(), dtype=torch.promote_types(tensor.dtype, torch.float32)
    )
    return (norm / math.sqrt(max(1, tensor.numel()))).double()


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
