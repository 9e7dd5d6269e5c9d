"""What a plan is made of: a workload or a model, by its text, and the size of a micro-batch."""

from __future__ import annotations

import re
from dataclasses import dataclass

from halfstep.errors import HalfstepError


@dataclass(frozen=True)
class Input:
    """One argument of a bare model. kind: ``float``, ``int`` or ``bool``. shape: of one sample."""

    kind: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Subject:
    """What is planned; ``halfstep.plan.build`` makes it.

    spec:       WORKLOAD or MODEL as the command takes it.
    batch_size: samples of a micro-batch, None for what the workload itself draws.
    inputs:     of a bare model, what it takes for one sample as text, None if it says itself: ``3x224x224`` is a float
                tensor, ``int:1024`` one of 1024 token ids, ``int`` a single number; several are parted by commas.
    """

    spec: str
    batch_size: int | None = None
    inputs: str | None = None

    def __post_init__(self) -> None:
        size = self.batch_size
        if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
            raise HalfstepError(f"a batch of {size!r}", "it is not a number of samples", "Use a whole number from 1.")
        if self.inputs is not None:
            parse_inputs(self.inputs)


def parse_inputs(text: str) -> tuple[Input, ...]:
    """The inputs that ``text`` describes; a HalfstepError if it is not of the form that :class:`Subject` states."""
    return tuple(_parse_input(part.strip(), text) for part in text.split(","))


def _parse_input(part: str, text: str) -> Input:
    found = re.fullmatch(r"(?:(float|int|bool)(?::|$))?((?:[1-9]\d*(?:x[1-9]\d*)*)?)", part)
    if found is None or not part or part.endswith(":"):
        raise HalfstepError(
            f"inputs {text!r}",
            f"{part!r} is not the shape of one sample",
            "Write 3x224x224 for floats, int:1024 for token ids, and a comma between two inputs.",
        )
    kind, shape = found[1] or "float", found[2]
    return Input(kind, tuple(int(size) for size in shape.split("x")) if shape else ())
