"""The windows of a run under Lightning: a Stepper for each optimizer, ended where the framework steps."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from halfstep.closure import needs_closure
from halfstep.errors import HalfstepError
from halfstep.events import RunInfo, StepReport
from halfstep.gradients import Gradients, gradients_of, put_gradients, take_gradients
from halfstep.hardware import Hardware, detect
from halfstep.integrations.skipping import without_replay
from halfstep.policy import Policy
from halfstep.ranks.contract import Contract
from halfstep.region import Region, device_of
from halfstep.stepper import Event, Stepper
from halfstep.watch.settings import Watch

NO_REPLAY = "Lightning runs a training step once, so that on_overflow=replay is skip"


@dataclass(frozen=True)
class Settings:
    """What the user of the plugin has set. As for a Stepper."""

    policy: Policy
    keep_casts: bool
    log: str | os.PathLike[str] | None
    watch: Watch | str | os.PathLike[str] | bool
    sinks: Sequence[Callable[[Event], None]]
    contract: Contract
    hardware: Hardware | None


class Windows:
    """One Stepper for each optimizer; region, policy and loss scale are those of :attr:`first`.

    optimizers: None where the framework does not say which there are. Then each gets its Stepper when it first steps,
                and what the window holds by then counts for it.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer] | None, settings: Settings) -> None:
        self._model, self._settings = model, settings
        self._policy = without_replay(settings.policy, settings.hardware or detect(str(device_of(model))))
        self.drops_replay = self._policy != settings.policy
        self._steppers: dict[Optimizer, Stepper] = {}
        self._num_losses: dict[Stepper, int] = {}
        self._reports: dict[Optimizer, StepReport] = {}
        self._pending: Sequence[Mapping[str, Any]] = ()
        self._loaded: Gradients = {}
        self._carrier: Stepper | None = None
        self.report: StepReport | None = None
        if optimizers is None:
            self._carrier = self._carry()
        for optimizer in optimizers or ():
            self._add(optimizer)

    @property
    def first(self) -> Stepper:
        """The Stepper whose region, scale and policy all have."""
        return self._carrier or next(iter(self._steppers.values()))

    @property
    def info(self) -> RunInfo:
        """The policy that was asked for, the one in effect, and why they differ."""
        info = self.first.info
        reason = f"{info.reason}; {NO_REPLAY}" if self.drops_replay else info.reason
        return replace(info, requested=str(self._settings.policy), reason=reason)

    # Which Stepper.

    def stepper_of(self, optimizer: Optimizer) -> Stepper:
        """The Stepper of an optimizer, made now if it shows itself for the first time."""
        if optimizer not in self._steppers:
            if self._carrier is None:
                raise HalfstepError(
                    f"an optimizer {type(optimizer).__name__} that configure_optimizers() did not return",
                    "its parameters have no Stepper",
                    "Return every optimizer from configure_optimizers().",
                )
            self._add(optimizer)
        return self._steppers[optimizer]

    def report_of(self, optimizer: Optimizer) -> StepReport | None:
        """The StepReport of the last window of an optimizer, None before the first."""
        return self._reports.get(optimizer)

    def _add(self, optimizer: Optimizer) -> None:
        if needs_closure(optimizer):
            raise HalfstepError(
                f"{type(optimizer).__name__} under Lightning",
                "it evaluates the loss several times a step, and a training step of Lightning runs once",
                "Use halfstep.Stepper with stepper.step(closure); see docs/loops.md.",
            )
        log, number = self._settings.log, len(self._steppers) + 1
        if log is not None and number > 1:
            log = f"{os.fspath(log)}-{number}"
        stepper = self._make(optimizer, log, self._settings.watch)
        self._steppers[optimizer] = stepper
        self._num_losses[stepper] = self._num_losses[self._carrier] if self._carrier else 0
        if len(self._pending) >= number:
            # Numbers alone: it is made in the middle of a window, which is not the saved one.
            saved = {name: self._pending[number - 1][name] for name in ("num_steps", "had_hopeless")}
            stepper.load_state_dict({**stepper.state_dict(), **saved})

    def _carry(self) -> Stepper:
        """A Stepper over all parameters that has region and scale, and never ends a window of its own."""
        if self._policy.master != "fp32":
            raise HalfstepError(
                f"master={self._policy.master} under Fabric",
                "16-bit weights have to be made before the first forward pass, when no optimizer has shown itself",
                "Leave master out, use the Trainer, or use halfstep.Stepper in your own loop.",
            )
        trainable = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        stepper = self._make(torch.optim.SGD(trainable, lr=0.0), None, watch=False)
        self._num_losses[stepper] = 0
        return stepper

    def _make(
        self, optimizer: Optimizer, log: str | os.PathLike[str] | None, watch: Watch | str | os.PathLike[str] | bool
    ) -> Stepper:
        settings = self._settings
        return Stepper(
            self._model,
            optimizer,
            self._policy,
            accumulate=None,
            sinks=settings.sinks,
            keep_casts=settings.keep_casts,
            log=log,
            watch=watch,
            contract=settings.contract,
            beside=self._carrier or next(iter(self._steppers.values()), None),
            hardware=settings.hardware,
        )

    # A micro-batch, and the end of a window.

    def forward(self, *, is_last: bool) -> Region:
        """The region of a forward pass; begins a micro-batch where none has begun."""
        self._put_loaded()
        return self.first.forward(is_last=is_last)

    def backward(
        self, loss: torch.Tensor, *, is_last: bool, retain_graph: bool, again: Callable[[], torch.Tensor] | None
    ) -> None:
        """Differentiate a loss, for every optimizer that it reaches."""
        for stepper, num in self._num_losses.items():
            if num and not gradients_of(stepper.optimizer):
                stepper.drop()  # somebody has called zero_grad()
                self._num_losses[stepper] = 0
        self.forward(is_last=is_last)  # begins what has not begun; its region is not opened
        # In manual optimization the region of the training step is open around this, and backward runs without.
        with torch.autocast(self.first.region.device.type, enabled=False):
            self.first.backward(loss, retain_graph=retain_graph, again=again)
        for stepper in self._num_losses:
            self._num_losses[stepper] += 1

    def holds(self, optimizer: Optimizer) -> bool:
        """Whether there is a loss to step by."""
        if self._num_losses[stepper := self.stepper_of(optimizer)]:
            if len(self._num_losses) == 1 or gradients_of(optimizer):
                return True
            stepper.drop()  # none of the losses was for it
            self._num_losses[stepper] = 0
        elif gradients_of(optimizer):
            raise HalfstepError(
                "a step by gradients that halfstep has not seen",
                "nobody knows whether they are scaled, or finite",
                "Call self.manual_backward(loss) or fabric.backward(loss), and not loss.backward().",
            )
        return False

    def count(self, optimizer: Optimizer, whole: int | None) -> float:
        """By what the sum of the losses still has to be divided.

        whole: number of micro-batches of a whole window, by which the loop has divided each loss; None: as its loop
               wants it.
        """
        return 1.0 if whole is None else self._num_losses[self.stepper_of(optimizer)] / whole

    def end(self, optimizer: Optimizer, count: float) -> StepReport:
        """End the window of an optimizer: it steps, if the gradient is finite."""
        stepper = self.stepper_of(optimizer)
        self._num_losses[stepper] = 0
        try:
            report = stepper.end_window(count=count)
        finally:
            stepper.max_norm = None  # it was for this window
        self.report = self._reports[optimizer] = report
        return report

    def close(self) -> None:
        """End the logs, and drop the casts of a window that will not end."""
        self.first.region.release()
        for stepper in self._steppers.values():
            stepper.close()

    # State.

    def state_dict(self) -> dict[str, Any]:
        """The state of every Stepper, also in the middle of a window."""
        self._put_loaded()
        steppers = self._steppers.values()
        return {
            "policy": str(self.first.policy),
            "scale": self.first.scale.state_dict(),
            "steppers": [stepper.state_dict() for stepper in steppers],
            "num_losses": [self._num_losses[stepper] for stepper in steppers],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``, after model and optimizers have loaded theirs."""
        try:
            scale, steppers, num_losses = state["scale"], state["steppers"], state["num_losses"]
        except KeyError:
            raise HalfstepError(
                "a state without the keys of halfstep's precision plugin",
                "it was written by something else",
                "Leave the state of the other plugin out: the loss scale starts afresh.",
            ) from None
        if self._carrier is None and len(steppers) != len(self._steppers):
            raise HalfstepError(
                f"the state of {len(steppers)} optimizers",
                f"configure_optimizers() returns {len(self._steppers)}",
                "Resume with the optimizers that wrote it.",
            )
        self.first.scale.load_state_dict(scale)
        self._pending = steppers[len(self._steppers) :] and steppers
        for stepper, saved, num in zip(self._steppers.values(), steppers, num_losses, strict=False):
            stepper.load_state_dict(saved)
            self._num_losses[stepper] = num
            # The Trainer clears gradients once more before it begins.
            self._loaded |= take_gradients(stepper.optimizer)

    def _put_loaded(self) -> None:
        if self._loaded:
            put_gradients(self._loaded)
            self._loaded = {}
