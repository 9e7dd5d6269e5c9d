"""What one call of an operation computes and moves.

operations  of matrix products, convolutions, attention and recurrent layers, a multiplication and an addition being
            two: by torch's own formulas (``torch.utils.flop_counter``) or the ones below.
bytes       each input read once and each output written once; two tensors over one storage are one, an element that
            is repeated (expanded) too. What is read in part only, as a table by a lookup, counts as unread.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from halfstep.dtypes import FORMAT_OF


class Call:
    """One call of an operation, its arguments by their names in the schema."""

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        self.func, self._args, self._kwargs, self.result = func, args, kwargs, result
        self.name = _plain(func)
        self._named = {name: value for (name, *_), value in zip(_arguments(func), args, strict=False)} | kwargs

    def __getitem__(self, name: str) -> Any:
        return self._named[name]

    def tensor(self, name: str) -> torch.Tensor:
        value = self._named[name]
        assert isinstance(value, torch.Tensor)
        return value

    def get(self, name: str) -> Any:
        return self._named.get(name)

    def nbytes(self) -> tuple[int, int]:
        """Bytes read and written; none are written where no kernel is launched."""
        if self.name in _ALLOCATIONS:
            return 0, 0
        read: list[torch.Tensor] = []
        written: list[torch.Tensor] = []
        storages: set[int] = set()
        for name, is_read, is_written in _arguments(self.func):
            tensors = list(_tensors(self._named.get(name)))
            storages.update(tensor.untyped_storage()._cdata for tensor in tensors)
            if is_read:
                read += tensors
            if is_written and (name != "grads" or self.get("grad_scale") is not None):
                written += tensors  # a fused optimizer writes gradients only to unscale them
        written += [t for t in _tensors(self.result) if t.untyped_storage()._cdata not in storages]
        return _nbytes(read), _nbytes(written)

    def flops(self) -> int | None:
        """Operations of its products, None if it is not known to have any."""
        own = _FORMULAS.get(self.name)
        if own is not None and self.func.namespace == "aten":
            return own(self)
        formula = flop_registry.get(self.func._overloadpacket)
        if formula is None or self.has_products():
            return None
        return int(formula(*self._args, **self._kwargs, out_val=self.result))

    def has_products(self) -> bool:
        """Whether it is known to have products that no formula here counts."""
        return self.func.namespace == "aten" and self.name.startswith(_HAS_PRODUCTS) and "norm" not in self.name

    def format(self, uses_tf32: bool) -> str:
        """The format that its product multiplies."""
        dtype = next(_tensors(list(self._named.values()))).dtype
        name = FORMAT_OF[dtype].name if dtype in FORMAT_OF else str(dtype).removeprefix("torch.")
        return "tf32" if name == "fp32" and uses_tf32 else name

    def has_mask(self) -> bool:
        """Whether it selects by a mask."""
        is_index = self.name.startswith("index")
        return is_index and any(index.dtype in (torch.bool, torch.uint8) for index in _tensors(self.get("indices")))


@functools.cache
def _plain(func: Any) -> str:
    return str(func._schema.name.partition("::")[2])


@functools.cache
def _arguments(func: Any) -> list[tuple[str, bool, bool]]:
    """(name, is read, is written) of each argument."""
    name = _plain(func)
    in_part = "weight" if name in _WEIGHT_IN_PART else "self" if name in _SELF_IN_PART else None
    arguments = []
    for argument in func._schema.arguments:
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        is_read = not argument.is_out and argument.name != in_part
        if argument.name == "self":
            if name.endswith("_like") or name.startswith("new_") or name in _OVERWRITES:
                is_read = False
            if is_written and name in _WRITES_IN_PART:
                is_read = is_written = False
        arguments.append((argument.name, is_read, is_written))
    return arguments


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _nbytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes that ``tensors`` cover, those over one storage together at most that storage."""
    covered: dict[int, dict[tuple[Any, ...], int]] = {}
    limits: dict[int, int] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        shape, stride = tensor.shape, tensor.stride()
        distinct = math.prod(size for size, step in zip(shape, stride, strict=True) if step or not size)
        at = (tensor.storage_offset(), *shape, *stride)
        covered.setdefault(storage._cdata, {})[at] = distinct * tensor.element_size()
        limits[storage._cdata] = storage.nbytes()
    return sum(min(limits[key], sum(views.values())) for key, views in covered.items())


_ALLOCATIONS = frozenset({"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"})
"""What launches no kernel."""

_OVERWRITES = {
    "fill_", "zero_", "copy_", "normal_", "uniform_", "bernoulli_", "random_", "exponential_",
    "_foreach_zero_", "_foreach_copy_",
}  # fmt: skip
"""What writes ``self`` without reading it."""

_WRITES_IN_PART = {
    "index_put_", "_index_put_impl_", "index_add_", "index_copy_", "index_fill_", "put_",
    "scatter_", "scatter_add_", "scatter_reduce_",
}  # fmt: skip
"""What changes a few elements of ``self``; which ones depends on values."""

