"""16-bit matrix products on a CPU that has no 16-bit matrix instructions.

On such a CPU torch runs a 16-bit product dozens of times slower than the fp32 one. A tensor core does something else:
it multiplies the 16-bit inputs exactly, sums in fp32 and rounds the result once. So do these kernels: widen the inputs
(exact), run torch's own fp32 kernel, round once. An fp32 product of two 16-bit numbers is exact (11 + 11 bits of
mantissa fit in 24), so only the order of the fp32 sums differs from a GPU's; a result beyond 65519 becomes inf in
fp16, as on a GPU.

Real 16-bit tensors flow in and out, forward and backward: the kernels sit on the CPU dispatch key, below autograd, for
the heavy operations alone. They act only while :data:`active` is set, which our regions do around forward and
backward; at any other time, and for every other dtype, torch's own kernel runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from halfstep.dtypes import LOW_DTYPES
from halfstep.kernels import Kernels

active = False
"""Whether a region that needs these kernels is open, or its backward pass running. One value for the process."""

sums_active = False
"""The same for :data:`sums`, which every 16-bit region needs."""

# Operation to the number of outputs that take the input's dtype; the others (attention's logsumexp) stay fp32.
_OPS = {
    "mm": 1,
    "addmm": 1,
    "bmm": 1,
    "baddbmm": 1,
    "mv": 1,
    "addmv": 1,
    "dot": 1,
    "convolution": 1,
    "convolution_backward": 3,
    "_scaled_dot_product_flash_attention_for_cpu": 1,
    "_scaled_dot_product_flash_attention_for_cpu_backward": 3,
}


@functools.cache
def _kernel(name: str, num_low: int) -> Callable[..., Any]:
    own = torch.library.get_kernel(f"aten::{name}", "CPU").call_boxed
    is_attention = "attention" in name

    def product(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        dtype = None
        if active:
            for value in args:
                if isinstance(value, torch.Tensor):
                    if dtype is None:
                        dtype = value.dtype
                    elif dtype != value.dtype and not is_attention:
                        # torch refuses to mix formats, here as on a GPU. Attention has a logsumexp in fp32.
                        return own(keyset, *args, **kwargs)
        if dtype not in LOW_DTYPES:
            return own(keyset, *args, **kwargs)
        wide = [_widen(value) for value in args]
        if kwargs:
            kwargs = {key: _widen(value) for key, value in kwargs.items()}
        result = own(keyset, *wide, **kwargs)
        if isinstance(result, torch.Tensor):
            return result.to(dtype)
        # An output that the output_mask switched off is None.
        low = [value if value is None else value.to(dtype) for value in result[:num_low]]
        return (*low, *result[num_low:])

    return product


def _widen(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.dtype in LOW_DTYPES else value


@functools.cache
def _own(name: str) -> Callable[..., Any]:
    return torch.library.get_kernel(f"aten::{name}", "CPU").call_boxed


def _sum_rows(keyset: Any, gradient: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Of an embedding with a 16-bit table: the sum of the gradients of each row."""
    own = _own("embedding_dense_backward")
    if not sums_active or gradient.dtype not in LOW_DTYPES:
        return own(keyset, gradient, *args, **kwargs)
    return own(keyset, gradient.float(), *args, **kwargs).to(gradient.dtype)


def _add_at(keyset: Any, target: torch.Tensor, indices: Any, values: torch.Tensor, *flags: bool) -> Any:
    """Of a 16-bit table that is indexed (``table[index]``): the same sum."""
    own, accumulates = _own("_index_put_impl_"), flags[:1] == (True,)
    if not (sums_active and accumulates and target.dtype in LOW_DTYPES):
        return own(keyset, target, indices, values, *flags)
    return target.copy_(own(keyset, target.float(), indices, values.float(), *flags))


def _fill_sums(cpu: Kernels) -> None:
    for name, kernel in (("embedding_dense_backward", _sum_rows), ("_index_put_impl_", _add_at)):
        _own(name)  # before ours hides it
        cpu.add(name, kernel)


sums = Kernels("CPU", _fill_sums)
"""Kernels for every CPU, with the instructions or without: torch's add up rows in 16 bit there, so that a token that
comes often stops at 256 (bf16) of its gradients. On CUDA they add in fp32."""


def _fill(cpu: Kernels) -> None:
    for name, num_low in _OPS.items():
        cpu.add(name, _kernel(name, num_low))


kernels = Kernels("CPU", _fill)
"""The kernels; a region acquires them where the CPU lacks the instructions."""
