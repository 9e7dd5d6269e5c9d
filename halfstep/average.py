"""The average of a run's weights: exponential (EMA), or the plain mean (SWA), in fp32 whatever the model holds.

    average <- average + (1 - decay) (weight - average)          EMA
    average <- average + (weight - average) / (num_updates + 1)  the mean of all that were taken in

Why fp32: at a decay of 0.999 an update is a thousandth of the difference, and bf16 rounds away whatever is under 1/256
of the average, so that one kept in 16 bit never moves. Both forms and their first step, which takes the weights as
they are, are those of torch.optim.swa_utils.AveragedModel.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from halfstep.errors import HalfstepError
from halfstep.events import StepReport
from halfstep.stepper import Stepper


class WeightAverage:
    """An average of the exact weights of ``stepper``'s optimizer, 4 bytes each on their device.

    decay: of the EMA, between 0 and 1; None for the plain mean.

    Buffers are not averaged: evaluation sees those of the model. With BatchNorm run
    ``torch.optim.swa_utils.update_bn`` inside :meth:`swapped`, which puts the model's own statistics back.
    """

    def __init__(self, stepper: Stepper, decay: float | None = 0.999) -> None:
        if decay is not None and not 0 < decay < 1:
            raise HalfstepError(f"decay={decay}", "an average moves by 1 - decay", "Use such as 0.999, or None (SWA).")
        self.decay = decay
        self.num_updates = 0
        self._stepper = stepper
        self._averages: dict[str, torch.Tensor] = {}
        self._is_swapped = False

    @torch.no_grad()
    def update(self, report: StepReport | None) -> bool:
        """Take in the weights after a step, and say whether it did.

        What ``stepper.step`` returned decides: None inside a window, and the report of a skipped step, change nothing.
        As ``on_applied`` it needs no call in the loop.
        """
        if self._is_swapped:
            raise HalfstepError(
                "update() inside swapped()", "the weights are the average", "Update after the with block."
            )
        if report is None or not report.applied:
            return False
        share = 1 / (self.num_updates + 1) if self.decay is None else 1 - self.decay
        trained = self._trained()
        for name, weight in self._stepper.weights():
            if name in self._averages:
                self._averages[name].lerp_(weight, share)
            elif name in trained:
                self._averages[name] = weight.to(torch.float32, copy=True)
        self.num_updates += 1
        return True

    def _trained(self) -> set[str]:
        """Names of what the optimizer trains. A frozen base would cost 4 bytes a weight, and is its own average."""
        groups = self._stepper.optimizer.param_groups
        trained = {id(p) for group in groups for p in group["params"] if p.requires_grad}
        return {name for name, p in self._stepper.ranks.module.named_parameters() if id(p) in trained}

    @contextlib.contextmanager
    def swapped(self) -> Iterator[None]:
        """The model with the averaged weights, rounded to what it holds; afterwards its own, to the bit.

        Costs a copy of the weights meanwhile.
        """
        if not self.num_updates:
            raise HalfstepError("an average of nothing", "no step was taken in yet", "Call update(report) before.")
        if self._is_swapped:
            raise HalfstepError(
                "an average that is swapped in already", "the weights are its own", "Use one with block."
            )
        model = self._stepper.ranks.module
        parameters = dict(model.named_parameters())
        averaged: dict[torch.Tensor, torch.Tensor] = {
            parameters[name]: average for name, average in self._averages.items()
        }
        own = {tensor: tensor.detach().clone() for tensor in (*averaged, *model.buffers())}
        self._is_swapped = True
        try:
            _copy(averaged)
            yield
        finally:
            _copy(own)
            self._is_swapped = False

    def state_dict(self) -> dict[str, Any]:
        """The averages by the names of the model's parameters, and how many steps they have seen."""
        return {
            "num_updates": self.num_updates,
            "averages": {name: average.clone() for name, average in self._averages.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``; averages of weights that the model does not have are refused."""
        if not state.keys() >= {"num_updates", "averages"}:
            raise HalfstepError(
                "a state without the keys of WeightAverage.state_dict()",
                "it was written by something else",
                "Pass what average.state_dict() returned, loaded with torch.load.",
            )
        parameters = dict(self._stepper.ranks.module.named_parameters())
        for name, average in state["averages"].items():
            if name not in parameters or parameters[name].shape != average.shape:
                raise HalfstepError(
                    f"a saved average {name!r} of shape {tuple(average.shape)}",
                    "the model has no parameter of this name and shape",
                    "Load the state into the model that it was saved with.",
                )
        self.num_updates = state["num_updates"]
        self._averages = {
            name: average.to(parameters[name].device, torch.float32, copy=True)
            for name, average in state["averages"].items()
        }


def _copy(values: Mapping[torch.Tensor, torch.Tensor]) -> None:
    """In a way that no version counter sees: what noted the weights, as master weights and graphs do, finds its own."""
    for tensor, value in values.items():
        tensor.data.copy_(value)
    torch.clear_autocast_cache()
