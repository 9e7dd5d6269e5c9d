"""One process that writes to a run: its entries to the guard, the log and the exporters, its alerts to people."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from halfstep.events import Alert
from halfstep.watch.entry import Entry, RunStart, Step
from halfstep.watch.exporters import exporter_of
from halfstep.watch.golden import read_band
from halfstep.watch.guard import Guard
from halfstep.watch.log import Log
from halfstep.watch.notify import Notifier
from halfstep.watch.settings import Watch

logger = logging.getLogger("halfstep")


class Session:
    """Judges and keeps the entries of one process, in the order in which they come.

    log:      folder of the run, or None to keep nothing. on_alert: called with every alert of the guard.
    Alerts also go to Python's logger ``halfstep``, to the log, and on rank 0 to the targets of ``settings``.
    """

    def __init__(
        self, run: RunStart, settings: Watch, log: str | os.PathLike[str] | None, on_alert: Callable[[Alert], None]
    ) -> None:
        self.guard = Guard(run, settings, read_band(settings.golden) if settings.golden else None)
        self.rank = run.rank
        self._on_alert = on_alert
        self._lock = threading.Lock()  # the log's thread asks the guard too, while the run is silent
        name = "run" if log is None else Path(log).resolve().name
        self._notifier = Notifier(settings.notify, name) if settings.notify and self.rank == 0 else None
        exporters = [exporter_of(e, name) if isinstance(e, str) else e for e in settings.exporters]
        self._log = None if log is None else Log(log, run.rank, self._lost, self._tick, exporters)
        self._is_open = True
        self._put(run.to_entry())

    def see(self, entry: Entry | Step) -> None:
        """Keep ``entry`` and judge it."""
        self._put(entry.to_entry() if isinstance(entry, Step) else entry)
        with self._lock:
            alerts = self.guard.see(entry)
        for alert in alerts:
            self.alert(alert)

    def alert(self, alert: Alert) -> None:
        """Tell ``alert`` to everybody."""
        logger.warning("step %d, rank %d, %s: %s. %s", alert.step, alert.rank, alert.rule, alert.message, alert.action)
        self._put({"kind": "alert", "time": time.time(), **alert.to_dict()})
        if self._notifier:
            self._notifier.put(alert)
        self._on_alert(alert)

    def close(self, reason: str | None = None) -> None:
        """End the session, with the ``reason`` of one that failed. Safe to call twice."""
        if not self._is_open:
            return
        self._is_open = False
        state = {"state": "finished"} if reason is None else {"state": "failed", "reason": reason}
        self._put({"kind": "end", "time": time.time(), **state})
        if self._log:
            self._log.close()
        if self._notifier:
            self._notifier.close()

    def _put(self, entry: Entry) -> None:
        if self._log:
            self._log.put(entry)

    def _tick(self) -> None:
        with self._lock:
            alerts = self.guard.tick(time.time())
        for alert in alerts:
            self.alert(alert)

    def _lost(self, line: str) -> None:
        logger.warning("%s", line)
