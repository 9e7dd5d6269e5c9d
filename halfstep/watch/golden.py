"""The band of golden runs: where the loss of a good run lies, block by block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Band:
    """steps: the last step of each block. low, high: the band of the loss over that block."""

    steps: Sequence[int]
    low: Sequence[float]
    high: Sequence[float]


def read_band(folders: Sequence[str]) -> Band:
    """The band of the runs in ``folders``. HalfstepError where a folder holds no log."""
    raise NotImplementedError
