"""DeepSpeed under Accelerate: the policy in its configuration, and an optimizer that knows the last report."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NoReturn
from unittest import mock

import accelerate.accelerator
import torch
from accelerate.utils import DeepSpeedOptimizerWrapper, DeepSpeedPlugin

from halfstep.distributed.deepspeed_settings import deepspeed_config
from halfstep.distributed.deepspeed_stepper import DeepSpeedStepper
from halfstep.errors import HalfstepError
from halfstep.events import RunInfo, StepReport
from halfstep.formats import SIXTEEN_BIT
from halfstep.policy import Policy
from halfstep.window import Loss

_OWN = ("halfstep", "communication_data_type", "data_types", "bf16", "fp16")
"""Keys of a configuration that follow from a policy."""


class EngineStepper(DeepSpeedStepper):
    """A DeepSpeedStepper whose windows end where its loop says so, which may be early.

    report: the last StepReport, None before the first.
    """

    masters = ()
    """None here: DeepSpeed's optimizer holds the fp32 weights."""

    report: StepReport | None = None

    def step(self, closure: Callable[[], Loss], *, is_last: bool = False) -> StepReport | None:
        self.engine.set_gradient_accumulation_boundary(is_last)
        return self._keep(super().step(closure))

    def differentiate(self, loss: Loss, *, is_last: bool) -> None:
        """The second half of a micro-batch that :meth:`forward` began."""
        self.engine.set_gradient_accumulation_boundary(is_last)
        self._keep(self.backward(loss))

    def drop(self) -> None:
        """Nothing: DeepSpeed has cleared its sums in its own step."""

    def _keep(self, report: StepReport | None) -> StepReport | None:
        self.report = report or self.report
        return report

    def norm(self) -> torch.Tensor:
        """The true norm of the last window, 0 before the first."""
        return torch.tensor(self.report.grad_norm if self.report else 0.0, device=self.engine.device)


class EngineOptimizer(DeepSpeedOptimizerWrapper):
    """What ``prepare`` makes of an optimizer under DeepSpeed, whose engine has stepped in ``accelerator.backward``.

    report: the StepReport of the last window, None before the first.
    """

    stepper: EngineStepper | None = None

    @property
    def report(self) -> StepReport | None:
        return self.stepper.report if self.stepper else None

    @property
    def step_was_skipped(self) -> bool:
        return self.report is not None and not self.report.applied


def write_policy(plugin: DeepSpeedPlugin, policy: Policy) -> None:
    """Write ``policy`` into the plugin's configuration, where the stepper finds it.

    A configuration that has one already, or enables a format by itself, decides where ``policy`` is ``auto`` or names
    that format and no more. Raises HalfstepError where it says something else.
    """
    config = plugin.deepspeed_config
    enabled = [name for name in ("bf16", "fp16", "torch_autocast") if config.get(name, {}).get("enabled") is True]
    if "halfstep" not in config and not enabled:
        own = deepspeed_config(policy, stage=plugin.zero_stage)
        config.update({name: own[name] for name in _OWN if name in own})
        return
    has = f"policy '{config['halfstep']['policy']}'" if "halfstep" in config else f"{enabled[0]}.enabled=true"
    names_format = [Policy.parse(name) for name in enabled if name in SIXTEEN_BIT]
    is_open = policy.compute == "auto" or replace(policy, on_overflow=Policy.on_overflow) in names_format
    if not is_open and has != f"policy '{policy}'":
        raise HalfstepError(
            f"policy '{policy}' and a DeepSpeed configuration with {has}",
            "they would say two things about the same weights",
            "Leave one of them out.",
        )


def info_of_engine(info: RunInfo, requested: Policy) -> RunInfo:
    """``info`` of an engine's stepper where ``requested`` was asked for, with what became of it and why."""
    whys = []
    if "on_overflow=skip" in info.effective and requested.on_overflow != "skip":
        whys.append("on_overflow=skip, since a gradient that overflowed is in DeepSpeed's sums already")
    if "master=copy" in info.effective and requested.master != "copy":
        whys.append("master=copy, since DeepSpeed's configuration keeps 16-bit weights with an fp32 copy")
    return replace(info, requested=str(requested), reason="; ".join([info.reason, *whys]))


@contextmanager
def own_optimizers() -> Iterator[None]:
    """Inside, Accelerate's ``prepare`` makes an :class:`EngineOptimizer`."""
    with mock.patch.object(accelerate.accelerator, "DeepSpeedOptimizerWrapper", EngineOptimizer):
        yield


def check_clipping(stepper: EngineStepper, max_norm: float, norm_type: float) -> None:
    """Refuse a clip that is not the one of the engine, which has stepped by the time when it is asked for."""
    clipping = stepper.engine.gradient_clipping()
    if norm_type != 2 or clipping != max_norm:
        raise HalfstepError(
            f"clip_grad_norm_(max_norm={max_norm}, norm_type={norm_type}) under DeepSpeed, which clips to {clipping}",
            "its engine clips the 2-norm of all gradients in its own step",
            f"Say it to DeepSpeed: gradient_clipping={max_norm} in the DeepSpeedPlugin or its configuration.",
        )


def refuse(what: str, why: str = "its gradients lie in buffers of its engine, which has stepped with them") -> NoReturn:
    """Refuse what an engine that accumulates, clips and steps by itself cannot do."""
    raise HalfstepError(f"{what} under DeepSpeed", why, "Leave it out, or use DDP or FSDP2.")
