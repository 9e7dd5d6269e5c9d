"""Linear layers of bitsandbytes, which hold a weight in 4 bits (NF4): without one, and packed one at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.errors import HalfstepError
from halfstep.formats import FORMATS, SIXTEEN_BIT
from halfstep.plan.lora import is_conv1d
from halfstep.plan.quantized import WEIGHT_BLOCK
from halfstep.policy import Policy

_PIECE = 1 << 18
"""Weights that are packed at once, whole blocks: on a CPU bitsandbytes needs twenty bytes for each meanwhile."""


def hold_in_4_bit(model: Any, policy: Policy, device: str) -> int:
    """Put a layer of 4 bits in the place of each linear layer but the output, in place; how many there are.

    Each computes in the format that ``policy`` has for it. device: where it is packed, and stays. Layers of 4 bits that
    ``model`` has already count as well.
    """
    for parent, name, layer, path in list(_linear_layers(model)):
        packed = _shell(layer, path, policy)
        packed.weight = pack(packed, layer.weight.data, device)
        if layer.bias is not None:
            packed.bias = nn.Parameter(layer.bias.data.to(device), requires_grad=False)
        setattr(parent, name, packed)
    num = sum(is_4_bit(module) for module in model.modules())
    if not num:
        raise HalfstepError(
            f"quantize=4bit of {type(model).__name__}",
            "it has no linear layer besides its output",
            "Leave --quantize out.",
        )
    return num


def put_shells(model: Any, policy: Policy) -> None:
    """The same without weights: :func:`pack` makes one for each when it is read."""
    for parent, name, layer, path in list(_linear_layers(model)):
        setattr(parent, name, _shell(layer, path, policy))


def pack(layer: Any, weight: Tensor, device: str) -> Any:
    """``weight``, as the file of the model has it, in 4 bits on ``device``: the parameter for ``layer``.

    HalfstepError where bitsandbytes has no kernels there.
    """
    import bitsandbytes
    from bitsandbytes.functional import QuantState, quantize_4bit
    from bitsandbytes.nn import Params4bit

    weight = weight.t() if layer.is_transposed else weight
    num = weight.numel()
    codes = torch.empty((-(-num // 2), 1), dtype=torch.uint8, device=device)
    largest = torch.empty(-(-num // WEIGHT_BLOCK), dtype=torch.float32, device=device)
    kind: dict[str, Any] = {"blocksize": WEIGHT_BLOCK, "quant_type": "nf4"}
    pieces = weight.reshape(-1).split(_PIECE)
    try:
        for at, piece in enumerate(pieces):
            made, state = quantize_4bit(piece.to(device).float(), compress_statistics=False, **kind)
            codes[at * _PIECE // 2 :][: len(made)] = made
            largest[at * _PIECE // WEIGHT_BLOCK :][: len(state.absmax)] = state.absmax
    except (RuntimeError, NotImplementedError, AttributeError) as error:
        raise HalfstepError(
            f"quantize=4bit on {device}",
            f"bitsandbytes {bitsandbytes.__version__} has no kernels for it here ({' '.join(str(error).split())})",
            "Install a bitsandbytes for this machine, or leave --quantize out.",
        ) from None
    # What it unpacks to is what the layer computes in: else fp32, which a product would round at once.
    layer.quant_state = QuantState(largest, weight.shape, state.code, dtype=layer.compute_dtype, **kind)
    return Params4bit(
        codes, quant_state=layer.quant_state, compress_statistics=False, module=layer, bnb_quantized=True, **kind
    )


def check_kernels(device: str) -> None:
    """HalfstepError where bitsandbytes cannot pack on ``device``, found with one block of zeros."""
    layer = nn.Linear(WEIGHT_BLOCK, 1, device="meta")  # without random numbers
    pack(_shell(layer, "", Policy.parse("fp32")), torch.zeros(1, WEIGHT_BLOCK), device)


def is_4_bit(module: nn.Module) -> bool:
    """Whether it is a layer of bitsandbytes that holds 4 bits, or will."""
    from bitsandbytes.nn import Linear4bit

    return isinstance(module, Linear4bit)


def _linear_layers(model: Any) -> Iterator[tuple[nn.Module, str, Any, str]]:
    """Of each but the output: the module that it stands in, its name there, itself, and its whole name."""
    output = model.get_output_embeddings()
    shared = {id(module.weight) for module in (output, model.get_input_embeddings()) if module is not None}
    for path, parent in model.named_modules():
        for name, layer in parent.named_children():
            if (type(layer) is nn.Linear or is_conv1d(layer)) and id(layer.weight) not in shared:
                yield parent, name, layer, f"{path}.{name}" if path else name


def _shell(layer: Any, path: str, policy: Policy) -> Any:
    """A layer of 4 bits for ``layer``, without memory."""
    from bitsandbytes.nn import Linear4bit

    is_transposed = is_conv1d(layer)
    num_out, num_in = reversed(layer.weight.shape) if is_transposed else layer.weight.shape
    format = policy.format_of(path)
    compute = FORMATS[format].dtype if format in SIXTEEN_BIT else torch.float32
    shell = Linear4bit(num_in, num_out, layer.bias is not None, compute, quant_type="nf4", device="meta")
    shell.is_transposed = is_transposed
    # Else the first forward pass in eval mode would repack the weights for inference alone, for good.
    shell.support_avx512bf16_for_cpu = False
    # It hands on the format that it gets, which is fp32 after a norm; a 16-bit one is what autocast would hand on.
    shell.register_forward_pre_hook(lambda module, args: (args[0].to(compute), *args[1:]))
    return shell.train(layer.training)
