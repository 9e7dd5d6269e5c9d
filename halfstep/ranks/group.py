"""Several ranks of one process group: the collectives of the step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed, nn

from halfstep.gradients import Gradients, is_not_finite
from halfstep.ranks.fault import fault_of, is_of_ranks
from halfstep.ranks.one import Ranks, Total
from halfstep.ranks.pace import pace_of
from halfstep.ranks.progress import current


class Group(Ranks):
    """The ranks of a process group. Every collective of the step goes through here.

    num_own: how many collectives the step itself has used.
    """

    def __init__(self, model: nn.Module, group: distributed.ProcessGroup) -> None:
        super().__init__(model)
        self.group = group
        self.rank, self.num = distributed.get_rank(group), distributed.get_world_size(group)
        self.num_own = 0
        self.progress = current()
        self._pace = pace_of(self.progress, self.device)
        self.numbers = distributed.get_process_group_ranks(group)

    def total(
        self,
        gradients: Gradients,
        norms: torch.Tensor,
        norm: torch.Tensor,
        loss_sum: torch.Tensor,
        count: torch.Tensor | float,
    ) -> Total:
        # One SUM for everything. A flag is 0 or 1 here and whatever their sum, so that "more than 0" afterwards is
        # what MAX gives: 1 or 0, alike on every rank. fp64, since a norm may travel as its square.
        bad_loss, bad_norm = is_not_finite(loss_sum).double(), is_not_finite(norm).double()
        numbers = torch.stack(
            [
                loss_sum.double(),
                count.double() if isinstance(count, torch.Tensor) else bad_loss.new_full((), count),
                bad_loss,
                bad_loss * self.numbers[self.rank],
                bad_norm,
                bad_norm * self.numbers[self.rank],
            ]
        )
        part = self._part(gradients, norms, norm)
        summed = self._all_reduce(torch.cat([numbers, part]), distributed.ReduceOp.SUM)
        numbers, parts = summed[: len(numbers)], summed[len(numbers) :]
        loss_sum, count = (numbers[0] / self.num).to(loss_sum.dtype), (numbers[1] / self.num).float()
        faults = numbers[2:].float()
        norms, norm = self._norms(gradients, norms, parts)
        # What one rank found is so for all, whatever adding up made of it.
        norm = norm.masked_fill((faults[2] > 0) & norm.isfinite(), torch.nan)
        return Total(norms, norm, loss_sum, count, faults)

    def _part(self, gradients: Gradients, norms: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
        """What this rank adds to the numbers that :meth:`_norms` takes, in fp64 and as many on every rank.

        Where all hold the whole gradient that is its norm, from the first rank alone: computed elsewhere it may differ
        in the last bit, and clip replicas apart.
        """
        part = norm.double().reshape(1)
        return part if self.rank == 0 else torch.zeros_like(part)

    def _norms(
        self, gradients: Gradients, norms: torch.Tensor, parts: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The norms of the whole gradients, and of all together, from the sums of :meth:`_part`."""
        return norms, parts[0].to(norms.dtype)

    @property
    def looks_alone(self) -> bool:
        return self.num == 1 or self.is_alone(is_last=False)

    def lowest(self, numbers: torch.Tensor) -> torch.Tensor:
        return self._all_reduce(numbers, distributed.ReduceOp.MIN)

    def highest(self, numbers: torch.Tensor) -> torch.Tensor:
        return self._all_reduce(numbers, distributed.ReduceOp.MAX)

    def gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.num
        with self._meeting():
            distributed.all_gather_object(values, value, self.group)
        return values

    def hand_out(self, value: Any, source: int) -> Any:
        values = [value]
        with self._meeting():
            distributed.broadcast_object_list(values, self.numbers[source], self.group)
        return values[0]

    @contextmanager
    def during(self, step: int) -> Iterator[None]:
        self.progress.enter(step)
        try:
            with self.named():
                yield
        except BaseException:
            self.progress.is_broken = True  # and this rank is still where that happened
            raise
        self.progress.leave()
        self._pace.clock.start()

    def at_end(self, call: Callable[[str], None]) -> None:
        self.progress.at_end(call)

    def report(self, trouble: str) -> None:
        self.progress.trouble = trouble

    def news(self) -> list[dict[str, Any]]:
        entries = self._pace.entries
        return [entries.popleft() for _ in range(len(entries))]

    @contextmanager
    def _meeting(self) -> Iterator[None]:
        """A collective of the step itself, in which a rank waits for the others."""
        self._pace.clock.stop()
        with self.named():
            yield
        self._pace.clock.start()

    @contextmanager
    def named(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if not is_of_ranks(error):
                raise
            fault = fault_of(self.progress, error)
            self.progress.end(f"HalfstepError: {fault}")
            raise fault from error

    def _all_reduce(self, tensor: torch.Tensor, op: Any) -> torch.Tensor:
        self.num_own += 1
        with self._meeting():
            distributed.all_reduce(tensor, op, self.group)
        if tensor.is_cuda:
            arrival = torch.cuda.Event()
            arrival.record()
            self.progress.pending = arrival, time.monotonic()
        return tensor
