"""Training over several ranks: start them, wrap a model for them, save and resume, and DeepSpeed's own engine.

Names load when they are first used, as those of ``halfstep`` do.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOME: dict[str, str] = {
    "start": "launch",
    "replicate": "replication",
    "shard": "sharding",
    "save": "checkpoint",
    "load": "checkpoint",
    "deepspeed_config": "deepspeed_settings",
    "DeepSpeedStepper": "deepspeed_stepper",
}
"""Name to the module of this package that it lives in."""


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'halfstep.distributed' has no attribute {name!r}")
    return getattr(importlib.import_module(f"halfstep.distributed.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
