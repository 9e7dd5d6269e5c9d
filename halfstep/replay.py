"""Replay: a micro-batch whose gradient overflowed runs again at a lower loss scale, with the same random state.

Of several ranks, one whose micro-batch involves no other repeats it alone, at a scale of its own. Before gradients come
together all ranks go to the lowest scale that any of them came to, and from then on they decide together, from numbers
that are the same on all of them: no rank waits for a collective that another has left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from halfstep.gradients import (
    Gradients,
    add_gradients,
    gradients_of,
    multiply,
    nonfinite,
    nonfinite_share,
    norms_of,
    put_gradients,
    take_gradients,
)
from halfstep.ranks.one import Ranks, Total
from halfstep.scale import NoScale
from halfstep.snapshot import RandomState, RunningStatistics
from halfstep.window import Window


class Fault(NamedTuple):
    """A micro-batch whose gradient is not finite.

    bad: parameters at fault. loss: its true loss, NaN if that of any rank is not finite. lowered: by what the scale was
    multiplied in this micro-batch so far. is_alone: other ranks know nothing of it.
    """

    bad: list[torch.Tensor]
    loss: float
    lowered: float
    is_alone: bool


class Replay:
    """What a replay puts back, and how the ranks of a window come to one scale.

    start, statistics: random state and running statistics as the last micro-batch found them.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, scale: NoScale, ranks: Ranks) -> None:
        self.start = RandomState(scale.value.device)
        self.statistics = RunningStatistics(model)
        self._optimizer, self._scale, self._ranks = optimizer, scale, ranks

    def run(
        self,
        window: Window,
        is_last: bool,
        differentiate: Callable[[Mapping[torch.Tensor, torch.Tensor]], tuple[torch.Tensor, float | torch.Tensor]],
        mend: Callable[[Fault], float | None],
        tell: Callable[[Sequence[torch.Tensor], float], None],
        is_current: Callable[[], bool],
    ) -> tuple[torch.Tensor, float | torch.Tensor, bool]:
        """Run one micro-batch until its gradient is finite, and add that to the sums.

        Returns its loss, its count, and whether all ranks know that the gradient is finite.

        Parameters whose gradient was finite keep it, rescaled; only the others take the replayed one. The sums of
        finished micro-batches wait aside meanwhile, which is the one extra gradient of memory. An exception leaves them
        as they are, and nothing of this micro-batch.

        differentiate: one pass, forward and backward; gradients of the parameters that it is given can be dropped.
        mend:          what can be done about a fault: the factor by which the scale has changed, and the micro-batch
                       runs again, or None: what is not finite stays in the sums, so that the window will be skipped.
        tell:          hears of the parameters at fault and of the factor, once everything here fits it.
        is_current:    whether the window still exists; ``mend`` may end it, by an exception.
        """
        ranks = self._ranks
        is_alone, sums_travel = ranks.is_alone(is_last), ranks.sums_travel(is_last)
        self.start.save()
        self.statistics.save()
        self.come_together(window, is_last)
        sums = take_gradients(self._optimizer)
        kept: Gradients = {}
        lowered, is_finite, is_repeated = 1.0, False, False
        is_one_of_many = is_alone and ranks.num > 1
        try:
            while True:
                if sums_travel:
                    put_gradients({p: gradient.clone() for p, gradient in sums.items()})
                # Where ranks act together each backward is whole, since an engine waits for every parameter.
                loss, count = differentiate(kept if is_alone else {})
                gradients = {p: g for p, g in take_gradients(self._optimizer).items() if p not in kept}
                if not gradients:
                    break
                total, loss_value, norm_value = self._judge(gradients, loss, count, window, is_alone)
                if math.isfinite(norm_value) or window.is_left:
                    is_finite = math.isfinite(norm_value) and not is_one_of_many
                    # Not by what is kept here, since all ranks go by it: who has no total asks the others for one.
                    is_whole = is_last and not is_repeated and (sums_travel or not window.num_micro_batches)
                    window.total = total if is_whole and not ranks.is_pending else None
                    break
                bad = nonfinite(gradients, total.norms)
                window.nonfinite_share = nonfinite_share(gradients.values(), kept.values())
                can_repeat = not (is_one_of_many and ranks.has_talked)
                factor = mend(Fault(bad, loss_value, lowered, is_one_of_many)) if can_repeat else None
                if factor is None:
                    window.is_left |= is_one_of_many
                    break
                lowered, is_repeated = lowered * factor, True
                missing = set(bad) if math.isfinite(loss_value) else set(gradients)
                kept |= {p: g for p, g in gradients.items() if p not in missing}
                del gradients
                multiply([*sums.values(), *kept.values()], factor)
                window.num_replays += 1
                tell(bad, factor)
                self.start.restore()
                self.statistics.restore()
            if sums_travel:
                sums = {}
            add_gradients(sums, kept | gradients)
        except BaseException:
            take_gradients(self._optimizer)
            if is_current():
                self.statistics.restore()
            else:
                sums = {}
            raise
        finally:
            put_gradients(sums)
        return loss, count, is_finite

    def come_together(self, window: Window, is_last: bool) -> None:
        """Let the ranks :meth:`agree` before the micro-batch in which their gradients come together."""
        if window.num_micro_batches and self._ranks.is_alone(False) and not self._ranks.is_alone(is_last):
            self.agree(window)

    def agree(self, window: Window) -> None:
        """Go to the lowest scale of all ranks, with the sums of this one, and learn whether any holds a bad gradient.

        Every rank calls it, when the micro-batches that are its own are over. What is decided from then on is decided
        from what they know by this.
        """
        state = self._scale.state_dict()
        had_fault = window.nonfinite_share is not None
        flags = [had_fault, window.is_left, window.is_exhausted]
        own = [state["value"], state["num_clean"], *(-float(flag) for flag in flags)]
        value, num_clean, *minus = self._ranks.lowest(torch.tensor(own, device=self.start.device)).tolist()
        if value != own[0]:
            multiply(gradients_of(self._optimizer).values(), value / own[0])
        self._scale.load_state_dict({**state, "value": value, "num_clean": int(num_clean)})
        had_fault, window.is_left, window.is_exhausted = (flag != 0.0 for flag in minus)
        if had_fault and window.nonfinite_share is None:
            window.nonfinite_share = 0.0  # none of the elements here, but the verdict is one to look at

    def _judge(
        self,
        gradients: Gradients,
        loss: torch.Tensor,
        count: float | torch.Tensor,
        window: Window,
        is_alone: bool,
    ) -> tuple[Total, float, float]:
        """What the window adds up to with this micro-batch, its loss and its norm, in one read."""
        norms, norm = norms_of(gradients.values())
        sums = window.sums_with(loss, count)
        total = Total(norms, norm, *sums) if is_alone else self._ranks.total(gradients, norms, norm, *sums)
        # Of the others it matters whether there is a NaN among them.
        own_loss = loss.detach().float()
        if total.faults is not None:
            own_loss = own_loss.masked_fill(total.faults[0] > 0, torch.nan)
        loss_value, norm_value = torch.stack([own_loss, total.norm]).tolist()
        return total, loss_value, norm_value
