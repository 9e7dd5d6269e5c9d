"""One process that writes to a run: its entries to the guard, the log and the exporters, its alerts to people."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

from halfstep.errors import HalfstepError
from halfstep.events import Alert
from halfstep.watch.entry import Entry, RunStart, Step
from halfstep.watch.exporters import exporter_of
from halfstep.watch.golden import read_band
from halfstep.watch.guard import Guard
from halfstep.watch.log import Log
from halfstep.watch.notify import Notifier
from halfstep.watch.settings import Watch

logger = logging.getLogger("halfstep")
T = TypeVar("T")


class Session:
    """Judges and keeps the entries of one process, in the order in which they come.

    log:      folder of the run, or None to keep nothing, with no thread of its own.
    on_alert: gives who is told of an alert that comes from the log's thread, over a run that is silent; None where
              nobody is left. The others are given back to the caller.
    on_lost:  called from the log's thread with one line when the log or an exporter is lost.
    Alerts also go to Python's logger ``halfstep``, to the log, and on rank 0 to the targets of ``settings``.

    HalfstepError for settings, targets, exporters or a folder that cannot work. Later faults are logged, and stop
    nothing.
    """

    def __init__(
        self,
        run: RunStart,
        settings: Watch,
        log: str | os.PathLike[str] | None,
        on_alert: Callable[[], Callable[[Alert], None] | None],
        on_lost: Callable[[str], None] = logger.warning,
    ) -> None:
        if settings.exporters and log is None:
            raise HalfstepError(
                f"exporters={list(settings.exporters)} without a log",
                "the thread that writes the log feeds them",
                "Name a folder with log=.",
            )
        self.guard = Guard(run, settings, read_band(settings.golden) if settings.golden else None)
        self.rank = run.rank
        self._on_alert = on_alert
        # The log's thread asks the guard too, while the run is silent; and a signal's handler may come in between.
        self._lock = threading.RLock()
        self._is_open = True
        self._is_judging = True
        self._notifier: Notifier | None = None
        self._log: Log | None = None
        name = "run" if log is None else Path(log).resolve().name
        with ExitStack() as made:
            if settings.notify and self.rank == 0:
                self._notifier = Notifier(settings.notify, name)
                made.callback(self._notifier.close)
            exporters = []
            for word in settings.exporters:
                if not isinstance(word, str):
                    exporters.append(word)
                elif self.rank == 0:
                    exporters.append(exporter_of(word, name))
                    made.callback(exporters[-1].close)
            if log is not None:
                with self._lock:  # its thread may ask the guard at once, and the run's line is the first
                    self._log = Log(log, run.rank, on_lost, self._tick, exporters)
                    self._log.put(run.to_entry())
            made.pop_all()

    @property
    def is_kept(self) -> bool:
        """Whether somebody keeps or gets what the session is told."""
        return self._log is not None or self._notifier is not None

    @property
    def lowers_scale(self) -> bool:
        """Whether the guard asks for a lower loss scale."""
        return self._is_open and self._is_judging and self.guard.lowers_scale

    def see(self, entry: Entry | Step) -> list[Alert]:
        """Keep ``entry`` and judge it: its alerts, which the caller may tell on."""
        with self._lock:
            self._put(entry)
            alerts = self._judge(self.guard.see, entry)
        self._tell(alerts)
        return alerts

    def alert(self, alert: Alert) -> None:
        """Keep an ``alert`` of the caller's own, and tell it to people."""
        self._keep(alert)
        self._tell([alert])

    def close(self, reason: str | None = None) -> None:
        """End the session, with the ``reason`` of one that failed. Safe to call twice."""
        with self._lock:
            if not self._is_open:
                return
            self._is_open = False
            state = {"state": "finished"} if reason is None else {"state": "failed", "reason": reason}
            self._put({"kind": "end", "time": time.time(), **state})
        if self._log:
            self._log.close()
        if self._notifier:
            self._notifier.close()

    def _put(self, entry: Entry | Step) -> None:
        if self._log:
            self._log.put(entry)

    def _judge(self, judge: Callable[[T], list[Alert]], what: T) -> list[Alert]:
        """The guard's alerts, which are in the log then. A guard that fails says so once, and judges no more."""
        if not (self._is_open and self._is_judging):
            return []
        try:
            alerts = judge(what)
        except Exception:
            self._is_judging = False
            logger.exception("the guard has a fault of its own and judges no more; the run and its log go on")
            return []
        for alert in alerts:
            self._keep(alert)
        return alerts

    def _keep(self, alert: Alert) -> None:
        self._put({"kind": "alert", "time": time.time(), **alert.to_dict()})

    def _tell(self, alerts: Sequence[Alert]) -> None:
        for alert in alerts:
            what = " ".join(f"{alert.message.rstrip('. ')}. {alert.action}".split())
            logger.warning("step %d, rank %d, %s: %s", alert.step, alert.rank, alert.rule, what)
            if self._notifier:
                self._notifier.put(alert)

    def _tick(self) -> None:
        with self._lock:
            alerts = self._judge(self.guard.tick, time.time())
        self._tell(alerts)
        tell = self._on_alert()
        for alert in alerts:
            try:
                if tell is not None:
                    tell(alert)
            except Exception:
                logger.exception("a sink failed with the alert %s", alert.rule)
