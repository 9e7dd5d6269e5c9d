"""LoRA adapters beside frozen weights that are held in the policy's 16-bit format or in 4 bits."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from halfstep.errors import HalfstepError
from halfstep.formats import SIXTEEN_BIT
from halfstep.plan.quantized import hold_base_in_16_bit
from halfstep.policy import Policy
from halfstep.train.settings import Settings


@dataclass(frozen=True)
class Adapted:
    """A model that is ready to train. notes: what was changed in it.

    reference: the model as it was, which DPO and KTO compare with; None where adapters that are switched off give it.
    """

    model: Any
    reference: Any = None
    notes: tuple[str, ...] = ()


def adapt(model: Any, settings: Settings, policy: Policy) -> Adapted:
    """``model`` with adapters in fp32 where the settings ask for them; all of it trains otherwise."""
    if not settings.lora:
        return Adapted(model, _reference(model, policy) if settings.task in ("dpo", "kto") else None)
    import peft

    targets = settings.lora_targets if settings.lora_targets == "all-linear" else settings.lora_targets.split(",")
    config = peft.LoraConfig(
        r=settings.lora_rank, lora_alpha=2 * settings.lora_rank, target_modules=targets, task_type="CAUSAL_LM"
    )
    try:
        adapted = peft.get_peft_model(model, config)
    except ValueError as error:
        raise HalfstepError(
            f"lora-targets={settings.lora_targets}", " ".join(str(error).split()), "Name layers of the model."
        ) from None
    if policy.compute not in SIXTEEN_BIT:
        return Adapted(adapted)
    hold_base_in_16_bit(adapted, policy)
    return Adapted(adapted, notes=(f"Frozen weights are held in {policy.compute}; adapters train in fp32.",))


def _reference(model: Any, policy: Policy) -> Any:
    reference = copy.deepcopy(model).requires_grad_(False).eval()
    if policy.compute in SIXTEEN_BIT:
        hold_base_in_16_bit(reference, policy)  # as the policy would cast them anyway
    return reference
