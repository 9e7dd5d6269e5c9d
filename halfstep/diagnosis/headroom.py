"""How far a value stands from the limit of its format, and since which step it has grown."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from halfstep.formats import FORMATS
from halfstep.record.mask import kind_of
from halfstep.record.recorder import Record
from halfstep.report import json_number

_PATIENCE = 5
"""Steps without a lower value after which the way back to where a value began to grow ends."""


@dataclass(frozen=True)
class Headroom:
    """How far the producer's values stood from the limit of its output's format.

    largest: largest finite magnitude among its inputs and outputs. limit: largest number of the format.
    bits:    log2(limit / largest), None when ``largest`` is 0. fp32_largest, fp32_bits: the same of its output when the
             step runs in FP32, None where that has no such operation; negative bits are beyond the limit.
    """

    format: str
    limit: float
    largest: float
    fp32_largest: float | None = None

    @property
    def bits(self) -> float | None:
        return _bits(self.limit, self.largest)

    @property
    def fp32_bits(self) -> float | None:
        return None if self.fp32_largest is None else _bits(self.limit, self.fp32_largest)

    def __str__(self) -> str:
        limit = f"the largest number of {self.format}, {self.limit:.5g}"
        text = f"Its largest finite value is {self.largest:.4g}{_stand(self.bits)} {limit}."
        if self.fp32_bits is not None:
            text += f" In fp32 its result reaches {self.fp32_largest:.4g}{_stand(self.fp32_bits)} that limit."
        return text

    def to_dict(self) -> dict[str, Any]:
        numbers = asdict(self) | {"bits": self.bits, "fp32_bits": self.fp32_bits}
        return {name: json_number(value) for name, value in numbers.items()}


@dataclass(frozen=True)
class Growth:
    """Since which step the producer's largest value has grown: from ``low`` at ``since`` to ``high`` at ``last``."""

    since: int
    low: float
    last: int
    high: float

    def __str__(self) -> str:
        then, now = f"{self.low:.4g}", f"{self.high:.4g} at step {self.last}"
        return f"Its largest value has grown since step {self.since}: {then}, {now}."


def headroom_of(record: Record, index: int, twin: Record | None) -> Headroom | None:
    """The headroom of the operation of this number; ``twin`` is the same step in FP32. None in a format of no limit."""
    operation = record.operations[index]
    format = FORMATS.get(operation.outputs[0].format)
    if format is None:
        return None
    largest = max(value.largest for value in (*operation.inputs, *operation.outputs))
    return Headroom(format.name, format.max, largest, None if twin is None else _twin_largest(record, index, twin))


def _twin_largest(record: Record, index: int, twin: Record) -> float | None:
    """The largest magnitude of the same operation's output in FP32: the same place, and as many before it there."""
    place = (record.operations[index].site, record.operations[index].op)
    number = sum((o.site, o.op) == place for o in record.operations[:index])
    same = [o for o in twin.operations if (o.site, o.op) == place]
    if number >= len(same) or kind_of(same[number]):
        return None
    return max(value.largest for value in same[number].outputs)


def growth_of(series: Sequence[tuple[int, float]]) -> Growth | None:
    """Since when a value has grown, by its largest magnitude in each step up to the one before the fault.

    That is its last local minimum, where one that later steps have gone below within a few steps does not count: from
    the end back, the lowest value so far, until 5 steps have brought no lower one.
    """
    if not series:
        return None
    low = len(series) - 1
    for index in range(len(series) - 1, -1, -1):
        if series[index][1] < series[low][1]:
            low = index
        elif low - index >= _PATIENCE:
            break
    if series[low][1] >= series[-1][1]:
        return None
    return Growth(series[low][0], series[low][1], series[-1][0], series[-1][1])


def _bits(limit: float, largest: float) -> float | None:
    return math.log2(limit / largest) if largest > 0 else None


def _stand(bits: float | None) -> str:
    return "," if bits is None else f", {abs(bits):.1f} bits {'below' if bits >= 0 else 'beyond'}"
