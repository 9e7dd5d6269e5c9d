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
from halfstep.train.pretrained import Pretrained
from halfstep.train.settings import OPTIMIZERS, Settings, parse_options


class _WithoutCard:
    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """TRL's README of a checkpoint, which tells how to load it from a hub, is left out."""


class _Ends:
    """A run that is resumed after its last step takes no other, as a Trainer would within an epoch."""

    def _run_epoch(self: Any, *args: Any, **kwargs: Any) -> None:
        if self.state.global_step < self.state.max_steps:
            super()._run_epoch(*args, **kwargs)  # type: ignore[misc]


class SFT(_WithoutCard, _Ends, PrecisionMixin, ChunkedSFT, trl.SFTTrainer):
    """Also for pretraining, on texts that are packed into whole contexts."""


class DPO(_WithoutCard, _Ends, PrecisionMixin, ChunkedDPO, trl.DPOTrainer):
    pass


class KTO(_WithoutCard, _Ends, PrecisionMixin, ChunkedKTO, trl.KTOTrainer):
    pass


_KINDS = {
    "pretrain": (SFT, trl.SFTConfig),
    "sft": (SFT, trl.SFTConfig),
    "dpo": (DPO, trl.DPOConfig),
    "kto": (KTO, trl.KTOConfig),
}

_WARM_UP = 0.1
"""Share of the steps in which the learning rate grows to its value; it falls to 0 in a cosine after it."""

_LOGS = 0.05
"""Share of the steps between two logs. Of either a share is what transformers takes where epochs say how many."""


def make_trainer(
    settings: Settings,
    pretrained: Pretrained,
    adapted: Adapted,
    data: Data,
    policy: Policy,
    folder: Path,
    observer: Observer,
) -> Any:
    """The trainer of ``settings``, which are whole. ``adapted`` is what became of ``pretrained``."""
    kind, _ = _KINDS[settings.task]
    reference = {} if adapted.reference is None else {"ref_model": adapted.reference}
    try:
        trainer = kind(
            adapted.model,
            **reference,
            args=arguments(settings, folder),
            train_dataset=_columns(data.train, data),
            eval_dataset=_columns(data.evaluation, data) if data.evaluation is not None else None,
            processing_class=pretrained.tokenizer,
            policy=policy,
            log=folder,
            sinks=(observer,),
        )
    except (TypeError, ValueError, NotImplementedError) as error:
        if isinstance(error, HalfstepError) or not settings.options:
            raise
        raise _refused(settings, error) from None
    drop_copy(adapted.model)
    return trainer


def arguments(settings: Settings, folder: Path) -> Any:
    """TRL's arguments: those of the settings, and over them those of --options."""
    assert settings.save_every is not None
    _, config = _KINDS[settings.task]
    given: dict[str, Any] = {
        "output_dir": os.fspath(folder),
        "max_steps": -1 if settings.steps is None else settings.steps,
        "per_device_train_batch_size": settings.batch,
        "per_device_eval_batch_size": settings.batch,
        "gradient_accumulation_steps": settings.accumulate,
        "learning_rate": settings.lr,
        "lr_scheduler_type": "cosine",
        "warmup_steps": _WARM_UP if settings.steps is None else round(_WARM_UP * settings.steps),
        "max_grad_norm": settings.max_norm,
        "max_length": settings.max_length,
        "optim": OPTIMIZERS[settings.optimizer],
        _checkpointing_name(config): settings.checkpointing,
        "seed": settings.seed,
        "use_cpu": settings.device == "cpu",
        "save_steps": settings.save_every,
        "save_total_limit": 2,
        "logging_steps": _LOGS if settings.steps is None else max(1, int(_LOGS * settings.steps)),
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
        made = config(**given | options)
    except (TypeError, ValueError) as error:
        raise _refused(settings, error) from None
    if made.n_gpu > 1:
        made._n_gpu = 1  # a process has one card; transformers would take all by nn.DataParallel
    return made


def _refused(settings: Settings, error: Exception) -> HalfstepError:
    """TRL and transformers have words of their own for arguments that do not go together."""
    return HalfstepError(f"options {settings.options!r}", " ".join(str(error).split()).rstrip("."), "Correct them.")


def _checkpointing_name(config: Any) -> str:
    """transformers has renamed it."""
    names = {field.name for field in dataclasses.fields(config)}
    return "activation_checkpointing" if "activation_checkpointing" in names else "gradient_checkpointing"


def _columns(examples: Any, data: Data) -> Any:
    return examples.select_columns(list(data.columns))
