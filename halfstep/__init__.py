"""halfstep: mixed-precision training for PyTorch that can be trusted.

Names load when they are first used, so that the parts that need no torch never import it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from halfstep import distributed, integrations
    from halfstep.alignment import align
    from halfstep.autocast_mode import autocast
    from halfstep.average import WeightAverage
    from halfstep.errors import HalfstepError, ScaleExhausted
    from halfstep.events import StepReport
    from halfstep.grad_scaler import GradScaler
    from halfstep.hardware import Hardware
    from halfstep.inference import InferenceReport, cast_for_inference
    from halfstep.policy import LossScale, Policy, auto_policy
    from halfstep.ranks.contract import Contract
    from halfstep.region import Region
    from halfstep.stepper import Stepper
    from halfstep.updates import UpdateMeter
    from halfstep.watch.settings import Watch
    from halfstep.workload import Workload

__version__ = "0.1.0"

_HOME = {
    "Contract": "ranks.contract",
    "GradScaler": "grad_scaler",
    "HalfstepError": "errors",
    "Hardware": "hardware",
    "InferenceReport": "inference",
    "LossScale": "policy",
    "Policy": "policy",
    "Region": "region",
    "ScaleExhausted": "errors",
    "StepReport": "events",
    "Stepper": "stepper",
    "UpdateMeter": "updates",
    "Watch": "watch.settings",
    "WeightAverage": "average",
    "Workload": "workload",
    "align": "alignment",
    "auto_policy": "policy",
    "autocast": "autocast_mode",
    "cast_for_inference": "inference",
}

__all__ = [
    "Contract",
    "GradScaler",
    "HalfstepError",
    "Hardware",
    "InferenceReport",
    "LossScale",
    "Policy",
    "Region",
    "ScaleExhausted",
    "StepReport",
    "Stepper",
    "UpdateMeter",
    "Watch",
    "WeightAverage",
    "Workload",
    "align",
    "auto_policy",
    "autocast",
    "cast_for_inference",
    "distributed",
    "integrations",
]


def __getattr__(name: str) -> Any:
    if name in ("distributed", "integrations"):
        return importlib.import_module(f"halfstep.{name}")
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
