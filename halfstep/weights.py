"""Weights stored in 16 bit: which ones stay fp32 all the same, and what keeps the formats that flow between modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils.parametrize import ParametrizationList

from halfstep.dtypes import LOW_DTYPES
from halfstep.policy import Policy

NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
"""Modules that compute in fp32, with fp32 weights and statistics."""


def is_source(module: nn.Module, name: str) -> bool:
    """Whether the module's parameter ``name`` is no weight, but what one is computed from in each forward pass."""
    # Beside parametrizations there are weight_norm, spectral_norm and prune of torch.nn.utils.
    is_renamed = isinstance(module, nn.Linear | _ConvNd) and name not in ("weight", "bias")
    return isinstance(module, ParametrizationList) or is_renamed


def formats_of(model: nn.Module, policy: Policy) -> dict[torch.Tensor, str]:
    """The format that each parameter is held in; one that any of its modules needs in fp32 is fp32."""
    formats: dict[torch.Tensor, str] = {}
    for path, module in model.named_modules():
        # One with max_norm scales its rows in every forward pass, in place, which no rest would outlive.
        is_scaled = isinstance(module, nn.Embedding) and module.max_norm is not None
        stays = is_scaled or isinstance(module, (*NORMS, nn.RNNBase, nn.EmbeddingBag))
        for name, parameter in module._parameters.items():
            if parameter is not None and formats.get(parameter) != "fp32":
                is_fp32 = stays or parameter.dim() < 2 or is_source(module, name)
                formats[parameter] = "fp32" if is_fp32 else policy.format_of(path)
    return formats


def widen_output(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output.float() if output.dtype in LOW_DTYPES else output


def widen_embedding(module: nn.Module, hook: Callable[..., torch.Tensor] = widen_output) -> Any:
    """Let an embedding with a 16-bit table hand on fp32, as with an fp32 one; returns the hook's handle, if it is new.

    What is added up along a model then stays in fp32, as under autocast. Who removes the hook again brings one of its
    own, so that it takes none from somebody else.
    """
    is_embedding = isinstance(module, nn.Embedding | nn.EmbeddingBag)
    if not is_embedding or hook in module._forward_hooks.values():
        return None
    return module.register_forward_hook(hook)
