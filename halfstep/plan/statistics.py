"""The mean and deviation that a norm keeps for its backward pass.

torch's fake forms of the norms keep them in the format of a 16-bit input. CUDA keeps them in fp32
(aten/src/ATen/native/cuda: Normalization.cuh, layer_norm_kernel.cu, group_norm_kernel.cu), and so does a CPU where the
weight is fp32 (aten/src/ATen/native/mixed_data_type.h).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

aten = torch.ops.aten

NORMS = {aten.native_batch_norm.default: 1, aten.native_layer_norm.default: 2, aten.native_group_norm.default: 1}
"""Operations that give (output, mean, deviation), with the place of the weight among their arguments."""


def in_fp32(norm: Any, args: Sequence[Any], result: tuple[torch.Tensor, ...], is_cuda: bool) -> Any:
    """The ``result`` of ``norm(*args)`` on fake tensors with statistics as the device keeps them."""
    weight = args[NORMS[norm]]
    if is_cuda or (weight is not None and weight.dtype is torch.float32):
        return (result[0], *(each.float() for each in result[1:]))
    return result
