"""Low-rank adapters: the weights of a model stay as they are, and a thin product beside each matrix trains instead."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from halfstep.errors import HalfstepError
from halfstep.plan.checkpointing import repeated_blocks

ALPHA = 8
"""What PEFT scales by, over the rank, where nobody says otherwise."""


def adapt(model: nn.Module, rank: int, targets: Sequence[str] | None = None) -> None:
    """Freeze ``model`` and put an adapter beside each linear layer of its repeated blocks, in place.

    targets: only beside layers of these names, or whose qualified names end in one of them.

    Those are the layers that PEFT's ``target_modules="all-linear"`` takes: all but the output. The layer computes
    W x + (8 / rank) B A x with A [rank, in] and B [out, rank] in fp32, B zero at first (Hu et al. 2021,
    arXiv 2106.09685). transformers' Conv1D, a linear layer whose weight is [in, out], gets one as well.
    """
    layers = [layer for block in repeated_blocks(model).values() for layer in block.modules() if is_linear(layer)]
    if targets is not None:
        ends = tuple(f".{target}" for target in targets)
        layers = [layer for name, layer in model.named_modules() if is_linear(layer) and f".{name}".endswith(ends)]
    if not layers:
        raise HalfstepError(
            f"lora={rank} on {type(model).__name__}",
            "no torch.nn.Linear stands in its repeated blocks, so there is nothing to adapt",
            "Leave lora out.",
        )
    model.requires_grad_(False)
    for layer in dict.fromkeys(layers):
        _adapt_layer(layer, rank)


def is_linear(module: nn.Module) -> bool:
    """Not so a subclass, as the one inside nn.MultiheadAttention whose weight is used without calling it."""
    return type(module) is nn.Linear or is_conv1d(module)


def is_conv1d(module: nn.Module) -> bool:
    """Whether it is transformers' Conv1D, which is known without importing it."""
    return type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"


def adapted_layers(model: nn.Module) -> list[Any]:
    """The layers of ``model`` that have an adapter."""
    return [module for module in model.modules() if "lora_A" in module._parameters]


def _adapt_layer(layer: Any, rank: int) -> None:
    num_out, num_in = reversed(layer.weight.shape) if is_conv1d(layer) else layer.weight.shape
    layer.lora_A = nn.Parameter(layer.weight.new_empty((rank, num_in), dtype=torch.float32))
    layer.lora_B = nn.Parameter(layer.weight.new_zeros((num_out, rank), dtype=torch.float32))
    nn.init.kaiming_uniform_(layer.lora_A, a=5**0.5)  # as a linear layer's weight
    layer.base_forward = layer.forward
    layer.forward = _adapted(layer, ALPHA / rank)


def _adapted(layer: Any, scaling: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = layer.base_forward(x)
        return result + F.linear(F.linear(x, layer.lora_A), layer.lora_B) * scaling

    return forward
