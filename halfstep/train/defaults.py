"""What a task starts with where nobody says otherwise."""

from __future__ import annotations

from dataclasses import replace

from halfstep.train.settings import Settings, parse_options

# Learning rates of the tasks for a model that is trained already; adapters take ten times as much.
_RATES = {"pretrain": 3e-4, "sft": 2e-5, "dpo": 1e-6, "kto": 1e-6}
_LORA_FACTOR = 10
_TINY_RATES = {"pretrain": 3e-3, "sft": 3e-3, "dpo": 1e-3, "kto": 1e-3}
_TINY_STEPS = {"pretrain": 150, "sft": 150, "dpo": 60, "kto": 60}
_TINY_BATCH = {"pretrain": 16, "sft": 16, "dpo": 8, "kto": 8}
_BUILTIN_LENGTH = 128  # its examples are short
_STEPS, _BATCH, _LENGTH = 1000, 4, 1024
_SAVES = 500


def with_defaults(settings: Settings, context: int | None) -> Settings:
    """``settings`` with a number for everything; steps stay None where --options say how many epochs.

    context: tokens that the model takes, None if it does not say.
    """
    in_epochs = "num_train_epochs" in parse_options(settings.options)
    is_tiny = settings.model == "tiny"
    rate = (_TINY_RATES if is_tiny else _RATES)[settings.task]
    if settings.lora and not is_tiny:
        rate *= _LORA_FACTOR
    length = _BUILTIN_LENGTH if settings.data == "builtin" else min(_LENGTH, context or _LENGTH)
    return replace(
        settings,
        steps=settings.steps or (None if in_epochs else _TINY_STEPS[settings.task] if is_tiny else _STEPS),
        batch=settings.batch or (_TINY_BATCH[settings.task] if is_tiny else _BATCH),
        lr=settings.lr or rate,
        max_length=settings.max_length or length,
        save_every=settings.save_every or _SAVES,
    )
