"""Slow plain twin of the dynamic loss scale: floats and ifs, one verdict at a time, no tensor."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Scaler:
    """``hysteresis`` overflows in a row lower the scale, ``interval`` clean steps in a row raise it."""

    scale: float = 2.0**16
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000
    floor: float = 1.0
    ceiling: float = 2.0**24
    hysteresis: int = 1
    num_clean: int = 0
    num_overflows: int = 0

    def update(self, overflowed: bool) -> None:
        if overflowed:
            self.num_clean = 0
            self.num_overflows += 1
            if self.num_overflows >= self.hysteresis:
                self._lower()
        else:
            self.num_overflows = 0
            self.num_clean += 1
            if self.num_clean == self.interval:
                self.num_clean = 0
                self.scale = self.scale * self.growth
                if self.scale > self.ceiling:
                    self.scale = self.ceiling

    def back_off(self) -> float | None:
        """What a replay does: lower at once, whatever the count; None when the floor is reached."""
        before = self.scale
        self._lower()
        if self.scale == before:
            return None
        self.num_clean = 0
        return self.scale / before

    def is_exhausted(self) -> bool:
        """Whether an overflow now would lower the scale if it could."""
        return self.scale <= self.floor and self.num_overflows + 1 >= self.hysteresis

    def _lower(self) -> None:
        self.scale = self.scale * self.backoff
        if self.scale < self.floor:
            self.scale = self.floor
