"""A rank's share of a workload: its model beside those of the other ranks, and every num_ranks-th of its batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import distributed
from torch.utils.data import DistributedSampler

from halfstep.distributed.replication import replicate
from halfstep.errors import HalfstepError
from halfstep.ranks.engine import ranks_of
from halfstep.snapshot import RandomState
from halfstep.workload import Workload, stream

_SPREAD = 0x9E3779B1
"""2**32 by the golden ratio: rank after rank, seeds that lie far apart and far from those of other runs. torch's
generator on the CPU takes 32 bits of a seed."""


def share(workload: Workload, device: str) -> Workload:
    """What this rank trains of ``workload``, just built: all of it where no process group of several ranks is open.

    A model that the workload's function has wrapped or sharded itself stays as it is; any other is replicated by DDP.
    Rank r of n trains batches r, r + n, r + 2n and so on, so that a window of n ranks holds the samples of one that is
    n times as long in one process. A loader with a DistributedSampler is divided already. Random numbers of the forward
    pass, such as dropout's, differ from rank to rank; rank 0 draws those of one process.
    """
    if num_ranks() == 1:
        return workload
    if torch.device(device).index is not None:
        raise HalfstepError(
            f"device={device!r} for each of {num_ranks()} ranks",
            "each of them has a card of its own",
            "Use 'cuda', or 'cpu'.",
        )
    model, batches = workload.model, workload.batches
    if ranks_of(model).num == 1:
        model = replicate(model.to(device))
    if not isinstance(getattr(batches, "sampler", None), DistributedSampler):
        batches = _Dealt(workload, torch.device(device))
    torch.manual_seed((torch.initial_seed() + distributed.get_rank() * _SPREAD) % 2**32)
    return replace(workload, model=model, batches=batches)


def num_ranks() -> int:
    """How many ranks the open process group has, 1 where none is open."""
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


class _Dealt:
    """The batches of a workload, dealt out to the ranks one by one; an iterable of this rank's.

    Every rank draws all of them, so that one that draws at random (a shuffling loader) gives the same order everywhere,
    and all run dry in the same step. For that they are drawn in a random state of their own.
    """

    def __init__(self, workload: Workload, device: torch.device) -> None:
        self._workload = workload
        self._rank, self._num = distributed.get_rank(), distributed.get_world_size()
        self._order, self._own = RandomState(device), RandomState(device)
        self._order.save()

    def __iter__(self) -> Iterator[Any]:
        batches = stream(self._workload)
        while True:
            self._own.save()
            self._order.restore()
            try:
                drawn = [next(batches) for _ in range(self._num)]
                self._order.save()
            finally:
                self._own.restore()
            yield drawn[self._rank]
