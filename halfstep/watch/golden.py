"""The band of golden runs: where the loss of a good run lies, block by block."""

from __future__ import annotations

import math
import os
import statistics
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from halfstep.errors import HalfstepError
from halfstep.watch.entry import Entry
from halfstep.watch.reading import read_entries

LEAST_PCT = 1.0
"""% of the loss that a run may lie off at any rate."""


@dataclass(frozen=True)
class Band:
    """steps: the last step of each block. low, high: the band of the loss over that block."""

    steps: Sequence[int]
    low: Sequence[float]
    high: Sequence[float]


def read_band(folders: Sequence[str | os.PathLike[str]]) -> Band:
    """The band of the runs in ``folders``, from the logs of their rank 0, where all of them have steps.

    Blocks are steps 1 to 100, 101 to 200 and so on. A run's own band is its median loss there, give or take the spread
    of its losses (1.4826 x the median distance from the median) or 1 % of the median, whichever is more. The band is
    from the lowest of the runs' own bands to the highest: of one run its own noise, of several the way between them
    too. A block counts when it has ended and half of its losses are finite.

    HalfstepError where a folder holds no log, or where no block counts in all of them.
    """
    runs = [_own_bands(read_entries(folder, 0)) for folder in folders]
    steps = sorted(set.intersection(*(set(run) for run in runs)))
    if not steps:
        raise HalfstepError(
            f"golden runs {', '.join(map(str, folders))}",
            "they have no 100 steps in common that are whole and mostly finite",
            "Use runs that have trained for longer.",
        )
    return Band(
        steps,
        [min(run[step][0] for run in runs) for step in steps],
        [max(run[step][1] for run in runs) for step in steps],
    )


def _own_bands(entries: Iterable[Entry]) -> dict[int, tuple[float, float]]:
    """The last step of each whole block to the low and high loss of one run there."""
    from halfstep.watch.window import SIZE, spread  # which needs Band

    bands = {}
    for number, group in groupby(_losses(entries), lambda pair: (pair[0] - 1) // SIZE):
        block = list(group)
        losses = [loss for _, loss in block if math.isfinite(loss)]
        if block[-1][0] < (number + 1) * SIZE or len(losses) < SIZE // 2:
            continue
        middle = statistics.median(losses)
        width = max(spread(losses, middle), LEAST_PCT / 100 * abs(middle))
        bands[(number + 1) * SIZE] = (middle - width, middle + width)
    return bands


def _losses(entries: Iterable[Entry]) -> list[tuple[int, float]]:
    """Step and loss of the steps that count: later ones of before a seam, or of a start anew, do not."""
    kept: list[tuple[int, float]] = []
    for entry in entries:
        if entry["kind"] == "seam":
            del kept[bisect_left(kept, (entry["step"] + 1,)) :]
        elif entry["kind"] == "step":
            del kept[bisect_left(kept, (entry["step"],)) :]
            kept.append((entry["step"], float(entry["loss"])))
    return kept
