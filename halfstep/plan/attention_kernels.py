"""CUDA's kernels of attention on fake CPU tensors: what each keeps for the backward pass, and what it takes meanwhile.

The fused ones keep query, key, value, output and one fp32 number a row. Their backward pass sums the query's gradient
in fp32, in memory of its own. Math keeps what its operations keep, and computes 16-bit inputs in fp32.

From aten/src/ATen/native/transformers: attention.cpp (what is done before and after a kernel, and the math form, whose
local variables are kept here so that tensors live as long), cuda/flash_attn/flash_api.cpp and
cuda/attention_backward.cu (what the backward passes allocate). What cuDNN takes meanwhile is not published.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from halfstep.plan.attention import CUDNN, EFFICIENT, FLASH, MATH

aten = torch.ops.aten

SIXTEEN = (torch.float16, torch.bfloat16)


def _flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    size = query.shape[-1]
    padding = (0, -size % 8)
    if size % 8:
        query, key, value = (F.pad(t, padding) for t in (query, key, value))
    scale = 1 / math.sqrt(size) if scale is None else scale
    out: torch.Tensor = _Flash.apply(query, key, value, dropout, is_causal, scale)  # type: ignore[no-untyped-call]
    return out[..., :size] if size % 8 else out


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Any, key: Any, value: Any, dropout: float, is_causal: bool, scale: float
    ) -> torch.Tensor:
        out, lse, _, _, num_q, num_k, seed, unused, _ = aten._scaled_dot_product_flash_attention(
            query, key, value, dropout, is_causal, scale=scale
        )
        ctx.save_for_backward(query, key, value, out, lse, seed, unused)
        ctx.rest = num_q, num_k, dropout, is_causal
        ctx.scale = scale
        result: torch.Tensor = out
        return result

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[Any, ...]:
        query, key, value, out, lse, seed, unused = ctx.saved_tensors
        batch, heads, num_q, size = query.shape
        rows = _up(num_q, 128)
        meanwhile = [
            grad.new_empty((batch, rows, heads, _up(size, 32)), dtype=torch.float32),  # the query's gradient
            grad.new_empty((batch, heads, rows), dtype=torch.float32),
        ]
        if key.shape[1] != heads:  # each head of the query has its gradient of key and value, summed in the end
            shape = (batch, key.shape[2], heads, size)
            meanwhile += [grad.new_empty(shape), grad.new_empty(shape)]
        gradients = aten._scaled_dot_product_flash_attention_backward(
            grad, query, key, value, out, lse, None, None, *ctx.rest, seed, unused, scale=ctx.scale
        )
        del meanwhile
        return (*gradients, None, None, None)


def _efficient(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    mask = _added(mask, query.dtype)
    if mask is not None:
        length = mask.shape[-1]
        if any(stride % 8 for stride in mask.stride()[:-1]):
            mask = F.pad(mask, (0, 8 - length % 8))[..., :length]
        mask = mask.expand(*query.shape[:3], key.shape[2])
    needs_lse = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    out: torch.Tensor = _Efficient.apply(  # type: ignore[no-untyped-call]
        query, key, value, mask, needs_lse, dropout, is_causal, scale
    )
    return out


class _Efficient(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Any,
        key: Any,
        value: Any,
        mask: Any,
        needs_lse: bool,
        dropout: float,
        is_causal: bool,
        scale: float | None,
    ) -> torch.Tensor:
        out, lse, seed, offset = aten._scaled_dot_product_efficient_attention(
            query, key, value, mask, needs_lse, dropout, is_causal, scale=scale
        )
        ctx.save_for_backward(query, key, value, mask, out, lse, seed, offset)
        ctx.rest, ctx.scale = (dropout, [*ctx.needs_input_grad[:4]], is_causal), scale
        result: torch.Tensor = out
        return result

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[Any, ...]:
        saved = ctx.saved_tensors  # once: a checkpoint computes them again for each reading
        query = saved[0]
        batch, heads, num_q, size = query.shape
        meanwhile = [grad.new_empty((batch, heads, num_q), dtype=torch.float32)]
        if query.dtype in SIXTEEN:
            shape = (batch, heads, _up(num_q, 64), _up(size, 32))
            meanwhile.append(grad.new_empty(shape, dtype=torch.float32))
        gradients = aten._scaled_dot_product_efficient_attention_backward(grad, *saved, *ctx.rest, scale=ctx.scale)
        del meanwhile
        return (*gradients, None, None, None, None)


def _cudnn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    needs_lse = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    out: torch.Tensor = aten._scaled_dot_product_cudnn_attention(
        query, key, value, _added(mask, query.dtype), needs_lse, dropout, is_causal, scale=scale
    )[0]
    return out


def _math(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    dtype = query.dtype
    mask = _added(mask, dtype)
    widens = dtype in SIXTEEN and not torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    query_wide, key_wide, value_wide = (t.float() if widens else t for t in (query, key, value))
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    root = math.sqrt(abs(scale))
    scaled = query_wide * math.copysign(root, scale)
    if is_causal:
        ones = query.new_ones((query.shape[-2], key.shape[-2]), dtype=torch.bool)
        mask = _added(ones.tril(), scaled.dtype)
    if enable_gqa and query.shape[-3] != key.shape[-3]:
        key_wide_all = key_wide.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value_wide_all = value_wide.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    else:
        key_wide_all, value_wide_all = key_wide, value_wide
    weights = torch.matmul(scaled, key_wide_all.transpose(-2, -1) * root)
    if mask is not None:
        weights.add_(mask)
    weights = _SafeSoftmax.apply(weights)  # type: ignore[no-untyped-call]
    if dropout > 0:
        weights = torch.dropout(weights, dropout, True)
    out = torch.matmul(weights, value_wide_all).to(dtype)
    weights.to(dtype)  # the second result, which nobody takes
    return out


class _SafeSoftmax(torch.autograd.Function):
    """Over the last dimension; a row that is masked as a whole is 0. Keeps its result."""

    @staticmethod
    def forward(ctx: Any, scores: Any) -> torch.Tensor:
        out = aten._softmax(scores, -1, False)
        is_masked = scores.eq(-math.inf)
        result = torch.where(is_masked.all(-1, keepdim=True), out.new_zeros(()), out)
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        (result,) = ctx.saved_tensors
        return aten._softmax_backward_data(grad, result, -1, result.dtype)


def _added(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """A mask that is added: of a bool one, 0 where it is true and minus infinity elsewhere."""
    if mask is None or mask.dtype is not torch.bool:
        return mask
    return torch.where(mask, 0.0, torch.scalar_tensor(-math.inf, dtype=dtype))


def _up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


RUN: Mapping[str, Callable[..., torch.Tensor]] = {FLASH: _flash, EFFICIENT: _efficient, CUDNN: _cudnn, MATH: _math}
