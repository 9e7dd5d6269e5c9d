"""The way of a log's entries to one exporter: a thread of its own, so that no tool that hangs holds up the log."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import suppress

from halfstep.report import count_text
from halfstep.watch.entry import Entry, Step
from halfstep.watch.settings import Exporter

MOST_WAITING = 10_000
"""Entries that wait for an exporter; of more, the last."""


class Feed:
    """Hands entries to ``exporter`` in their order, and ends it after the last. One that raises gets nothing more.

    name: of the exporter, in messages. say: called from a thread with what people have to know.
    """

    def __init__(self, exporter: Exporter, say: Callable[[str], None]) -> None:
        self.name = f"exporter {type(exporter).__name__}"
        self._exporter, self._say = exporter, say
        self._queue: queue.SimpleQueue[Entry | Step | None] = queue.SimpleQueue()
        self._num_lost = 0
        self._is_taking = True
        self._thread = threading.Thread(target=self._work, name=f"halfstep {self.name}", daemon=True)
        self._thread.start()

    def put(self, entry: Entry | Step) -> None:
        """Hand ``entry`` on soon. Never blocks, never raises; for one thread alone, like :meth:`end`."""
        if not self._is_taking:
            return
        self._queue.put(entry)
        if self._queue.qsize() > MOST_WAITING:
            with suppress(queue.Empty):
                self._queue.get_nowait()
                self._num_lost += 1
            self._say(f"{self.name} is too slow: of the entries that wait for it, the last {MOST_WAITING} are kept")

    def end(self) -> None:
        """No entry comes any more."""
        self._queue.put(None)

    def join(self, timeout_s: float) -> bool:
        """Whether the exporter has ended, after ``timeout_s`` at most. In its own thread, nobody waits."""
        if threading.current_thread() is not self._thread:
            self._thread.join(max(0.0, timeout_s))
            return not self._thread.is_alive()
        return True

    # The rest runs in the thread.

    def _work(self) -> None:
        try:
            while (entry := self._queue.get()) is not None:
                self._exporter.write(entry.to_entry() if isinstance(entry, Step) else entry)
        except BaseException as error:
            self._is_taking = False
            self._queue = queue.SimpleQueue()  # what waits is for nobody
            self._say(f"{self.name}, which gets nothing more, failed with {type(error).__name__}: {error}")
            with suppress(BaseException):
                self._exporter.close()
            return
        if self._num_lost:
            self._say(f"{self.name} was too slow: it has missed {count_text(self._num_lost, 'line')} of the log")
        try:
            self._exporter.close()
        except BaseException as error:
            self._say(f"the end of {self.name} failed with {type(error).__name__}: {error}")
