"""What a Stepper refuses when it is built."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch.optim import Optimizer

from halfstep.errors import HalfstepError
from halfstep.policy import Policy
from halfstep.ranks.contract import Contract

if TYPE_CHECKING:
    from halfstep.stepper.step import Stepper


def check_settings(accumulate: int | None, max_norm: float | None, contract: Contract, beside: Stepper | None) -> None:
    """HalfstepError for settings that no step can have."""
    if accumulate is not None and (not hasattr(accumulate, "__index__") or accumulate < 1):
        raise HalfstepError(f"accumulate={accumulate}", "a window holds whole micro-batches", "Use 1, 2, 3, ...")
    if beside is not None and (accumulate is not None or beside.accumulate is not None):
        raise HalfstepError(
            "a Stepper beside another with a fixed number of micro-batches",
            "a loss counts for both, so that neither can tell when its window is full",
            "Use accumulate=None for both, and end_window().",
        )
    if max_norm is not None and not 0 < max_norm < math.inf:
        raise HalfstepError(f"max_norm={max_norm}", "a norm is clipped to a positive number", "Use None to not clip.")
    if not isinstance(contract, Contract):
        raise HalfstepError(f"contract={contract!r}", "it is a halfstep.Contract", "Leave it out for the defaults.")


def check_closure(optimizer: Optimizer, accumulate: int | None, policy: Policy) -> None:
    """HalfstepError where an optimizer that evaluates the loss itself cannot do so."""
    if accumulate != 1:
        raise HalfstepError(
            f"accumulate={accumulate} with {type(optimizer).__name__}",
            "it evaluates the loss of a window anew, whose earlier batches are gone by then",
            "Use accumulate=1, and a closure that sums over its batches and returns (sum, count).",
        )
    if policy.master != "fp32":
        raise HalfstepError(
            f"master={policy.master} with {type(optimizer).__name__}",
            "it moves the weights between two evaluations, where 16 bit would lose what it does",
            "Leave master out, so that the weights are fp32.",
        )