_WEIGHT_IN_PART = {"embedding", "_embedding_bag", "_embedding_bag_forward_only"}
_SELF_IN_PART = {
    "index", "index_select", "gather", "take", "masked_select",
    "nll_loss_forward", "nll_loss2d_forward", "nll_loss_backward", "nll_loss2d_backward",
    "max_pool2d_with_indices_backward", "max_pool3d_with_indices_backward", "avg_pool2d_backward",
    "avg_pool3d_backward", "_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d_backward",
    "adaptive_max_pool2d_backward", "adaptive_max_pool3d_backward",
}  # fmt: skip
"""What reads a few elements of its ``weight`` or ``self``, or nothing but the shape."""

_HAS_PRODUCTS = (
    "linalg_", "_linalg_", "_fft_", "_cdist_", "_trilinear", "_ctc_loss", "_int_mm", "_weight_int", "addr",
    "_scaled_grouped_mm", "cholesky", "triangular_solve", "lu_", "ormqr", "geqrf", "_flash_attention_",
    "_efficient_attention_", "_native_multi_head_attention", "_transformer_encoder_layer_fwd",
)  # fmt: skip
"""Operations of aten's, by the start of their names, whose products no formula here counts."""


# Operations of products that torch's own formulas lack, or count otherwise. Sizes are those of the tensors.


def _attention(call: Call) -> int:
    """Query [batch, heads, time, width] with keys and values: the scores, and their product with the values.

    Where it is causal, the kernel skips what is masked: query i meets the keys up to i. torch counts all of them.
    """
    return 2 * _num_pairs(call) * (call.tensor("query").shape[-1] + call.tensor("value").shape[-1])


def _attention_backward(call: Call) -> int:
    """The scores again; the gradients of query and key, and those of value and of the scores."""
    return 2 * _num_pairs(call) * (3 * call.tensor("query").shape[-1] + 2 * call.tensor("value").shape[-1])


def _num_pairs(call: Call) -> int:
    """Pairs of a query and a key that attention scores, over batch and heads."""
    batch, heads, queries, _ = call.tensor("query").shape
    keys = call.tensor("key").shape[-2]
    if not call.get("is_causal"):
        return batch * heads * queries * keys
    full = min(queries, keys)
    return batch * heads * (full * (full + 1) // 2 + (queries - full) * keys)


def _convolution_backward(call: Call) -> int:
    """Each of the gradients of input and weight multiplies as often as the convolution; torch forgets the groups."""
    outer = call.tensor("input") if call["transposed"] else call.tensor("grad_output")
    each = 2 * outer.shape[0] * math.prod(outer.shape[2:]) * call.tensor("weight").numel()
    return each * int(sum(call["output_mask"][:2]))


def _recurrent_layer(call: Call) -> int:
    """One layer in one direction: each step multiplies input and state by their matrices."""
    return 2 * _num_rows(call.tensor("input")) * _num_weights([call.tensor("weight0"), call.tensor("weight1")])


def _recurrent_layer_backward(call: Call) -> int:
    """Gradients of both matrices, of the states, and of the input where something asks for it."""
    input, to_input, to_state = call.tensor("input"), call.tensor("weight1"), call.tensor("weight2")
    asked = [to_input, to_state, to_state] + [to_input] * input.requires_grad
    return 2 * _num_rows(input) * _num_weights(asked)


def _recurrent(call: Call) -> int:
    return 2 * _num_rows(call.tensor("input")) * _num_weights(call["weight"])


def _recurrent_backward(call: Call) -> int:
    *states, weights = call["output_mask"]
    return _recurrent(call) * (any(states) + int(weights))


def _num_rows(input: torch.Tensor) -> int:
    """Steps over the whole batch of a sequence [time, batch, width], or of a packed one [steps, width]."""
    return math.prod(input.shape[:-1])


def _num_weights(weights: Iterable[torch.Tensor]) -> int:
    return sum(weight.numel() for weight in weights if weight.dim() > 1)


def _grouped_mm(call: Call) -> int:
    """Of rows in groups [rows, k] with a matrix each [groups, k, n], or with one of the other forms."""
    left, right = call.tensor("self").shape, call.tensor("mat2").shape
    groups = left[0] if len(left) == len(right) == 3 else 1
    return 2 * groups * left[-2] * left[-1] * right[-1]


_KERNELS = [
    f"_scaled_dot_product_{name}"
    for name in ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")
]
_FORMULAS: dict[str, Callable[[Call], int]] = {
    **dict.fromkeys(_KERNELS, _attention),
    **dict.fromkeys([f"{name}_backward" for name in _KERNELS], _attention_backward),
    "convolution_backward": _convolution_backward,
    "mkldnn_rnn_layer": _recurrent_layer,
    "mkldnn_rnn_layer_backward": _recurrent_layer_backward,
    "_cudnn_rnn": _recurrent,
    "_cudnn_rnn_backward": _recurrent_backward,
    "_grouped_mm": _grouped_mm,
    "mv": lambda call: 2 * call.tensor("self").numel(),
    "addmv": lambda call: 2 * call.tensor("mat").numel(),
    "dot": lambda call: 2 * call.tensor("self").numel(),
    "vdot": lambda call: 2 * call.tensor("self").numel(),
    "addbmm": lambda call: 2 * call.tensor("batch1").numel() * call.tensor("batch2").shape[-1],
}
