"""The state of a Stepper, in the middle of a window too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from halfstep.errors import HalfstepError
from halfstep.gradients import gradients_of, put_gradients
from halfstep.window import Window

if TYPE_CHECKING:
    from halfstep.stepper.step import Stepper


def state_of(stepper: Stepper, numbers_only: bool) -> dict[str, Any]:
    """What :meth:`Stepper.state_dict` gives."""
    window = stepper._window
    named = stepper.ranks.module.named_parameters()
    names: dict[torch.Tensor, str] = {parameter: name for name, parameter in named}
    gradients = gradients_of(stepper.optimizer) if window.num_micro_batches else {}
    if not gradients.keys() <= names.keys():
        raise HalfstepError(
            "the state of a window with a gradient that has no name",
            "the optimizer was given a parameter that the model does not have",
            "Add the parameter to the model, or save at a window's end.",
        )
    return {
        "policy": str(stepper.policy),
        "num_steps": stepper.num_steps,
        "unit": stepper._unit,
        "scale": stepper.scale.state_dict(),
        "promoted": list(stepper._promoted),
        "had_hopeless": stepper._had_hopeless,
        "masters": stepper.masters.numbers() if numbers_only else stepper.masters.state_dict(),
        "window": {
            "num_micro_batches": window.num_micro_batches,
            "loss_sum": window.loss_sum,
            "count": window.count,
            "num_replays": window.num_replays,
            "nonfinite_share": window.nonfinite_share,
            "is_left": window.is_left,
            "is_exhausted": window.is_exhausted,
            "statistics": stepper._statistics.state_dict() if window.num_micro_batches else {},
            "gradients": {} if numbers_only else {names[p]: g.clone() for p, g in gradients.items()},
        },
    }


def load_state(stepper: Stepper, state: Mapping[str, Any]) -> None:
    """What :meth:`Stepper.load_state_dict` does."""
    try:
        sums = dict(state["window"])
        gradients, statistics = sums.pop("gradients"), sums.pop("statistics")
        window = Window(**sums)
        names = ("num_steps", "unit", "scale", "promoted", "had_hopeless", "masters")
        numbers = {name: state[name] for name in names}
    except (KeyError, TypeError):
        raise HalfstepError(
            "a state without the keys of Stepper.state_dict()",
            "it was written by something else",
            "Pass what stepper.state_dict() returned, loaded with torch.load.",
        ) from None
    parameters = dict(stepper.ranks.module.named_parameters())
    for name, gradient in gradients.items():
        if name not in parameters or parameters[name].shape != gradient.shape:
            raise HalfstepError(
                f"a saved gradient {name!r} of shape {tuple(gradient.shape)}",
                "the model has no parameter of this name and shape",
                "Load the state into the model that it was saved with.",
            )
    stepper.masters.load_state_dict(numbers["masters"])
    stepper.scale.load_state_dict(numbers["scale"])
    for module in numbers["promoted"]:
        if (module, "fp32") not in stepper.policy.modules:
            stepper.region.promote(module)
    stepper.masters.settle(stepper.policy)
    stepper.masters.load_widened(numbers["masters"])
    stepper._promoted, stepper._had_hopeless = list(numbers["promoted"]), numbers["had_hopeless"]
    stepper.num_steps, stepper._unit = numbers["num_steps"], numbers["unit"]
    stepper.region.release()
    stepper._clear_window()
    stepper._window = window
    if window.num_micro_batches:
        stepper.ranks.begin(is_last=False)  # these gradients are as an earlier micro-batch leaves them
    stepper._statistics.load_state_dict(statistics)
    put_gradients({parameters[name]: g.to(parameters[name].device, copy=True) for name, g in gradients.items()})
    if stepper._watcher:
        stepper._watcher.resume(stepper.num_steps)
