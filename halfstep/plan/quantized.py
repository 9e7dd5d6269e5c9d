"""Weights and optimizer states in few bits, as far as a plan needs them: what they hold, and no numbers.

Memory is that of bitsandbytes, whose kernels keep everything else in registers: an 8-bit moment is a byte an element
and an fp32 scale for each 256, a 4-bit weight half a byte and an fp32 scale for each 64. For fake tensors alone; what
they compute has the right shapes and formats and no meaning.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn
from torch.optim import Adam, AdamW, Optimizer

from halfstep.errors import HalfstepError
from halfstep.formats import FORMATS, SIXTEEN_BIT
from halfstep.plan.checkpointing import repeated_blocks
from halfstep.plan.lora import adapted_layers, is_conv1d, is_linear
from halfstep.policy import Policy
from halfstep.weights import NORMS, is_source, widen_embedding

MOMENT_BLOCK = 256
WEIGHT_BLOCK = 64
SMALLEST_QUANTIZED = 4096
"""Elements from which a tensor's moments are held in 8 bits."""


class AdamW8bit(Optimizer):
    """The states of bitsandbytes' AdamW8bit, and of torchao's but for the order of their parts.

    exact: parameters whose moments stay in fp32.
    """

    bits, block = 8, MOMENT_BLOCK

    def __init__(
        self, params: Any, lr: float = 1e-3, weight_decay: float = 1e-2, exact: Collection[torch.Tensor] = ()
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self._exact = {id(parameter) for parameter in exact}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One kernel a parameter: it moves the weight in place and needs no memory but the states."""
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    if not self.state[parameter]:
                        self.state[parameter].update(self._moments(parameter))
                    parameter.add_(parameter.grad)

    def _moments(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        num = parameter.numel()
        if num < SMALLEST_QUANTIZED or id(parameter) in self._exact:
            return {name: torch.zeros_like(parameter, dtype=torch.float32) for name in ("state1", "state2")}
        shape = parameter.shape if self.bits == 8 else (-(-num // 2),)
        codes = {name: parameter.new_zeros(shape, dtype=torch.uint8) for name in ("state1", "state2")}
        scales = {
            name: parameter.new_zeros(-(-num // self.block), dtype=torch.float32)  # by these names a slice is taken
            for name in ("absmax1", "absmax2")
        }
        return codes | scales


class AdamW4bit(AdamW8bit):
    """The states of torchao's AdamW4bit: two moments in a byte, and a scale for each 128."""

    bits, block = 4, 128


def in_8_bit(optimizer: Optimizer, exact: Collection[torch.Tensor] = ()) -> AdamW8bit:
    """An optimizer over the groups of ``optimizer``, with states of 8 bits. HalfstepError unless it is an Adam.

    exact: parameters whose moments stay in fp32.
    """
    return AdamW8bit(_groups(optimizer, "adamw8bit"), exact=exact)


def in_4_bit(optimizer: Optimizer) -> AdamW4bit:
    """The same with states of 4 bits."""
    return AdamW4bit(_groups(optimizer, "adamw4bit"))


def _groups(optimizer: Optimizer, name: str) -> list[dict[str, Any]]:
    if not isinstance(optimizer, Adam | AdamW):
        raise HalfstepError(
            f"{name} in place of {type(optimizer).__name__}",
            "another rule than Adam's trains in another way, however its states are held",
            f"Plan with an Adam or AdamW, or leave {name} out.",
        )
    return [
        {name: group[name] for name in ("params", "lr", "weight_decay") if name in group}
        for group in optimizer.param_groups
    ]


def hold_base_in_16_bit(model: nn.Module, policy: Policy) -> None:
    """Hold the frozen weights of ``model`` in the 16-bit format that ``policy`` computes them in, in place.

    Vectors and norms stay fp32, and an embedding hands on fp32, as with ``halfstep.master.Masters``.
    """
    if policy.compute not in SIXTEEN_BIT:
        raise HalfstepError(
            f"16bit with the policy {policy}", "it computes in no 16-bit format", "Use bf16 or fp16, or leave it out."
        )
    for path, module in model.named_modules():
        format = policy.format_of(path)
        if format not in SIXTEEN_BIT or isinstance(module, (*NORMS, nn.RNNBase, nn.EmbeddingBag)):
            continue
        for name, parameter in module._parameters.items():
            if parameter is not None and _is_frozen_weight(parameter) and not is_source(module, name):
                parameter.data = parameter.data.to(FORMATS[format].dtype)
                widen_embedding(module)


def _is_frozen_weight(parameter: nn.Parameter) -> bool:
    return not parameter.requires_grad and parameter.dim() >= 2 and parameter.is_floating_point()


def hold_base_in_4_bit(model: nn.Module, is_adapted_alone: bool = True) -> None:
    """Hold the weights of the adapted layers of ``model`` in 4 bits (NF4, Dettmers et al. 2023, arXiv 2305.14314).

    is_adapted_alone: if not, those of the other linear layers of its repeated blocks as well.
    """
    layers = adapted_layers(model)
    if layers and not is_adapted_alone:
        inner = (layer for block in repeated_blocks(model).values() for layer in block.modules() if is_linear(layer))
        layers = list(dict.fromkeys([*layers, *inner]))
    if not layers:
        raise HalfstepError(
            "4bit without adapters", "weights of 4 bits do not train", "Put lora=16 before it (lora=16 4bit)."
        )
    for layer in layers:
        _pack(layer)


def _pack(layer: Any) -> None:
    weight = layer.weight
    shape = tuple(reversed(weight.shape)) if is_conv1d(layer) else tuple(weight.shape)
    num_blocks = -(-weight.numel() // WEIGHT_BLOCK)
    packed = weight.new_empty((-(-weight.numel() // 2), 1), dtype=torch.uint8)
    layer.weight = nn.Parameter(packed, requires_grad=False)
    layer.absmax = nn.Parameter(weight.new_empty(num_blocks, dtype=torch.float32), requires_grad=False)

    def forward(x: torch.Tensor) -> torch.Tensor:
        kind = x.device.type
        format = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        result: torch.Tensor = _FourBitProduct.apply(  # type: ignore[no-untyped-call]
            x.to(format), layer.weight, layer.absmax, shape
        )
        return result if layer.bias is None else result + layer.bias.to(format)

    if "lora_A" in layer._parameters:
        layer.base_forward = forward
    else:
        layer.forward = forward


class _FourBitProduct(torch.autograd.Function):
    """x [..., in] times the weight [out, in], which is unpacked for each product and kept packed in between."""

    @staticmethod
    def forward(
        context: Any, x: torch.Tensor, packed: torch.Tensor, absmax: torch.Tensor, shape: tuple[int, int]
    ) -> torch.Tensor:
        context.save_for_backward(packed, absmax)
        context.shape = shape
        return x @ _unpacked(packed, shape, x.dtype).t()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        packed, _ = context.saved_tensors
        return gradient @ _unpacked(packed, context.shape, gradient.dtype), None, None, None


def _unpacked(packed: torch.Tensor, shape: tuple[int, int], format: torch.dtype) -> torch.Tensor:
    """One kernel, which writes the weight in the format of the product."""
    return packed.new_empty(shape, dtype=format)
