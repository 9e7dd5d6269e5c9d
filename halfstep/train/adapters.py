"""LoRA adapters beside frozen weights that are held in the policy's 16-bit format or in 4 bits."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from halfstep.errors import HalfstepError, and_more
from halfstep.formats import FORMATS, SIXTEEN_BIT
from halfstep.plan.lora import is_conv1d
from halfstep.plan.quantized import hold_base_in_16_bit
from halfstep.policy import Policy
from halfstep.train.four_bit import hold_in_4_bit
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

    device: where weights are quantised, and stay. What ``held.py`` has narrowed already stays as it is.
    """
    if not settings.lora:
        return Adapted(model, _reference(model, policy) if settings.task in ("dpo", "kto") else None)
    notes = []
    if settings.quantize:
        num = hold_in_4_bit(model, policy, device)
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
    """A copy of ``model``, each weight at once in the format in which it is held."""
    parameters = list(model.parameters())
    empty = [nn.Parameter(p.detach().to("meta"), requires_grad=False) for p in parameters]
    shape = _copy_with(model, parameters, empty)
    if policy.compute in SIXTEEN_BIT:
        hold_base_in_16_bit(shape, policy)  # as the policy would cast them anyway
    held = [p.detach().to(e.dtype, copy=True) for p, e in zip(parameters, empty, strict=True)]
    reference = _copy_with(model, parameters, [nn.Parameter(h, requires_grad=False) for h in held])
    if policy.compute in SIXTEEN_BIT:
        hold_base_in_16_bit(reference, policy)
    return reference.eval()


def _copy_with(model: Any, parameters: Sequence[nn.Parameter], others: Sequence[nn.Parameter]) -> Any:
    """A copy of ``model`` that has ``others`` in the place of its ``parameters``."""
    return copy.deepcopy(model, {id(p): other for p, other in zip(parameters, others, strict=True)})


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
        with warnings.catch_warnings(), _seen_in_fp32(model):
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


@contextlib.contextmanager
def _seen_in_fp32(model: nn.Module) -> Iterator[None]:
    """Show fp32 in the place of 16-bit weights: PEFT rounds a fresh adapter to the format of the weight beside it."""
    low = {FORMATS[name].dtype for name in SIXTEEN_BIT}
    held = [(parameter, parameter.data) for parameter in model.parameters() if parameter.dtype in low]
    for parameter, data in held:
        parameter.data = torch.zeros((), device=data.device).expand(data.shape)  # without memory
    try:
        yield
    finally:
        for parameter, data in held:
            parameter.data = data


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
