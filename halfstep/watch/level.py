"""The level of a dynamic loss scale: which one is known to hold, and so which overflow is a search for it."""

from __future__ import annotations

import math

from halfstep.policy import LossScale

NUM_CLEAN = 20
"""Steps in a row without an overflow after which a loss scale is known to hold."""


class Level:
    """Tells an overflow by which a dynamic scale finds its level from one that is a fault.

    The scale starts too high on purpose and falls until it fits, and after every ``interval`` clean steps it tries the
    next one above. So an overflow is no fault at a scale that has not held yet: as many at one scale as lower it, and
    above the floor, where nothing is left to find. A scale holds after NUM_CLEAN clean steps, or once it has grown.
    One that the scale grows into again after it failed there may fail at any time: that is nothing new.

    is_resumed: the run goes on from a checkpoint, so that the scale was found before. It may have been written in the
                very step in which the scale grew: its first scale has to show that it holds, the next one below holds.
    """

    def __init__(self, settings: LossScale, is_resumed: bool = False) -> None:
        self._settings, self._is_resumed = settings, is_resumed
        self._holds = 0.0  # the largest scale that is known to hold
        self._fails = math.inf  # the smallest at which an overflow was seen, until the scale grows from it
        self._is_known_to_fail = False  # whether the scale has grown to where it failed before
        self._start(0.0)

    def _start(self, scale: float) -> None:
        self._scale = scale  # that of the last step, 0 before the first
        self._num_clean = self._num_overflows = 0  # at this scale; clean ones in a row
        self._has_run = False  # whether a step at this scale was clean

    @property
    def is_calibrated(self) -> bool:
        """Whether a scale has been found that holds."""
        return self._holds > 0.0

    @property
    def is_probe(self) -> bool:
        """Whether no step has run at this scale so far."""
        return not self._has_run

    def clean(self, scale: float) -> None:
        """A step without an overflow, at ``scale``."""
        if scale != self._scale:
            self._move(scale)
        self._num_clean += 1
        self._has_run = True
        if self._num_clean == NUM_CLEAN:
            self._holds = scale

    def overflow(self, scale: float) -> bool:
        """An overflow at ``scale``: whether it is one of the search."""
        if scale != self._scale:
            self._move(scale)
        self._num_clean = 0
        self._num_overflows += 1
        self._fails = min(self._fails, scale)
        may_fail = scale > self._holds or self._is_known_to_fail
        return may_fail and scale > self._settings.floor and self._num_overflows <= self._settings.hysteresis

    def end(self, scale: float) -> None:
        """A step with overflows has ended at ``scale``. Up from a lower one it has not grown: a replay was undone."""
        if scale != self._scale:
            self._start(scale)

    def _move(self, scale: float) -> None:
        has_grown = scale > self._scale > 0.0
        if has_grown:
            self._holds = self._scale
            if self._scale >= self._fails:
                self._fails = math.inf
        elif self._scale == 0.0 and self._is_resumed:
            self._holds = scale / self._settings.growth
        self._is_known_to_fail = has_grown and scale >= self._fails
        self._start(scale)
