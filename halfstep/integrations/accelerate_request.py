"""Which policy an Accelerator is asked for: by its argument, by ``mixed_precision``, or by the launcher."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import accelerate
from accelerate.state import AcceleratorState
from accelerate.utils import AutocastKwargs, GradScalerKwargs

from halfstep.errors import HalfstepError
from halfstep.events import RunInfo
from halfstep.policy import Policy

_ENVIRONMENT = "ACCELERATE_MIXED_PRECISION"
"""Set by ``accelerate launch``, to ``no`` where nobody said anything."""


def requested_policy(policy: str | Policy | None, mixed_precision: Any) -> str | Policy:
    """The policy to ask for.

    The argument ``policy`` decides. Without it ``mixed_precision`` does, which is fp32 where it is ``no``, then what
    ``accelerate launch --mixed_precision`` says, then ``auto``.

    Raises HalfstepError where the arguments say two different things, and for fp8. What the launcher says and an
    argument overrides is a warning.
    """
    said = None if mixed_precision is None else str(mixed_precision).lower()
    launched = os.environ.get(_ENVIRONMENT, "no").lower()
    for what, value in (
        (f"mixed_precision={said!r}", said),
        (f"--mixed_precision {launched} of the launcher", launched),
    ):
        if value == "fp8":
            raise HalfstepError(what, "halfstep has no products in fp8", "Use bf16 or fp16, or Accelerate by itself.")
    if policy is None:
        if said is not None:
            return "fp32" if said == "no" else said
        return "auto" if launched == "no" else launched
    compute = Policy.parse(policy).compute
    if said not in (None, "no", compute):
        raise HalfstepError(
            f"mixed_precision={said!r} and policy='{policy}'", "they ask for two formats", "Leave one of them out."
        )
    if launched not in ("no", compute):
        warnings.warn(
            f"policy='{policy}' of the script stands, and not --mixed_precision {launched} of the launcher; leave "
            "policy out of the script to follow the launcher",
            stacklevel=3,
        )
    return policy


def check_promotion(policy: Policy) -> None:
    """Refuse ``on_exhausted=promote`` in a loop that has no closure."""
    if policy.on_exhausted == "promote":
        raise HalfstepError(
            f"policy '{policy}' in a loop without a closure",
            "the module to promote is found by running the micro-batch again",
            "Leave on_exhausted out, and keep the module that the error names in fp32; or use halfstep.Stepper.",
        )


def info_without_replay(info: RunInfo, requested: Policy) -> RunInfo:
    """``info`` of a run that was asked for ``requested`` and got it without replay, and why."""
    if "on_overflow=skip" not in info.effective or requested.on_overflow == "skip":
        return info
    why = "on_overflow=skip, since a loop without a closure cannot run a micro-batch again"
    return replace(info, requested=str(requested), reason=f"{info.reason}; {why}")


def check_handlers(handlers: Iterable[Any]) -> None:
    """Refuse settings of Accelerate for what a policy says."""
    for handler in handlers:
        name = type(handler).__name__
        if isinstance(handler, GradScalerKwargs):
            raise HalfstepError(
                f"kwargs_handlers with {name}",
                "the loss scale is the policy's",
                "Write its settings there: policy='fp16 scale.init=1024 scale.interval=500'.",
            )
        if isinstance(handler, AutocastKwargs):
            raise HalfstepError(
                f"kwargs_handlers with {name}",
                "the region is the policy's",
                "Use policy='fp32' for none, or accelerator.autocast(AutocastKwargs(enabled=False)) for a part.",
            )
        if name.endswith("RecipeKwargs"):
            raise HalfstepError(
                f"kwargs_handlers with {name}", "halfstep has no products in fp8", "Use policy='bf16' without it."
            )


def check_state() -> None:
    """Refuse the state that another Accelerator of this process has left, where that opens regions of its own.

    It is one for the process, and is asked for by Accelerate's own code.
    """
    if not AcceleratorState._shared_state:
        return
    before = AcceleratorState._shared_state.get("_mixed_precision", "no")
    if before != "no":
        raise HalfstepError(
            f"an Accelerator after one with mixed_precision={before!r} in the same process",
            "Accelerate keeps one setting for a process, and would open regions inside those of the policy",
            "Build halfstep's Accelerator alone, or first.",
        )


def check_model(model: Any) -> None:
    """Refuse a model that Accelerate has wrapped in a region of its own."""
    if hasattr(model, "_original_forward"):
        raise HalfstepError(
            f"a {type(model).__name__} that an Accelerator of accelerate {accelerate.__version__} has prepared",
            "its forward opens a region of its own, inside that of the policy",
            "Prepare it here alone, or pass unwrap_model(model, keep_fp32_wrapper=False) of the other one.",
        )
