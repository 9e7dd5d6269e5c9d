"""Ctrl-C where several ranks train together: noted when it comes, and raised on all of them in the same step."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

import torch

from halfstep.share import num_ranks
from halfstep.stepper import Stepper


class Interruption:
    """While it is open, Ctrl-C waits for :meth:`check` or :meth:`is_asked`; in one process it comes at once, as always.

    waits_alone: whether it waits in one process too, which it says; a second Ctrl-C then comes at once. SIGTERM, with
    which a cluster takes a machine back, waits like it. Of several ranks it ends each, as torchrun means it.

    A rank that left a step alone would leave the others in a collective. torchrun hands Ctrl-C on to every rank and
    gives them half a minute.
    """

    def __init__(self, waits_alone: bool = False) -> None:
        self._waits_alone, self._is_noted = waits_alone, False
        self._before: dict[int, Any] = {}
        self._asked: torch.Tensor | None = None

    def __enter__(self) -> Self:
        if (self._waits_alone or num_ranks() > 1) and threading.current_thread() is threading.main_thread():
            waiting = (signal.SIGINT, signal.SIGTERM) if num_ranks() == 1 else (signal.SIGINT,)
            self._before = {number: signal.signal(number, self._note) for number in waiting}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._is_noted and num_ranks() == 1:
            raise KeyboardInterrupt
        self._is_noted = True
        if num_ranks() == 1:
            os.write(2, b"\nhalfstep: stopping after this step; once more stops at once\n")  # as a handler may

    def check(self, stepper: Stepper) -> None:
        """Raise KeyboardInterrupt where :meth:`is_asked`."""
        if self.is_asked(stepper):
            raise KeyboardInterrupt

    def is_asked(self, stepper: Stepper) -> bool:
        """Whether any rank had noted one at the time before; all call it, once a step.

        What the time before asked is read here, so that a device is not waited for while it has work.
        """
        if stepper.ranks.num == 1:
            return self._is_noted
        asked, noted = self._asked, torch.tensor(float(self._is_noted), device=stepper.region.device)
        self._asked = stepper.ranks.highest(noted)
        return asked is not None and bool(asked.item())
