"""The trainer of a task: TRL's, with log-probabilities in fp32 chunks, behind the Stepper."""

from __future__ import annotations

import dataclasses
import difflib
import os
from pathlib import Path
from typing import Any

import trl

from halfstep.errors import HalfstepError
from halfstep.integrations.transformers import PrecisionMixin
from halfstep.policy import Policy
from halfstep.train.adapters import Adapted, drop_copy
from halfstep.train.dataset import Data
from halfstep.train.losses import ChunkedDPO, ChunkedKTO, ChunkedSFT
from halfstep.train.observer import Observer
from halfstep.train.pretrained import Loaded
from halfstep.train.settings import OPTIMIZERS, Settings, parse_options


class _WithoutCard:
    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """TRL's README of a checkpoint, which tells how to load it from a hub, is left out."""


class SFT(_WithoutCard, PrecisionMixin, ChunkedSFT, trl.SFTTrainer):
    """Also for pretraining, on texts that are packed into whole contexts."""


class DPO(_WithoutCard, PrecisionMixin, ChunkedDPO, trl.DPOTrainer):
    pass


class KTO(_WithoutCard, PrecisionMixin, ChunkedKTO, trl.KTOTrainer):
    pass


_KINDS = {
    "pretrain": (SFT, trl.SFTConfig),
    "sft": (SFT, trl.SFTConfig),
    "dpo": (DPO, trl.DPOConfig),
    "kto": (KTO, trl.KTOConfig),
}

_WARM_UP = 0.1
"""Share of the steps in which the learning rate grows to its value; it falls to 0 in a cosine after it."""


def make_trainer(
    settings: Settings, loaded: Loaded, adapted: Adapted, data: Data, policy: Policy, folder: Path, observer: Observer
) -> Any:
    """The trainer of ``settings``, which are whole. ``adapted`` is what became of ``loaded.model``."""
    kind, _ = _KINDS[settings.task]
    reference = {} if adapted.reference is None else {"ref_model": adapted.reference}
    trainer = kind(
        adapted.model,
        **reference,
        args=arguments(settings, folder),
        train_dataset=_columns(data.train, data),
        eval_dataset=_columns(data.evaluation, data) if data.evaluation is not None else None,
        processing_class=loaded.tokenizer,
        policy=policy,
        log=folder,
        sinks=(observer,),
    )
    drop_copy(adapted.model)
    return trainer


def arguments(settings: Settings, folder: Path) -> Any:
    """TRL's arguments: those of the settings, and over them those of --options."""
    assert settings.steps is not None
    assert settings.save_every is not None
    _, config = _KINDS[settings.task]
    given: dict[str, Any] = {
        "output_dir": os.fspath(folder),
        "max_steps": settings.steps,
        "per_device_train_batch_size": settings.batch,
        "per_device_eval_batch_size": settings.batch,
        "gradient_accumulation_steps": settings.accumulate,
        "learning_rate": settings.lr,
        "lr_scheduler_type": "cosine",
        "warmup_steps": round(_WARM_UP * settings.steps),
        "max_grad_norm": settings.max_norm,
        "max_length": settings.max_length,
        "optim": OPTIMIZERS[settings.optimizer],
        _checkpointing_name(config): settings.checkpointing,
        "seed": settings.seed,
        "use_cpu": settings.device == "cpu",
        "save_steps": settings.save_every,
        "save_total_limit": 2,
        "logging_steps": max(1, settings.steps // 20),
        "report_to": [],
        "ddp_find_unused_parameters": False,
        "disable_tqdm": True,
        "bf16": False,  # the policy says in what is computed
        "dataloader_pin_memory": settings.device != "cpu",
    }
    if settings.task == "pretrain":
        given |= {"packing": True, "packing_strategy": "wrapped"}
    options = parse_options(settings.options)
    names = [field.name for field in dataclasses.fields(config) if field.init]
    for name in options:
        if name not in names:
            near = difflib.get_close_matches(name, names, 1)
            hint = f"Use {near[0]}." if near else f"Use one of {config.__name__}, see TRL's documentation."
            raise HalfstepError(f"option {name}", f"{config.__name__} has no such argument", hint)
    try:
        return config(**given | options)
    except (TypeError, ValueError) as error:
        raise HalfstepError(f"options {settings.options!r}", " ".join(str(error).split()), "Correct it.") from None


def _checkpointing_name(config: Any) -> str:
    """transformers has renamed it."""
    names = {field.name for field in dataclasses.fields(config)}
    return "activation_checkpointing" if "activation_checkpointing" in names else "gradient_checkpointing"


def _columns(examples: Any, data: Data) -> Any:
    return examples.select_columns(list(data.columns))
