"""The log of a run: JSON lines in ``FOLDER/rank-00000.jsonl``, appended by a thread so that no disk holds up a step."""

from __future__ import annotations

import json
import os
import queue
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from halfstep.watch.entry import Entry
from halfstep.watch.settings import Exporter


class Log:
    """Appends entries to the file of one rank, and hands them to exporters, from a thread of its own.

    folder:  of the run; made if it is not there. HalfstepError if it cannot be written, or if another process that
             lives writes there.
    on_lost: called from the thread with one line when the log or an exporter is lost, once each.
    on_idle: called from the thread about once a second.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        rank: int,
        on_lost: Callable[[str], None],
        on_idle: Callable[[], None],
        exporters: Sequence[Exporter] = (),
    ) -> None:
        # A first, plain version: the faults of a disk are still to come.
        Path(folder).mkdir(parents=True, exist_ok=True)
        self._file = open(file_of(folder, rank), "a", encoding="utf-8")  # noqa: SIM115
        self._queue: queue.SimpleQueue[Entry | None] = queue.SimpleQueue()
        self._exporters, self._on_idle = exporters, on_idle
        self._thread = threading.Thread(target=self._run, name="halfstep log", daemon=True)
        self._thread.start()

    def put(self, entry: Entry) -> None:
        """Write ``entry`` soon. Never blocks, never raises."""
        self._queue.put(entry)

    def close(self, timeout_s: float = 5.0) -> None:
        """Write what is left, for ``timeout_s`` at most. Safe to call twice."""
        self._queue.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            try:
                entry = self._queue.get(timeout=1.0)
            except queue.Empty:
                self._file.flush()
                self._on_idle()
                continue
            if entry is None:
                break
            self._file.write(json.dumps(entry, separators=(",", ":"), allow_nan=False) + "\n")
            for exporter in self._exporters:
                exporter.write(entry)
        self._file.close()


def file_of(folder: str | os.PathLike[str], rank: int) -> Path:
    """The file of a rank."""
    return Path(folder) / f"rank-{rank:05d}.jsonl"
