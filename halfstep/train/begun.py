"""What a job was begun with, kept beside its checkpoints, so that another job is not resumed by mistake."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfstep.errors import HalfstepError
from halfstep.files import write_whole
from halfstep.train.settings import Settings, parse_options

_NAME = "job.json"

_FREE_OPTIONS = ("logging_", "save_", "eval_", "report_to", "run_name", "dataloader_")
"""Beginnings of options that change no weight."""


@dataclass(frozen=True)
class Begun:
    """What decides on the weights of a job, by the names of its flags.

    The policy may change at a checkpoint, and so may ``steps``, ``max-norm``, ``checkpointing`` and the device.
    """

    values: dict[str, Any]
    steps: int | None
    policy: str

    @classmethod
    def of(cls, settings: Settings, data: str, num_ranks: int) -> Begun:
        """Of ``settings`` that are whole, and the digest of the data."""
        assert settings.batch is not None
        folder = Path(settings.model)
        options = {
            name: value
            for name, value in sorted(parse_options(settings.options).items())
            if not name.startswith(_FREE_OPTIONS)
        }
        adapters = {"lora-rank": settings.lora_rank, "lora-targets": settings.lora_targets} if settings.lora else {}
        values = {
            "task": settings.task,
            "model": str(folder.resolve()) if folder.is_dir() else settings.model,
            "data": data,
            "lora": settings.lora,
            **adapters,
            "quantize": settings.quantize,
            "optimizer": settings.optimizer,
            "lr": settings.lr,
            "max-length": settings.max_length,
            "seed": settings.seed,
            "samples of a step": settings.batch * settings.accumulate * num_ranks,
            "options": options,
        }
        return cls(json.loads(json.dumps(values, default=str)), settings.steps, settings.policy)

    def write(self, folder: Path) -> None:
        write_whole(
            folder / _NAME, json.dumps({"steps": self.steps, "policy": self.policy, **self.values}, indent=2) + "\n"
        )

    def check(self, folder: Path, step: int) -> tuple[str, ...]:
        """Whether a job begun so may go on from ``step`` in ``folder``; notes on what changes.

        HalfstepError, with all that differs, where the weights would not be those of one job.
        """
        if self.steps is not None and self.steps < step:
            raise HalfstepError(
                f"steps={self.steps}", f"the last checkpoint in {folder} is of step {step}", "Ask for more steps."
            )
        try:
            before = json.loads((folder / _NAME).read_text(encoding="utf-8"))
            steps, policy = before.pop("steps"), before.pop("policy")
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return (f"{folder} has no {_NAME}: whether it was begun with the same settings is not known.",)
        differing = [name for name in (self.values | before) if self.values.get(name) != before.get(name)]
        if differing:
            raise HalfstepError(
                f"resume of {folder}",
                "it was begun with " + ", ".join(_difference(name, before, self.values) for name in differing),
                f"Use the same, or begin anew from its weights with --model {folder / 'model'} and another --output.",
            )
        notes = []
        if policy != self.policy:
            notes.append(f"Its policy was {policy} before, and {self.policy} from step {step} on.")
        if steps != self.steps:
            notes.append(f"It was begun for {steps} steps: the learning rate goes on as that of {self.steps} steps.")
        return tuple(notes)


def _difference(name: str, before: dict[str, Any], now: dict[str, Any]) -> str:
    if name == "data":
        return "other data"
    if name == "options":
        return f"options {_options(before.get(name, {}))} (now {_options(now.get(name, {}))})"
    return f"{name} {_value(before.get(name))} (now {_value(now.get(name))})"


def _options(options: dict[str, Any]) -> str:
    return repr(" ".join(f"{name}={value}" for name, value in options.items()))


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else "none" if value is None else str(value)
