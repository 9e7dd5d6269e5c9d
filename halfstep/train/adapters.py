"""LoRA adapters beside frozen weights that are held in the policy's 16-bit format or in 4 bits."""

from __future__ import annotations

import copy
import importlib.util
import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from halfstep.errors import HalfstepError, and_more
from halfstep.formats import FORMATS, SIXTEEN_BIT
from halfstep.plan.lora import is_conv1d
from halfstep.plan.quantized import WEIGHT_BLOCK, hold_base_in_16_bit
from halfstep.policy import Policy
from halfstep.train.settings import Settings

_PREFIX = "base_model.model."
"""What PEFT puts before the name of a module."""


@dataclass(frozen=True)
class Adapted:
    """A model that is ready to train. notes: what was changed in it.

    reference: the model as it was, which DPO and KTO compare with; None where adapters that are switched off give it.
    """

    model: Any
    reference: Any = None
    notes: tuple[str, ...] = ()


def check_packages(settings: Settings) -> None:
    """HalfstepError where ``settings`` need a package that is not installed."""
    needed = []
    if settings.lora:
        needed.append(("lora", "peft", "holds adapters"))
    if settings.quantize:
        needed.append((f"quantize={settings.quantize}", "bitsandbytes", "holds weights in 4 bits"))
    if settings.optimizer == "adamw8bit":
        needed.append(("optimizer=adamw8bit", "bitsandbytes", "holds its states in 8 bits"))
    if settings.optimizer == "adamw4bit":
        needed.append(("optimizer=adamw4bit", "torchao", "holds its states in 4 bits"))
    for what, package, does in needed:
        if importlib.util.find_spec(package) is None:
            raise HalfstepError(what, f"{package}, which {does}, is not installed", f"pip install {package}")


def adapt(model: Any, settings: Settings, policy: Policy, device: str = "cpu") -> Adapted:
    """``model`` with adapters in fp32 where the settings ask for them; all of it trains otherwise.

    device: where weights are quantised, and stay.
    """
    if not settings.lora:
        return Adapted(model, _reference(model, policy) if settings.task in ("dpo", "kto") else None)
    notes = []
    if settings.quantize:
        num = _hold_in_4_bit(model, policy, device)
        notes.append(f"The weights of {num} layers are held in 4 bits (NF4), 0.5625 bytes each.")
    adapted = _with_adapters(model, settings)
    if policy.compute in SIXTEEN_BIT:
        hold_base_in_16_bit(adapted, for_adapters(policy))
        others = "The other frozen weights" if settings.quantize else "Frozen weights"
        notes.append(f"{others} are held in {policy.compute}; adapters train in fp32.")
        for _, layer in _adapted_layers(adapted):
            # PEFT would make an fp32 copy of each input, which autocast then brings back to 16 bit.
            layer.cast_input_dtype_enabled = False
    return Adapted(adapted, notes=tuple(notes))


def for_adapters(policy: Policy) -> Policy:
    """``policy``, whose rules name modules of the model, with the names that these have beneath adapters."""
    return replace(policy, modules=tuple((_PREFIX + pattern, format) for pattern, format in policy.modules))


def drop_copy(model: Any) -> None:
    """Take away the copy of a fresh adapter that TRL keeps as the reference: without any the model is the same."""
    if "ref" in getattr(model, "peft_config", {}):
        model.delete_adapter("ref")


def num_parameters(model: nn.Module) -> int:
    """Weights of ``model``; two of 4 bits share a byte, and count as two."""
    states = [(parameter, getattr(parameter, "quant_state", None)) for parameter in model.parameters()]
    return sum(p.numel() if state is None else math.prod(state.shape) for p, state in states)


def _reference(model: Any, policy: Policy) -> Any:
    reference = copy.deepcopy(model).requires_grad_(False).eval()
    if policy.compute in SIXTEEN_BIT:
        hold_base_in_16_bit(reference, policy)  # as the policy would cast them anyway
    return reference


# --- adapters ------------------------------------------------------------------------------------------------------


