"""What a training job is told, by flags or by a TOML file: one value, with a name that is both flag and key."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from halfstep.errors import HalfstepError
from halfstep.files import read_toml
from halfstep.policy import Policy
from halfstep.train.forms import TASKS

OPTIMIZERS = {
    "adamw": "adamw_torch_fused",
    "adamw8bit": "adamw_bnb_8bit",
    "adamw4bit": "adamw_torch_4bit",
    "sgd": "sgd",
    "adafactor": "adafactor",
}
"""Names of --optimizer, and what transformers calls them. Of 8 bits it is bitsandbytes', which compiles nothing at its
first step; of 4 bits torchao's."""

_FLAGS = {
    "output_dir": "output",
    "max_steps": "steps",
    "per_device_train_batch_size": "batch",
    "gradient_accumulation_steps": "accumulate",
    "learning_rate": "lr",
    "max_grad_norm": "max-norm",
    "max_length": "max-length",
    "gradient_checkpointing": "checkpointing",
    "activation_checkpointing": "checkpointing",
    "save_steps": "save-every",
    "resume_from_checkpoint": "resume",
    "seed": "seed",
    "use_cpu": "device",
    "bf16": "policy",
    "fp16": "policy",
    "tf32": "policy",
}
"""Arguments of TRL that have a flag: said in two places they could differ, and the report would have the wrong one."""


@dataclass(frozen=True)
class Settings:
    """task: ``pretrain``, ``sft``, ``dpo`` or ``kto``. None is what the task and the model suggest, see ``defaults``.

    model:       folder of a transformers model with its tokenizer, or ``tiny``.
    data:        FILE.jsonl, a folder of such files, for pretraining text as well; or ``builtin``.
    output:      folder for log, checkpoints and the trained model.
    policy:      text of a policy, or FILE.toml.
    steps:       optimizer steps. batch: samples in a micro-batch. accumulate: micro-batches in a step.
    lr:          learning rate after a short warm-up. max_norm: norm that gradients are clipped to, 0 for none.
    max_length:  tokens of a sample.
    optimizer:   one of OPTIMIZERS.
    lora:        train adapters of rank ``lora_rank`` beside ``lora_targets``, on frozen weights in the policy's format.
    quantize:    ``4bit`` holds the frozen weights in 4 bits (NF4, bitsandbytes).
    checkpointing: compute the activations of each block again in the backward pass.
    save_every:  steps between two checkpoints. resume: go on from the last one in ``output``.
    seed:        of data order, dropout and new weights. device: ``cpu`` or ``cuda``.
    plan:        plan the memory before anything is trained. memory: GiB to plan for, in place of the device's own.
    options:     what TRL calls its arguments, ``warmup_steps=10 beta=0.2``.
    """

    task: str
    model: str = "tiny"
    data: str = "builtin"
    output: str | None = None
    policy: str = "auto"
    steps: int | None = None
    batch: int | None = None
    accumulate: int = 1
    lr: float | None = None
    max_norm: float = 1.0
    max_length: int | None = None
    optimizer: str = "adamw"
    lora: bool = False
    lora_rank: int = 16
    lora_targets: str = "all-linear"
    quantize: str | None = None
    checkpointing: bool = False
    save_every: int | None = None
    resume: bool = False
    seed: int = 0
    device: str | None = None
    plan: bool = False
    memory: float | None = None
    options: str = ""

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "accumulate", "max_length", "lora_rank", "save_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise HalfstepError(f"{_key(name)}={value}", "it counts something", "Use 1, 2, 3, ...")
        for name in ("lr", "memory"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise HalfstepError(f"{name}={value:g}", "it is more than nothing", "Use a positive number.")
        if not self.max_norm >= 0:
            raise HalfstepError(f"max-norm={self.max_norm:g}", "a norm is not negative", "Use 0 to clip nothing.")
        if self.optimizer not in OPTIMIZERS:
            raise HalfstepError(
                f"optimizer={self.optimizer}",
                "no such optimizer",
                f"Use {', '.join(OPTIMIZERS)}, or --options 'optim=...' with a name of transformers.",
            )
        if self.device not in (None, "cpu", "cuda", "cuda:0"):
            raise HalfstepError(
                f"device={self.device}",
                "it is the processor, or the first card that there is to see",
                "Use cpu or cuda; CUDA_VISIBLE_DEVICES=1 makes the second card the first, torchrun takes several.",
            )
        if self.quantize not in (None, "4bit"):
            raise HalfstepError(f"quantize={self.quantize}", "weights are held in 4 bits or as they are", "Use 4bit.")
        if self.quantize and not self.lora:
            raise HalfstepError("quantize=4bit without lora", "weights of 4 bits do not train", "Add --lora.")
        Policy.parse(self.policy)
        options = parse_options(self.options)
        for name in options:
            if name in _FLAGS:
                raise HalfstepError(f"option {name}", "it has a flag of its own", f"Use --{_FLAGS[name]}.")
        if "num_train_epochs" in options and self.steps is not None:
            raise HalfstepError(
                f"option num_train_epochs beside steps={self.steps}", "both say how long to train", "Leave one out."
            )

    @classmethod
    def of(cls, task: str, given: Mapping[str, Any], config: str | os.PathLike[str] | None = None) -> Settings:
        """Of ``given`` flags, None where one was not given, and of the keys of a TOML file below them."""
        if task not in TASKS:
            raise HalfstepError(f"train {task}", "no such task", f"Use {', '.join(TASKS)}.")
        values = {} if config is None else _read(config)
        return cls(task, **values | {name: value for name, value in given.items() if value is not None})


def parse_options(text: str) -> dict[str, Any]:
    """``name=value`` words as TRL's arguments; values as TOML writes them, or text."""
    options = {}
    for word in text.split():
        name, mark, value = word.partition("=")
        if not (mark and name.isidentifier() and value):
            raise HalfstepError(
                f"option {word!r}", "it is not NAME=VALUE", "Write --options 'warmup_steps=10 beta=0.2'."
            )
        if name in options:
            raise HalfstepError(f"option {name}", "it is given twice", "Leave one out.")
        try:
            options[name] = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            options[name] = {"True": True, "False": False, "None": None}.get(value, value)
    return options


def _read(path: str | os.PathLike[str]) -> dict[str, Any]:
    types = {_key(f.name): f for f in fields(Settings) if f.name != "task"}
    values = {}
    for key, value in read_toml("config", path, "docs/train.md").items():
        if key not in types:
            raise HalfstepError(f"{key!r} in {path}", "no such setting", f"Use {', '.join(types)}.")
        values[types[key].name] = _typed(key, value, types[key].type, path)
    return values


def _typed(key: str, value: Any, annotation: Any, path: str | os.PathLike[str]) -> Any:
    wanted = str(annotation).removesuffix(" | None")
    kinds = {"str": str, "int": int, "float": float, "bool": bool}
    if wanted == "float" and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not kinds[wanted]:
        named = {"str": "a text", "int": "a whole number", "float": "a number", "bool": "true or false"}[wanted]
        raise HalfstepError(f"{key} = {value!r} in {path}", f"it is {named}", "See docs/train.md.")
    return value


def _key(name: str) -> str:
    return name.replace("_", "-")
