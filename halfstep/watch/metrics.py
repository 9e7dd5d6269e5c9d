"""The numbers of steps in an index: a series of each metric, and the marks of skipped and replayed steps."""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Iterator, Sequence
from typing import Any

from halfstep.errors import HalfstepError
from halfstep.report import json_number
from halfstep.watch.pyramid import Pyramid, Row

METRICS = ("loss", "grad_norm", "scale", "seconds", "count_per_s", "memory_mib")
"""seconds: of a step, of one session. count_per_s: what was done a second; see halfstep.watch.throughput for both."""
_EXTREMES = ("low", "low_step", "high", "high_step", "nonfinite_step", "nonfinite")
_MARKS = ("num_steps", "num_skipped", "skipped_step", "num_replays", "replays_step")
_WIDTH = len(_EXTREMES)


def _of_steps(rows: Sequence[Row]) -> Row:
    steps, *metrics, skipped, replays = zip(*rows, strict=True)
    parts: list[Any] = []
    for values in metrics:
        try:
            low, high = min(values), max(values)
        except TypeError:
            low = None
        if isinstance(low, float):
            parts += (low, steps[values.index(low)], high, steps[values.index(high)], None, None)
        else:
            parts += _with_nonfinite(steps, values)
    return (*parts, len(steps), *_count(skipped, steps), *_count(replays, steps))


def _with_nonfinite(steps: Sequence[int], values: Sequence[Any]) -> Row:
    """The extremes of values that are not all finite: None where unknown, and words."""
    finite = [(value, -step) for step, value in zip(steps, values, strict=True) if isinstance(value, float)]
    words = [(step, value) for step, value in zip(steps, values, strict=True) if isinstance(value, str)]
    if not finite:
        return (None, None, None, None, *(words[0] if words else (None, None)))
    low, high = min(finite, key=lambda pair: (pair[0], -pair[1])), max(finite)
    return (low[0], -low[1], high[0], -high[1], *(words[0] if words else (None, None)))


def _of_buckets(rows: Sequence[Row]) -> Row:
    if len(rows) == 1:
        return rows[0][1:]
    _, *columns = zip(*rows, strict=True)
    parts: list[Any] = []
    for start in range(0, len(columns) - len(_MARKS), _WIDTH):
        lows, low_steps, highs, high_steps, nonfinite_steps, words = columns[start : start + _WIDTH]
        lowest = min((i for i, low in enumerate(lows) if low is not None), key=lows.__getitem__, default=0)
        highest = max((i for i, high in enumerate(highs) if high is not None), key=highs.__getitem__, default=0)
        word = next((i for i, step in enumerate(nonfinite_steps) if step is not None), 0)
        parts += (lows[lowest], low_steps[lowest], highs[highest], high_steps[highest])
        parts += (nonfinite_steps[word], words[word])
    num_steps, num_skipped, skipped_steps, num_replays, replays_steps = columns[-len(_MARKS) :]
    return (*parts, sum(num_steps), *_count(num_skipped, skipped_steps), *_count(num_replays, replays_steps))


def _count(counts: Sequence[int], steps: Sequence[int | None]) -> tuple[int, int | None]:
    """The sum, and the step of the first that is not 0."""
    total = sum(counts)
    return total, next(step for step, count in zip(steps, counts, strict=True) if count) if total else None


def _columns(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """The columns of a step's row and of a bucket's, for some metrics."""
    extremes = [f"{name}_{part}" for name in names for part in _EXTREMES]
    return [*names, "skipped", "replays"], [*extremes, *_MARKS]


STEPS = Pyramid("steps", 4, *_columns(METRICS), _of_steps, _of_buckets)


def series(
    db: sqlite3.Connection, names: Sequence[str], first: int, last: int, points: int
) -> dict[str, dict[str, list[Any]]]:
    """For each metric its ``steps`` and ``values``, and the steps that were ``nonfinite``; about ``points`` at most.

    Every step where there are no more than that, else the lowest and the highest of each bucket, at their own steps.
    """
    if unknown := [name for name in names if name not in METRICS]:
        raise HalfstepError(f"metric {unknown[0]!r}", "no such metric", f"There are {', '.join(METRICS)}.")
    rows = STEPS.read(db, first, last, _num_buckets(first, last, points), *_columns(names))
    answer: dict[str, dict[str, list[Any]]] = {}
    for place, name in enumerate(names):
        steps: list[int] = []
        values: list[float] = []
        nonfinite: list[list[Any]] = []
        for row in rows:
            low, low_step, high, high_step, nonfinite_step, word = row[place * _WIDTH : (place + 1) * _WIDTH]
            if low_step is not None:
                for step, value in sorted({low_step: low, high_step: high}.items()):
                    steps.append(step)
                    values.append(value)
            if nonfinite_step is not None:
                nonfinite.append([nonfinite_step, word])
        answer[name] = {"steps": steps, "values": values, "nonfinite": nonfinite}
    return answer


def marks(db: sqlite3.Connection, first: int, last: int, points: int) -> dict[str, list[list[int]]]:
    """Buckets with ``skips`` and ``replays``: the first step that had one, and how many there were."""
    rows = STEPS.read(db, first, last, _num_buckets(first, last, points), *_columns(()))
    return {
        "skips": [[step, count] for _, count, step, _, _ in rows if count],
        "replays": [[step, count] for _, _, _, count, step in rows if count],
    }


def totals(db: sqlite3.Connection, first: int, last: int) -> tuple[int, int, int]:
    """How many steps there are, how many were skipped, and how many replays there were."""
    rows = STEPS.read(db, first, last, 1, *_columns(()))
    return sum(row[0] for row in rows), sum(row[1] for row in rows), sum(row[3] for row in rows)


def _num_buckets(first: int, last: int, points: int) -> int:
    """One for each step if they are few enough; two values come from a bucket."""
    return last - first + 1 if last - first < points else max(1, points // 2)


def step_rows(steps: Sequence[Row]) -> Iterator[Row]:
    """Rows for STEPS out of rows whose metrics are as the log has them: numbers, words, or None."""
    keys, *metrics, skipped, replays = zip(*steps, strict=True)
    return zip(keys, *map(_stored, metrics), skipped, replays, strict=True)


def _stored(values: Sequence[Any]) -> Sequence[Any]:
    """Finite floats, words for what is not finite, and None."""
    if {*map(type, values)} <= {float, type(None)} and all(map(math.isfinite, filter(None, values))):
        return values
    return [None if value is None else json_number(float(value)) for value in values]
