"""The seam between the step and its ranks, filled for one process, where there is nothing to add up.

The step asks four things: may a micro-batch be repeated by this rank alone; what does a window add up to over all
ranks; bring gradients that are still local together; which part of a tensor lives here. Gradients are means over the
ranks, as torch's engines leave them, and so are the sums of losses and counts beside them: the true gradient is the
one by the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from halfstep.gradients import Gradients
from halfstep.policy import Policy


@dataclass(slots=True)  # not frozen, which takes four times as long to make, in every step
class Total:
    """What a window adds up to: the mean over the ranks where it says mean, alike on every rank.

    norms:    2-norm of each whole gradient, scaled as the gradients are, fp32.
    norm:     of all of them together.
    loss_sum: mean over ranks of the sums of the losses.
    count:    mean over ranks of what they are to be divided by.
    faults:   empty for one process. Else four numbers: ranks whose loss is not finite, the sum of their numbers, and
              the same for the part of the gradient that a rank holds. A single culprit is thus named by two numbers
              that can be added up, in the collective that is needed anyway.
    """

    norms: torch.Tensor
    norm: torch.Tensor
    loss_sum: torch.Tensor
    count: torch.Tensor | float
    faults: torch.Tensor | None = None


@dataclass(frozen=True)
class Copies:
    """Parameters, by name, of which all ranks in the same place hold the same part: ``place`` of ``num_places``."""

    place: int
    num_places: int
    parameters: dict[str, torch.Tensor]


_NOTHING = nullcontext()


class Ranks:
    """One process, alone or beside others that it does not know of.

    module: the model without what an engine wraps around it; names of parameters are its names.
    rank, num: this rank, and how many there are.
    numbers: by which messages name the ranks, by rank.
    device:  where numbers have to be that are compared.
    """

    rank, num = 0, 1
    numbers: Sequence[int] = (0,)

    def __init__(self, model: nn.Module) -> None:
        self.module = model
        self.device = next((p.device for p in model.parameters()), torch.device("cpu"))

    def check(self, policy: Policy) -> None:
        """Refuse a model that an engine gives other formats than ``policy`` says, and warn of what it rounds."""

    def begin(self, is_last: bool) -> None:
        """A micro-batch begins, the last of its window or an earlier one: gradients are synchronised, or stay here."""

    def is_alone(self, is_last: bool) -> bool:
        """Whether no other rank takes part in the micro-batch, so that this one may run it again by itself."""
        return True

    def sums_travel(self, is_last: bool) -> bool:
        """Whether backward brings together what ``.grad`` holds, the sums of earlier micro-batches included."""
        return False

    @property
    def has_talked(self) -> bool:
        """Whether the model itself used a collective since :meth:`begin`, so that it cannot be run by one rank."""
        return False

    @property
    def is_pending(self) -> bool:
        """Whether the gradients of this window are still those of this rank alone."""
        return False

    def bring_together(self, parameters: Sequence[torch.Tensor]) -> None:
        """Make every ``.grad`` the mean over the ranks, where :attr:`is_pending`; every rank calls it."""

    def total(
        self,
        gradients: Gradients,
        norms: torch.Tensor,
        norm: torch.Tensor,
        loss_sum: torch.Tensor,
        count: torch.Tensor | float,
    ) -> Total:
        """Add a window up over the ranks, in one collective. ``norms`` and ``norm`` are of the parts that live here."""
        return Total(norms, norm, loss_sum, count)

    def lowest(self, numbers: torch.Tensor) -> torch.Tensor:
        """The smallest of each number over the ranks, in place."""
        return numbers

    def highest(self, numbers: torch.Tensor) -> torch.Tensor:
        """The largest of each number over the ranks, in place."""
        return numbers

    def gather(self, value: Any) -> list[Any]:
        """One small picklable value of every rank, by rank. Waits for all of them."""
        return [value]

    def hand_out(self, value: Any, source: int) -> Any:
        """The picklable value of the rank ``source``, on every rank."""
        return value

    def copies(self) -> Sequence[Copies]:
        """The parameters of which several ranks hold the same, for the precision contract; as many on every rank."""
        return ()

    @property
    def looks_alone(self) -> bool:
        """Whether a pass that is only looked at, :meth:`quietly`, involves no other rank."""
        return True

    def quietly(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """``closure`` as a pass that is only looked at: no other rank takes part, where the engine can do that."""
        return closure

    def named(self) -> AbstractContextManager[None]:
        """Around collectives: an error of one, of an engine's own too, becomes one that names the rank at fault."""
        return _NOTHING

    def during(self, step: int) -> AbstractContextManager[None]:
        """A call of the stepper that works on ``step``: others can learn of it, and errors of ranks name them."""
        return _NOTHING

    def at_end(self, call: Callable[[str], None]) -> None:
        """Have a method called with the reason when the ranks cannot go on, before the error is raised."""

    def report(self, trouble: str) -> None:
        """Let rank 0 know of something that this rank goes on with all the same. Never waits."""

    def news(self) -> Sequence[dict[str, Any]]:
        """On rank 0: what a comparison of the ranks has given since the last call, as entries for the log."""
        return ()

    def describe(self) -> Mapping[str, Any]:
        """What the engine does with formats, for the precision contract: the engine's name, formats on the wire."""
        return {"engine": "one process"}