def _with_adapters(model: Any, settings: Settings) -> Any:
    import peft

    names = [name.strip() for name in settings.lora_targets.split(",") if name.strip()]
    targets = "all-linear" if names == ["all-linear"] else names
    if not targets:
        raise HalfstepError(f"lora-targets={settings.lora_targets!r}", "it names no layer", _targets(model))
    config = peft.LoraConfig(
        r=settings.lora_rank,
        lora_alpha=2 * settings.lora_rank,
        target_modules=targets,
        task_type="CAUSAL_LM",
        fan_in_fan_out=any(is_conv1d(module) for module in model.modules()),
    )
    # By this mark PEFT chooses layers for 4 bits; where it stays, TRL would round the adapters to bf16.
    model.is_loaded_in_4bit = bool(settings.quantize)
    try:
        with warnings.catch_warnings():
            # Of a model with layers of both kinds; it corrects that itself.
            warnings.filterwarnings("ignore", message="fan_in_fan_out")
            adapted = peft.get_peft_model(model, config)
    except ValueError as error:
        why = " ".join(str(error).split()).removesuffix(" Please check the target modules and try again.")
        raise HalfstepError(f"lora-targets={settings.lora_targets}", why.rstrip("."), _targets(model)) from None
    finally:
        model.is_loaded_in_4bit = False
    thin = [f"{name} ({layer.in_features} to {layer.out_features})" for name, layer in _adapted_layers(adapted)
            if min(layer.in_features, layer.out_features) < settings.lora_rank]  # fmt: skip
    if thin:
        raise HalfstepError(
            f"lora-rank={settings.lora_rank}",
            f"no matrix has a rank above its smaller side, as of {and_more(thin)}",
            "Use a smaller --lora-rank, or name other layers with --lora-targets.",
        )
    return adapted


def _adapted_layers(model: Any) -> Iterator[tuple[str, Any]]:
    """By the name that they have in the base model."""
    from peft.tuners.lora import LoraLayer

    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            yield name.removeprefix(_PREFIX), module


def _targets(model: nn.Module) -> str:
    linear = (name for name, module in model.named_modules() if isinstance(module, nn.Linear) or is_conv1d(module))
    names = dict.fromkeys(name.rpartition(".")[2] for name in linear)
    return f"Use all-linear, or some of {', '.join(names)}." if names else "Train without --lora."


# --- 4 bits --------------------------------------------------------------------------------------------------------


def _hold_in_4_bit(model: Any, policy: Policy, device: str) -> int:
    """Put a layer of bitsandbytes in the place of each linear layer but the output, in place; how many there are.

    Each computes in the format that ``policy`` has for it.
    """
    from bitsandbytes.nn import Linear4bit

    output = model.get_output_embeddings()
    shared = {id(module.weight) for module in (output, model.get_input_embeddings()) if module is not None}
    num = 0
    for path, parent in list(model.named_modules()):
        for name, layer in list(parent.named_children()):
            full = f"{path}.{name}" if path else name
            if isinstance(layer, Linear4bit):
                num += 1
            elif (type(layer) is nn.Linear or is_conv1d(layer)) and id(layer.weight) not in shared:
                setattr(parent, name, _packed(layer, full, policy, device))
                num += 1
    if not num:
        raise HalfstepError(
            f"quantize=4bit of {type(model).__name__}",
            "it has no linear layer besides its output",
            "Leave --quantize out.",
        )
    return num


def _packed(layer: Any, path: str, policy: Policy, device: str) -> Any:
    import bitsandbytes
    from bitsandbytes.nn import Linear4bit, Params4bit

    weight = layer.weight.data.t().contiguous() if is_conv1d(layer) else layer.weight.data
    num_out, num_in = weight.shape
    format = policy.format_of(path)
    compute = FORMATS[format].dtype if format in SIXTEEN_BIT else torch.float32
    packed = Linear4bit(num_in, num_out, layer.bias is not None, compute, quant_type="nf4", device="meta")
    packed.weight = Params4bit(
        weight, requires_grad=False, compress_statistics=False, blocksize=WEIGHT_BLOCK, quant_type="nf4", module=packed
    )
    if layer.bias is not None:
        packed.bias = nn.Parameter(layer.bias.data, requires_grad=False)
    try:
        packed.to(device)
    except (RuntimeError, NotImplementedError, AttributeError) as error:
        raise HalfstepError(
            f"quantize=4bit on {device}",
            f"bitsandbytes {bitsandbytes.__version__} has no kernels for it here ({' '.join(str(error).split())})",
            "Install a bitsandbytes for this machine, or leave --quantize out.",
        ) from None
    packed.weight.quant_state.dtype = compute  # what it unpacks to: else fp32, which a product would round at once
    # Else the first forward pass in eval mode would repack the weights for inference alone, for good.
    packed.support_avx512bf16_for_cpu = False
    # It hands on the format that it gets, which is fp32 after a norm; a 16-bit one is what autocast would hand on.
    packed.register_forward_pre_hook(lambda module, args: (args[0].to(compute), *args[1:]))
    return packed.train(layer.training)
