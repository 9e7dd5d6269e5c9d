"""A chart in characters: eight dots to one, every extreme drawn, and a mark where a value was not finite."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.text import Text

LABEL = 11
"""Characters left of a chart, for the numbers of its axis."""
_LOG_FROM = 30.0
"""Highest over lowest value from which on the axis is logarithmic."""
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
_TOP_HALF = 0x01 | 0x08 | 0x02 | 0x10


@dataclass(frozen=True)
class Mark:
    """A sign under a chart at each of ``steps``."""

    name: str
    sign: str
    style: str
    steps: Sequence[int]


@dataclass(frozen=True)
class Chart:
    """A series of halfstep.watch.store.Store over the steps ``first`` to ``last``, with marks under it."""

    title: str
    series: Mapping[str, Any]
    first: int
    last: int
    marks: Sequence[Mark] = ()

    def lines(self, width: int, height: int, is_ascii: bool = False) -> list[Text]:
        """``height`` lines, ``width`` wide: the title, the chart, and a row of marks if there are any."""
        lost = self.series["nonfinite"]
        words = " and ".join(sorted({word_of(word) for _, word in lost}))
        marks = [m for m in (Mark(words, "x", "bold red", [step for step, _ in lost]), *self.marks) if m.steps]
        columns, rows = max(1, width - LABEL), max(1, height - 1 - bool(marks))
        values: list[float] = self.series["values"]
        low, high = (min(values), max(values)) if values else (0.0, 0.0)
        is_log = low > 0 and high > _LOG_FROM * low
        title = Text.assemble((self.title, "bold"), (" (log)" if is_log else "", "dim"))
        for mark in marks:
            title.append(f"  {mark.sign} {mark.name}", mark.style)
        title.truncate(width)
        labels = [""] * rows
        if low < high:
            labels[-1], labels[0] = number_text(low), number_text(high)
        elif values:
            labels[(rows - 1) // 2] = number_text(low)
        drawn = self._drawn(columns, rows, is_log, is_ascii)
        lines = [
            Text.assemble((f"{text:>{LABEL - 1}} ", "dim"), (row, "cyan"))
            for text, row in zip(labels, drawn, strict=True)
        ]
        return [title, *lines, *([self._mark_row(marks, columns)] if marks else [])]

    def _mark_row(self, marks: Sequence[Mark], columns: int) -> Text:
        """The signs of all marks; where two fall together the first is seen."""
        signs = [(" ", "")] * (LABEL + columns)
        for mark in reversed(marks):
            for step in mark.steps:
                signs[LABEL + self._column(step, columns)] = mark.sign, mark.style
        return Text.assemble(*signs)

    def _column(self, step: int, columns: int) -> int:
        return round((step - self.first) / max(1, self.last - self.first) * (columns - 1))

    def _drawn(self, columns: int, rows: int, is_log: bool, is_ascii: bool) -> list[str]:
        steps, values = self.series["steps"], self.series["values"]
        heights = [math.log(value) for value in values] if is_log else values
        low, high = (min(heights), max(heights)) if heights else (0.0, 0.0)
        # Halved, since the difference of two large numbers may be inf.
        reach = high / 2 - low / 2
        deepest = rows * 4 - 1
        points = [
            (
                self._column(step, columns * 2),
                round((high / 2 - y / 2) / reach * deepest) if reach else (rows - 1) // 2 * 4 + 2,
            )
            for step, y in zip(steps, heights, strict=True)
        ]
        lost = [step for step, _ in self.series["nonfinite"]]
        cells = [[0] * columns for _ in range(rows)]
        for place, (x, y) in enumerate(points):
            before = max(0, place - 1)
            is_joined = bisect_right(lost, steps[before]) == bisect_right(lost, steps[place])
            x0, y0 = points[before] if is_joined else (x, y)
            length = max(abs(x - x0), abs(y - y0), 1)
            for i in range(length + 1):
                across, down = round(x0 + (x - x0) * i / length), round(y0 + (y - y0) * i / length)
                cells[down // 4][across // 2] |= _DOTS[down % 4][across % 2]
        return ["".join(_character(cell, is_ascii) for cell in row) for row in cells]


def _character(cell: int, is_ascii: bool) -> str:
    if not cell:
        return " "
    if not is_ascii:
        return chr(0x2800 + cell)
    return ":" if cell & _TOP_HALF and cell & ~_TOP_HALF else "'" if cell & _TOP_HALF else "."


def number_text(value: float) -> str:
    """Four digits, or all of a whole number."""
    return str(int(value)) if value.is_integer() and abs(value) < 1e9 else f"{value:.4g}"


def word_of(word: str) -> str:
    """A number that is not finite, as Python writes it, from the word of a log."""
    return word.replace("Infinity", "inf")
