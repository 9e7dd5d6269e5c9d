"""SIGTERM, by which torchrun ends the ranks when one of them has ended: the log says why, and the script ends."""

from __future__ import annotations

import os
import signal
import socket
import threading
from contextlib import suppress
from types import FrameType

from halfstep.ranks.fault import end_process, fault_at_stop
from halfstep.ranks.progress import Progress

GRACE_S = 10.0
"""How long a script that got the signal may wait in a call that no signal reaches. torchrun kills after 30 s."""


class Stop:
    """Takes SIGTERM, where nobody else does: by SystemExit in the script, or by force in a thread.

    The signal's handler runs in the script's thread, between two of its operations. Where that waits for a device or
    in a collective it may never come to it, so a thread is told of the signal as well.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._pid = os.getpid()
        self._has_come = threading.Event()  # to the script
        self._limit_s: float | None = None
        self._ends, self._wakes = socket.socketpair()
        threading.Thread(target=self._work, name="halfstep stop", daemon=True).start()
        is_main = threading.current_thread() is threading.main_thread()
        if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            return
        self._wakes.setblocking(False)
        self._wake(True)
        signal.signal(signal.SIGTERM, self._handle)
        os.register_at_fork(
            before=lambda: self._wake(False), after_in_parent=lambda: self._wake(True), after_in_child=_forget
        )

    def _wake(self, wakes: bool) -> None:
        """Whether the thread is told of signals; not by a process that is being forked, whose signals are its own."""
        with suppress(ValueError):  # only the script's thread can say that
            file = self._wakes.fileno()
            before = signal.set_wakeup_fd(file if wakes else -1, warn_on_full_buffer=False)
            if before not in (-1, file):  # an event loop's
                signal.set_wakeup_fd(before)

    def after(self, seconds: float) -> None:
        """End the process by force if it still lives then."""
        with suppress(OSError):
            self._limit_s = seconds
            self._wakes.send(b"\0")

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a process that was forked just now
            _forget()
            os.kill(os.getpid(), number)
            return
        if self._progress.fault is None:
            reason = self._reason(frame)
            self._progress.say(reason, is_victim=True)
            self._progress.end(reason)
            self._has_come.set()
            # Its text goes to standard error, and the status is 1.
            raise SystemExit(f"[rank{self._progress.rank}]: {reason}")
        self._has_come.set()  # the script ends by that fault

    def _reason(self, frame: FrameType | None) -> str:
        own = self._progress.place
        at = "" if frame is None else f", at {os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
        fault = fault_at_stop(self._progress)
        stopped = f"stopped by SIGTERM {own.where}{at}"
        return stopped if fault is None else f"HalfstepError: {fault}"

    def _work(self) -> None:
        while number := self._ends.recv(1):
            if number == b"\0":
                threading.Event().wait(self._limit_s)
                os._exit(1)
            if number[0] == signal.SIGTERM and not self._has_come.wait(GRACE_S):
                end_process(self._progress, self._reason(None))


def _forget() -> None:
    """In a forked process, as a worker of a data loader is one: a signal ends it as any other."""
    with suppress(ValueError):
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
