"""halfstep: mixed-precision training for PyTorch that can be trusted.

Names load when they are first used, so that the parts that need no torch never import it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from halfstep.errors import HalfstepError, ScaleExhausted
    from halfstep.events import StepReport
    from halfstep.hardware import Hardware
    from halfstep.policy import LossScale, Policy, auto_policy
    from halfstep.region import Region
    from halfstep.stepper import Stepper
    from halfstep.workload import Workload

__version__ = "0.1.0"

_HOME = {
    "HalfstepError": "errors",
    "Hardware": "hardware",
    "LossScale": "policy",
    "Policy": "policy",
    "Region": "region",
    "ScaleExhausted": "errors",
    "StepReport": "events",
    "Stepper": "stepper",
    "Workload": "workload",
    "auto_policy": "policy",
}

__all__ = [
    "HalfstepError",
    "Hardware",
    "LossScale",
    "Policy",
    "Region",
    "ScaleExhausted",
    "StepReport",
    "Stepper",
    "Workload",
    "auto_policy",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'halfstep' has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(f"halfstep.{_HOME[name]}"), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        from halfstep.errors import HalfstepError

        raise HalfstepError(
            f"halfstep.{name}", "it needs torch, which is not installed", "Run: pip install 'halfstep[torch]'"
        ) from None


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
