"""Alerts to people: over apprise, a plain webhook or a command, from threads, so that no target holds up a step."""

from __future__ import annotations

import logging
import os
import platform
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from halfstep.events import Alert
from halfstep.report import Cell, Report, Sheet, Table, count_text
from halfstep.watch.targets import Message, NotSentError, Target, target_of

logger = logging.getLogger("halfstep")

PAUSES_S = (1.0, 5.0, 25.0)
"""Before another try to send a message."""
TIMEOUT_S = 30.0
"""Of one try."""
RULE_PAUSE_S = 600.0
"""Between two messages of a rule and a severity to a target: what gets worse is told at once."""
MOST_AN_HOUR = 20
"""Messages to a target."""
_MOST_WAITING = 100
_HOUR_S = 3600.0


class Notifier:
    """Sends alerts to ``targets``, as halfstep.watch.settings.Watch.notify describes them.

    HalfstepError for a target that cannot be read, or whose package or environment variable is missing; no message
    of ours ever holds a secret. run: the name of the run, for the title.

    A message that does not arrive is tried again after each of ``pauses_s``; a target that fails is reported once to
    the logger ``halfstep``, until it works again. What is too much for a target (RULE_PAUSE_S, MOST_AN_HOUR by
    ``clock``) is counted, and told in its next message or at the end.
    """

    def __init__(
        self,
        targets: Sequence[str],
        run: str,
        pauses_s: Sequence[float] = PAUSES_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lines = [_Line(target_of(target), run, pauses_s, clock) for target in targets]
        self._pid = os.getpid()
        self._is_open = True

    def put(self, alert: Alert) -> None:
        """Send it soon. Never blocks, never raises."""
        if self._is_open and os.getpid() == self._pid:  # a forked process has none of the threads
            for line in self._lines:
                line.put(alert)

    def close(self, timeout_s: float = 5.0) -> None:
        """Send what is left, for ``timeout_s`` at most. Safe to call twice."""
        if not self._is_open or os.getpid() != self._pid:
            return
        self._is_open = False
        deadline = time.monotonic() + timeout_s
        for line in self._lines:
            line.end(deadline)
        for line in self._lines:
            line.join()


class _Line:
    """The way to one target: what waits for it, and the thread that sends."""

    def __init__(self, target: Target, run: str, pauses_s: Sequence[float], clock: Callable[[], float]) -> None:
        self._target, self._run, self._pauses_s, self._clock = target, run, pauses_s, clock
        self._queue: queue.SimpleQueue[tuple[Alert, float] | None] = queue.SimpleQueue()
        self._held: Counter[str] = Counter()
        self._lock = threading.RLock()  # a watcher that is collected in the middle may put, too
        self._thread: threading.Thread | None = None
        self._times: deque[float] = deque(maxlen=MOST_AN_HOUR)
        self._time_of: dict[tuple[str, str], float] = {}
        self._is_failing = False
        self._is_ending = threading.Event()
        self._deadline = float("inf")

    def put(self, alert: Alert) -> None:
        with self._lock:
            if self._queue.qsize() >= _MOST_WAITING:
                self._held[alert.rule] += 1
                return
            self._queue.put((alert, self._clock()))
            if self._thread is None:
                thread = threading.Thread(target=self._work, name="halfstep notify", daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # the interpreter ends: join() does it
                    return
                self._thread = thread

    def end(self, deadline: float) -> None:
        """Send what is left without pauses, until ``deadline`` by time.monotonic()."""
        self._deadline = deadline
        self._is_ending.set()
        self._queue.put(None)

    def join(self) -> None:
        """Wait for the end, until the deadline."""
        if self._thread is None:
            self._work()
            return
        self._thread.join(max(0.0, self._deadline - time.monotonic()))
        if self._thread.is_alive():
            # One is on its way, and one in the queue is the end.
            left = count_text(self._queue.qsize() + self._held.total(), "alert")
            logger.warning("target %s: %s did not arrive before the end", self._target.name, left)

    def _work(self) -> None:
        last = None
        while (item := self._queue.get()) is not None:
            last, now = item
            if self._is_too_much(last, now):
                self._hold(last.rule)
            elif self._send(last):
                self._time_of[last.rule, last.severity] = now
                self._times.append(now)
        if last is not None and self._held:
            text = f"{count_text(self._held.total(), 'alert')} did not arrive, or came too close together to be sent"
            self._send(Alert("held-back", last.step, "note", text, "Look at the run's log.", last.rank))

    def _is_too_much(self, alert: Alert, now: float) -> bool:
        is_full = len(self._times) == MOST_AN_HOUR and now - self._times[0] < _HOUR_S
        told = self._time_of.get((alert.rule, alert.severity), float("-inf"))
        return is_full or now - told < RULE_PAUSE_S

    def _hold(self, rule: str) -> None:
        with self._lock:
            self._held[rule] += 1

    def _send(self, alert: Alert) -> bool:
        """Whether it arrived, with what was held back before it."""
        with self._lock:
            held = Counter(self._held)
        fault = self._try(message_of(alert, self._run, held))
        if fault is None:
            self._is_failing = False
            with self._lock:
                self._held -= held
            return True
        self._hold(alert.rule)
        if not self._is_failing:
            self._is_failing = True
            logger.warning("target %s: an alert did not arrive: %s", self._target.name, fault)
        return False

    def _try(self, message: Message) -> str | None:
        """None if it arrived, else why the last try failed."""
        for pause_s in (*self._pauses_s, None):
            timeout_s = min(TIMEOUT_S, self._deadline - time.monotonic())
            if timeout_s <= 0:
                return "no time was left"
            fault = _fault(self._target, message, timeout_s)
            if fault is None or pause_s is None or self._is_ending.is_set():
                break
            self._is_ending.wait(pause_s)
        return fault


def _fault(target: Target, message: Message, timeout_s: float) -> str | None:
    """None if ``message`` arrived, else why not, in one line without a secret."""
    try:
        target.send(message, timeout_s)
    except NotSentError as error:
        return str(error)
    except Exception as error:  # a fault of ours or of a library ends no thread, and its words may hold the URL
        return type(error).__name__
    return None


def message_of(alert: Alert, run: str, held: Mapping[str, int]) -> Message:
    """What people read of ``alert``. held: how many alerts of each rule were not sent since the last message."""
    host = platform.node()
    title = f"halfstep: {run}, step {alert.step}, rank {alert.rank}: {alert.rule} ({alert.severity})"
    lines = [f"{alert.message.rstrip('.')}.", alert.action, f"Host: {host}"]
    if held:
        lines.append(f"Not sent since the last message: {', '.join(f'{n} {rule}' for rule, n in sorted(held.items()))}")
    facts = {"run": run, "host": host, **alert.to_dict(), "held_back": dict(held)}
    return Message(" ".join(title.split()), "\n".join(lines), facts)


@dataclass(frozen=True)
class NotifyReport(Report):
    """Whether a message arrived. faults: for each target, by the name that it goes by, None or why not."""

    faults: Sequence[tuple[str, str | None]]

    @property
    def found(self) -> bool:
        return any(fault is not None for _, fault in self.faults)

    def sheet(self) -> Sheet:
        num_good = sum(fault is None for _, fault in self.faults)
        rows = [
            (name, Cell("arrived", "good") if fault is None else Cell("failed", "bad"), fault or "")
            for name, fault in self.faults
        ]
        headline = f"The message arrived at {num_good} of {count_text(len(rows), 'target')}."
        return Sheet(headline, tables=[Table(("target", "message", "why"), rows)])

    def to_dict(self) -> dict[str, Any]:
        return {"targets": [{"target": n, "arrived": f is None, "why": f} for n, f in self.faults]}


def send_test(targets: Sequence[str]) -> NotifyReport:
    """Send one message to each of ``targets``. HalfstepError for one that cannot be read, before anything is sent."""
    alert = Alert("test", 0, "note", "This is a test of halfstep watch notify", "Nothing is to be done.")
    message = message_of(alert, "test", {})
    known = [target_of(text) for text in targets]
    return NotifyReport([(target.name, _fault(target, message, TIMEOUT_S)) for target in known])
