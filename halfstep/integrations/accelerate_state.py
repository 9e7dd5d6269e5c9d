"""What ``Accelerator.save_state`` keeps of a run's Steppers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from halfstep.errors import HalfstepError

if TYPE_CHECKING:
    from halfstep.integrations.accelerate import Accelerator


class LoopState:
    """The states of an Accelerator's Steppers, and where its loop stands in a window.

    Accelerate saves the object of the first rank for all of them, so that of several ranks it is for a window's end.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    def state_dict(self) -> dict[str, Any]:
        accelerator = self._accelerator
        states = [stepper.state_dict() for stepper in accelerator.steppers]
        if accelerator.num_processes > 1 and any(_is_open(state) for state in states):
            raise HalfstepError(
                "save_state() between the micro-batches of a window, on several ranks",
                "each holds sums of its own, and Accelerate saves those of one",
                "Save after optimizer.step(), where accelerator.sync_gradients is True.",
            )
        return {"steppers": states, "num_in_window": accelerator.num_in_window, "begins": accelerator.begins}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if not isinstance(state, Mapping) or "steppers" not in state:
            raise HalfstepError(
                "a checkpoint whose first registered object is not that of halfstep",
                "it was saved by another Accelerator, which has no state of a Stepper",
                "Load the model and the optimizer alone, or save with halfstep's Accelerator.",
            )
        accelerator = self._accelerator
        steppers = accelerator.steppers
        if len(steppers) != len(state["steppers"]):
            raise HalfstepError(
                f"a checkpoint of {len(state['steppers'])} optimizers for {len(steppers)}",
                "each has a state of its own",
                "Prepare what was prepared in the run that saved it, in the same order.",
            )
        for stepper, own in zip(steppers, state["steppers"], strict=True):
            stepper.load_state_dict(own)
        accelerator.num_in_window, accelerator.begins = state["num_in_window"], state["begins"]


def _is_open(state: Mapping[str, Any]) -> bool:
    return bool(state.get("window", {}).get("num_micro_batches"))
