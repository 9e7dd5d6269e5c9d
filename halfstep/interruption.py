"""Ctrl-C where several ranks train together: noted when it comes, and raised on all of them in the same step."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

import torch

from halfstep.share import num_ranks
from halfstep.stepper import Stepper


class Interruption:
    """While it is open, Ctrl-C waits for :meth:`check`; in one process it comes at once, as always.

    A rank that left a step alone would leave the others in a collective. torchrun hands Ctrl-C on to every rank and
    gives them half a minute.
    """

    def __init__(self) -> None:
        self._is_noted = False
        self._before: Any = None
        self._asked: torch.Tensor | None = None

    def __enter__(self) -> Self:
        if num_ranks() > 1 and threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._is_noted = True

    def check(self, stepper: Stepper) -> None:
        """Raise KeyboardInterrupt if any rank had noted one at the check before; all call it, once a step.

        What the check before asked is read here, so that a device is not waited for while it has work.
        """
        if stepper.ranks.num == 1:
            return
        asked, noted = self._asked, torch.tensor(float(self._is_noted), device=stepper.region.device)
        self._asked = stepper.ranks.highest(noted)
        if asked is not None and asked.item():
            raise KeyboardInterrupt
