"""Fixed answers to what code asks of a tensor's values, which a fake tensor does not have.

A training step reads few values: whether the gradient is finite, a loss for the log, how many elements a mask selects.
Each gets an answer that lets a healthy step go on. A number is 0. A condition about finiteness has the answer of finite
values, any other the one that does not lead to a ``raise``, or else false. What has as many elements as there are
values of some kind has as many as it can have. What has no such bound is refused. How many were asked and where is
kept, and a plan says it.
"""

from __future__ import annotations

import functools
import math
import operator
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from halfstep.errors import HalfstepError, and_more
from halfstep.plan.asker import Asker, asker
from halfstep.plan.branch import healthy_answer, is_in_while
from halfstep.plan.statistics import NORMS, in_fp32

aten = torch.ops.aten

DEVICE = torch.ops.prim.device.default
"""What ``tensor.device`` of a fake tensor calls: three of four calls of a step, and no operation."""

MAX_ASKED, MAX_ASKED_IN_WHILE = 10_000, 1_000
"""Questions at one line in one window; a loop that asks more often would go on until an answer changes."""

NUMBER, CONDITION, SIZE = "a number", "a condition", "a size"


class Answers(TorchDispatchMode):
    """While it is open, over a FakeTensorMode, questions about values are answered.

    num:    how many were asked.
    places: how often each (kind of answer, ``file:line``) was asked; what halfstep itself asks is not in it.
    """

    def __init__(self, is_cuda: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num = 0
        self._is_cuda = is_cuda
        self.places: Counter[tuple[str, str]] = Counter()
        self._asked: Counter[str] = Counter()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch would wrap each call to keep its compiler out, which does not run here."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE:
            return args[0].fake_device if isinstance(args[0], FakeTensor) else func(*args)
        kwargs = kwargs or {}
        if _only_writes(func) and all(each.constant is None for each in args[0]):
            return None
        try:
            result = func(*args, **kwargs)  # first, since a fake tensor knows some constants, as an optimizer's step
        except (DataDependentOutputException, DynamicOutputShapeException):
            size = _SIZES.get(func)
            if size is None and func not in _VALUES:
                raise
            if size is None:
                return self.value(func, args)
            self._note(SIZE, asker())
            return size(func, args, kwargs)
        truth = _TRUTHS.get(func)
        if truth is not None:
            result.is_known_true = truth(*args)
        return in_fp32(func, args, result, self._is_cuda) if func in NORMS else result

    def value(self, func: Any, args: Any) -> bool | int | float:
        """The answer to a call that asks for one value."""
        tensor: torch.Tensor = args[0]
        asking = asker()
        if func is aten._local_scalar_dense.default and tensor.dtype is not torch.bool:
            self._note(NUMBER, asking)
            return 0.0 if tensor.dtype.is_floating_point else 0
        self._note(CONDITION, asking)
        known = _known(tensor) if func is aten._local_scalar_dense.default else _same(*args[:2])
        return known if known is not None else bool(asking.frame and healthy_answer(asking.frame))

    def zeros(self, tensor: torch.Tensor, convert: Callable[[torch.Tensor], Any]) -> Any:
        """The values of a whole ``tensor`` outside of torch: ``convert`` of real zeros."""
        self._note(NUMBER, asker())
        with _disable_current_modes():
            return convert(torch.zeros(tensor.shape, dtype=tensor.dtype))

    def restart(self) -> None:
        """A new window begins."""
        self._asked.clear()

    def notes(self) -> list[str]:
        """What a plan says of them."""
        texts = {
            NUMBER: "Numbers read from the device ({}) are 0 here: what depends on them is planned for that value.",
            CONDITION: "Conditions on values ({}) are answered so that a healthy step goes on.",
            SIZE: "As many elements as values select ({}) are as many as there can be: an upper bound.",
        }
        return [
            text.format(and_more(sorted(place for of, place in self.places if of == kind)))
            for kind, text in texts.items()
            if any(of == kind for of, _ in self.places)
        ]

    def _note(self, kind: str, asking: Asker) -> None:
        self.num += 1
        place = asking.place
        if place is None:
            return
        self.places[kind, place] += 1
        self._asked[place] += 1
        limit = MAX_ASKED_IN_WHILE if asking.frame and is_in_while(asking.frame) else MAX_ASKED
        if self._asked[place] > limit:
            raise HalfstepError(
                place,
                f"a loop there ends by a value, which a plan does not have; it was asked for {limit} times",
                "Bound the loop by a count, for _ in range(n).",
            )


@functools.cache
def _only_writes(func: Any) -> bool:
    """Whether ``func`` changes a list of tensors in place and makes nothing: no change of a tensor without values.

    An optimizer over lists calls a dozen of them a step, each with every parameter, which a fake tensor looks at all.
    """
    name = func._schema.name
    return name.startswith("aten::_foreach_") and name.endswith("_") and not func._schema.returns


# --- what is known of conditions -----------------------------------------------------------------------------------


def _known(value: Any) -> bool | None:
    """The value of each element of a condition, where that is known; numbers are finite and equal to themselves."""
    return getattr(value, "is_known_true", None) if isinstance(value, torch.Tensor) else None


def _same(a: Any, b: Any, *rest: Any) -> bool | None:
    return True if a is b else None


def _differ(a: Any, b: Any) -> bool | None:
    return False if a is b else None


def _against_infinity(is_true: bool) -> Callable[[Any, Any], bool | None]:
    return lambda a, b: is_true if isinstance(b, float) and not math.isfinite(b) else None


def _kept(a: Any, *rest: Any) -> bool | None:
    return _known(a)


def _negated(a: Any) -> bool | None:
    known = _known(a)
    return None if known is None else not known


def _both(combine: Callable[[bool, bool], bool]) -> Callable[..., bool | None]:
    def combined(a: Any, b: Any) -> bool | None:
        known = _known(a), _known(b)
        return None if known[0] is None or known[1] is None else combine(known[0], known[1])

    return combined


_OF_BOTH = [(aten.logical_and, aten.logical_and_), (aten.logical_or, aten.logical_or_)]
_BITWISE = [(aten.bitwise_and, aten.bitwise_and_), (aten.bitwise_or, aten.bitwise_or_)]
_ANDS = [aten.mul.Tensor, *(op.default for op in _OF_BOTH[0]), *(op.Tensor for op in _BITWISE[0])]
_ORS = [*(op.default for op in _OF_BOTH[1]), *(op.Tensor for op in _BITWISE[1])]
_KEEP = [aten._to_copy, aten.view, aten.detach, aten.clone, aten.squeeze, aten.all, aten.any]
_KEEP += [aten._is_all_true, aten._is_any_true]

_TRUTHS: dict[Any, Callable[..., bool | None]] = {
    aten.isnan.default: lambda a: False,
    aten.eq.Tensor: _same,
    aten.ne.Tensor: _differ,
    aten.eq.Scalar: _against_infinity(False),
    aten.ne.Scalar: _against_infinity(True),
    **dict.fromkeys([aten.logical_not.default, aten.bitwise_not.default], _negated),
    **dict.fromkeys(_ANDS, _both(operator.and_)),
    **dict.fromkeys(_ORS, _both(operator.or_)),
    **dict.fromkeys([op.default for op in _KEEP] + [aten.all.dim, aten.any.dim, aten.select.int], _kept),
}

_VALUES = {aten._local_scalar_dense.default, aten.equal.default, aten.allclose.default}


# --- sizes ---------------------------------------------------------------------------------------------------------


def _nonzero(func: Any, args: Any, kwargs: Any) -> torch.Tensor:
    mask: torch.Tensor = args[0]
    return mask.new_empty((mask.numel(), mask.dim()), dtype=torch.long)


def _selected(func: Any, args: Any, kwargs: Any) -> torch.Tensor:
    values: torch.Tensor = args[0]
    return values.new_empty(torch.broadcast_shapes(values.shape, args[1].shape).numel())


def _indexed(func: Any, args: Any, kwargs: Any) -> Any:
    """By a mask: as if it selected every element of the dimensions that it covers."""
    indices: list[torch.Tensor | None] = []
    for index in args[1]:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            indices += [index.new_zeros(index.numel(), dtype=torch.long) for _ in range(index.dim())]
        else:
            indices.append(index)
    return func(args[0], indices, *args[2:], **kwargs)


def _unique(func: Any, args: Any, kwargs: Any) -> tuple[torch.Tensor, ...]:
    """As if no two elements were equal: as many values as elements."""
    named = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | kwargs
    values: torch.Tensor = named["self"]
    dim = named.get("dim")
    count = values.numel() if dim is None else values.shape[dim]
    inverse_shape = values.shape if dim is None else (count,)
    found = values.new_empty(count if dim is None else values.shape)
    inverse = found.new_empty(inverse_shape if named.get("return_inverse") else 0, dtype=torch.long)
    return found, inverse, found.new_empty(count if named.get("return_counts") else 0, dtype=torch.long)


def _bincount(func: Any, args: Any, kwargs: Any) -> torch.Tensor:
    """As many bins as the caller says there are at least."""
    named = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | kwargs
    num_bins, weights = named.get("minlength", 0), named.get("weights")
    if not num_bins:
        raise DynamicOutputShapeException(func)
    is_double = weights is not None and weights.dtype is not torch.float32
    dtype = torch.long if weights is None else torch.float64 if is_double else torch.float32
    counts: torch.Tensor = args[0].new_empty(num_bins, dtype=dtype)
    return counts


def _ctc_loss(func: Any, args: Any, kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """As ATen/native/cuda/LossCTC.cu: log_alpha is [batch, time, 2 * longest target + 1]."""
    log_probs, targets = args[:2]  # [time, batch, classes], and [batch, longest] or all in a row
    time, batch = log_probs.shape[:2]
    return log_probs.new_empty(batch), log_probs.new_empty((batch, time, 2 * targets.shape[-1] + 1))


_SIZES: dict[Any, Callable[[Any, Any, Any], Any]] = {
    aten.nonzero.default: _nonzero,
    aten.masked_select.default: _selected,
    **dict.fromkeys([aten.index.Tensor, aten.index_put.default, aten.index_put_.default], _indexed),
    **dict.fromkeys([aten._unique2.default, aten.unique_dim.default, aten.unique_consecutive.default], _unique),
    aten.bincount.default: _bincount,
    aten._ctc_loss.Tensor: _ctc_loss,
}
