"""An operation once more in float64: the same call, with every floating tensor widened and every dtype with it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from halfstep.record.recorder import op_name

Convert = Callable[[torch.Tensor], torch.Tensor]


class NotExact(Exception):
    """An operation that has no wider form: its kernel exists in lower formats only."""


@functools.cache
def _names(func: Any) -> tuple[str, ...]:
    return tuple(argument.name for argument in func._schema.arguments)


def arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by their names, without those that were left out."""
    return dict(zip(_names(func), args, strict=False)) | kwargs


def is_random(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operation draws random numbers in this call."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    defaults = {a.name: a.default_value for a in func._schema.arguments if a.has_default_value()}
    named = defaults | arguments(func, args, kwargs)
    return named.get("train") is not False and not any(named.get(name) == 0.0 for name in ("dropout_p", "dropout"))


def run_wide(func: Any, named: dict[str, Any], convert: Convert, dtype: torch.dtype = torch.float64) -> Any:
    """``func`` on ``convert(tensor)``, in ``dtype``, for each floating tensor among its arguments ``named``.

    What it writes into, it writes into what ``convert`` gave. Raises NotExact where torch has no such kernel.
    """

    def value(name: str, given: Any) -> Any:
        if isinstance(given, torch.dtype):
            return dtype if given.is_floating_point else given
        if name == "half_to_float":  # its input is no half any more
            return False
        return tree_map_only(torch.Tensor, lambda t: convert(t) if is_plain(t) else t, given)

    wide = {name: value(name, given) for name, given in named.items()}
    by_hand = _BY_HAND.get(op_name(func))
    try:
        if by_hand is not None:
            return by_hand(wide)
        positional = [wide.pop(a.name) for a in func._schema.arguments if not a.kwarg_only and a.name in wide]
        return func(*positional, **wide)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, NotImplementedError, TypeError) as error:
        raise NotExact(str(error).partition("\n")[0]) from None


def run_magnitude(func: Any, named: dict[str, Any], convert: Convert) -> Any:
    """|A||B| of a product in float64: the operation on magnitudes, factors such as ``alpha`` included."""
    named = {name: abs(v) if name in ("alpha", "beta") else v for name, v in named.items()}
    result = run_wide(func, named, lambda tensor: convert(tensor).abs())
    return tree_map_only(torch.Tensor, torch.abs, result)  # nll_loss has a minus of its own


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor has numbers that can be widened: strided, floating or complex, and of no subclass."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and (tensor.is_floating_point() or tensor.is_complex())
        and tensor.layout == torch.strided
        and not tensor.is_nested
    )


# --- operations whose kernels exist in lower formats only, written out ----------------------------------------------


def _attention(named: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """softmax(QK^T x scale + mask) V and the logarithm of the sums; of queries [batch, heads, length, width]."""
    weights, log_sum = _weights(named)
    return weights @ named["value"], log_sum


def _weights(named: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    query, key = named["query"], named["key"]
    if query.shape[1] != key.shape[1]:
        raise NotExact("heads that share keys")
    scores = query @ key.mT * _factor(named)
    mask = named.get("attn_mask", named.get("attn_bias"))
    if mask is not None:
        scores = scores + mask
    if named.get("is_causal"):
        ahead = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(ahead, -math.inf)
    return scores.softmax(-1), scores.logsumexp(-1)


def _attention_backward(named: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """Gradients of query, key and value (Dao et al. 2022, FlashAttention, appendix B.2)."""
    gradient = named.get("grad_out", named.get("grad_out_"))
    assert gradient is not None
    weights, _ = _weights(named)
    through = (gradient * named["out"]).sum(-1, keepdim=True)
    scores = weights * (gradient @ named["value"].mT - through) * _factor(named)
    return scores @ named["key"], scores.mT @ named["query"], weights.mT @ gradient


def _factor(named: dict[str, Any]) -> float:
    scale = named.get("scale")
    return 1 / math.sqrt(named["query"].shape[-1]) if scale is None else float(scale)


_BY_HAND: dict[str, Callable[[dict[str, Any]], Any]] = {
    f"_scaled_dot_product_{name}_attention{suffix}": by_hand
    for name in ("flash", "efficient", "cudnn")
    for suffix, by_hand in (("", _attention), ("_backward", _attention_backward))
}
