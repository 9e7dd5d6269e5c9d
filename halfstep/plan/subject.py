"""What a plan is made of: a workload or a model, by its text, and the size of a micro-batch."""

from __future__ import annotations

from dataclasses import dataclass

from halfstep.errors import HalfstepError


@dataclass(frozen=True)
class Subject:
    """What is planned; ``halfstep.plan.build`` makes it.

    spec:       WORKLOAD or MODEL as the command takes it.
    batch_size: samples of a micro-batch, None for what the workload itself draws.
    inputs:     of a bare model, the shape of one sample as text (``3x224x224``, ``int:1024``), None if it says itself.
    """

    spec: str
    batch_size: int | None = None
    inputs: str | None = None

    def __post_init__(self) -> None:
        size = self.batch_size
        if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
            raise HalfstepError(f"a batch of {size!r}", "it is not a number of samples", "Use a whole number from 1.")
