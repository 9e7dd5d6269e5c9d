"""How a dynamic loss scale finds its place: the overflows that belong to it, told from those that are a fault."""

from __future__ import annotations

from halfstep.policy import LossScale


class Calibration:
    """Overflows that a lower scale mends are calibration until the scale has first survived its growth interval.

    After that, only the first one in the step that follows a growth is: the scale has tried what it could not know.
    A static scale, or none, has no calibration. num_overflows: how many there were.
    """

    def __init__(self, settings: LossScale) -> None:
        self.settings = settings
        self.num_overflows = 0
        self._num_clean = 0
        self._has_settled = False
        self._has_just_grown = False

    def takes(self) -> bool:
        """An overflow that a lower scale mends: whether it is calibration. It starts the count of clean steps anew."""
        is_calibration = self.settings.kind == "dynamic" and (not self._has_settled or self._has_just_grown)
        self._num_clean, self._has_just_grown = 0, False
        self.num_overflows += is_calibration
        return is_calibration

    def applied(self) -> None:
        """A window was applied."""
        self._num_clean += 1
        self._has_just_grown = self._num_clean == self.settings.interval
        if self._has_just_grown:
            self._has_settled, self._num_clean = True, 0
