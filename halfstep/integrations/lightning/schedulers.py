"""Learning-rate schedulers that Lightning steps by itself: held back where the step was skipped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import LightningModule

_HOOK = "lr_scheduler_step"


def hold_schedulers(module: LightningModule, was_applied: Callable[[], bool]) -> Callable[[], None]:
    """Let the hook ``lr_scheduler_step`` of a module pass only after an applied step; returns what takes that back.

    A scheduler by epochs, and one on a metric, go by something else than steps and are left alone. The hook goes on the
    instance, as a plain function: a copy of the module shares it, and no state of anybody holds it.
    """
    before = module.__dict__.get(_HOOK)
    step: Any = module.lr_scheduler_step

    def lr_scheduler_step(scheduler: Any, metric: Any) -> None:
        by_steps = any(
            config.scheduler is scheduler and config.interval == "step" and not config.reduce_on_plateau
            for config in module.trainer.lr_scheduler_configs
        )
        if not by_steps or was_applied():
            step(scheduler, metric)

    module.__dict__[_HOOK] = lr_scheduler_step

    def release() -> None:
        if module.__dict__.get(_HOOK) is lr_scheduler_step:
            del module.__dict__[_HOOK]
            if before is not None:
                module.__dict__[_HOOK] = before

    return release
