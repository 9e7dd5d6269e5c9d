"""The log of a run: JSON lines in ``FOLDER/rank-00000.jsonl``, appended by a thread so that no disk holds up a step."""

from __future__ import annotations

import atexit
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path

from halfstep.errors import HalfstepError
from halfstep.report import count_text
from halfstep.watch.appender import Appender
from halfstep.watch.entry import Entry, Step, line_of
from halfstep.watch.feed import Feed
from halfstep.watch.settings import Exporter

MOST_KEPT = 100_000
"""Entries that wait for a disk; of more, the last."""
MOST_BYTES = 2**26
"""Of the lines that wait for a disk; of more, the last."""
_MOST_AT_ONCE = 1000
"""Lines in one write."""
_BEAT_S = 1.0
"""Between two tries to write a file that was lost, and between two looks at a run that may be silent."""
_GATHER_S = 0.05
"""From an entry to its write, which takes along what comes meanwhile: the thread wakes seldom, and writes once."""
_open: dict[Path, Log] = {}
"""The logs of this process."""


class Log:
    """Appends entries to the file of one rank from a thread of its own, and hands them on to those of the exporters.

    folder:  of the run; made if it is not there. HalfstepError if it cannot be written, or if another process that
             lives writes there. A log of this process for the same file ends.
    on_lost: called with one line when the log or an exporter is lost, once for each reason.
    on_idle: called from the thread about once a second.

    While the file cannot be written, the last MOST_KEPT entries wait, with lines of MOST_BYTES at most, and a ``gap``
    will tell how many did not.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        rank: int,
        on_lost: Callable[[str], None],
        on_idle: Callable[[], None],
        exporters: Sequence[Exporter] = (),
    ) -> None:
        self._path = file_of(Path(folder).resolve(), rank)
        self._on_lost, self._on_idle = on_lost, on_idle
        self._said: set[str] = set()
        self._queue: queue.SimpleQueue[Entry | Step | None] = queue.SimpleQueue()
        self._run_entry: Entry | None = None
        self._owes_run = False  # whether its line is still to be written
        self._lines: deque[bytes] = deque()
        self._num_bytes = 0  # in those lines
        self._num_lost = 0
        self._lost_lock = threading.RLock()
        self._is_ours = True  # until another process takes the file, after it was lost
        if earlier := _open.get(self._path):
            earlier.close()
            earlier._say("a second log of this process writes it from now on; what this one is told is not kept")
        self._file = Appender(self._path)
        try:
            self._file.open()
        except OSError as error:
            raise HalfstepError(
                f"log {self._path}", f"it cannot be written ({error.strerror})", "Name a folder that can be written."
            ) from None
        self._is_open = True
        _open[self._path] = self
        self._feeds = [Feed(exporter, self._say) for exporter in exporters]
        self._thread = threading.Thread(target=self._work, name="halfstep log", daemon=True)
        self._thread.start()

    def put(self, entry: Entry | Step) -> None:
        """Write ``entry`` soon. Never blocks, never raises; after the end nothing is kept."""
        if not self._is_open:
            return
        self._queue.put(entry)
        if self._queue.qsize() > MOST_KEPT:  # the thread is held up by a write that does not return
            with self._lost_lock, suppress(queue.Empty):
                self._queue.get_nowait()
                self._num_lost += 1

    def close(self, timeout_s: float = 5.0) -> None:
        """Write what is left, and then end the exporters, for ``timeout_s`` at most in all. Safe to call twice."""
        if not self._is_open:
            return
        self._is_open = False
        del _open[self._path]
        self._queue.put(None)
        if threading.current_thread() is self._thread:
            return  # who held the log was collected here
        deadline = time.monotonic() + timeout_s
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._say(f"its last lines were not written within {timeout_s:g} s, and nobody waits for them")
            return  # the exporters have not had them
        for feed in self._feeds:
            if not feed.join(deadline - time.monotonic()):
                self._say(f"{feed.name} has not ended within {timeout_s:g} s; what it had not taken yet is lost")

    def _forget(self) -> None:
        """In a forked process: the file is its parent's, and so is the thread."""
        self._is_open = False
        self._file.close()

    # The rest runs in the thread.

    def _work(self) -> None:
        due = time.monotonic() + _BEAT_S
        while self._is_open or not self._queue.empty():
            entries = self._gather(max(0.0, due - time.monotonic()))
            if self._file.is_open:
                self._write()
            for feed in self._feeds:
                for entry in entries:
                    feed.put(entry)
            if time.monotonic() >= due:
                due = time.monotonic() + _BEAT_S
                self._write()
                self._look()
            self._trim()
        self._write()
        if self._is_ours and (num_left := len(self._lines) + self._num_lost):
            self._say(f"its last {count_text(num_left, 'line')} could not be written")
        self._file.close()
        for feed in self._feeds:
            feed.end()

    def _gather(self, longest_s: float) -> list[Entry | Step]:
        """Take in what has come, after ``longest_s`` at most."""
        entries: list[Entry | Step] = []
        with suppress(queue.Empty):
            self._take(self._queue.get(timeout=longest_s), entries)
            if self._is_open:
                time.sleep(_GATHER_S)
            while len(entries) < _MOST_AT_ONCE:
                self._take(self._queue.get_nowait(), entries)
        return entries

    def _take(self, entry: Entry | Step | None, entries: list[Entry | Step]) -> None:
        if entry is None:
            return
        entries.append(entry)
        if isinstance(entry, dict) and entry["kind"] == "run":
            self._run_entry, self._owes_run = entry, True
        elif (line := self._line_of(entry)) and self._is_ours:
            self._lines.append(line)
            self._num_bytes += len(line)

    def _trim(self) -> None:
        """Keep the last of the lines that the file has not taken."""
        while len(self._lines) > MOST_KEPT or self._num_bytes > MOST_BYTES:
            self._drop_first()
            with self._lost_lock:
                self._num_lost += 1

    def _drop_first(self) -> None:
        self._num_bytes -= len(self._lines.popleft())

    def _line_of(self, entry: Entry | Step) -> bytes:
        try:
            return line_of(entry).encode()
        except (TypeError, ValueError, RecursionError) as error:
            kind = "step" if isinstance(entry, Step) else entry["kind"]
            self._say(f"an entry of kind {kind} is left out, since JSON cannot hold it: {error}")
            return b""

    def _write(self) -> None:
        """Write the lines that wait, as far as the file takes them."""
        while self._is_ours and (self._owes_run or self._lines or self._num_lost):
            try:
                if self._file.is_open and self._file.is_gone():
                    self._file.close()
                    self._say("it was deleted or moved; the run goes on in a new one")
                if not self._file.is_open:
                    self._file.open()
                num_lost = self._num_lost
                first = self._first_lines(num_lost)
                num_written, fault = self._file.write([*first, *islice(self._lines, _MOST_AT_ONCE)])
            except OSError as error:
                fault, first, num_lost, num_written = error, [], 0, 0
            except HalfstepError as error:
                self._is_ours = False
                self._lines.clear()
                self._num_bytes = 0
                self._say(f"{error.why}; this run keeps no log any more")
                return
            if num_written:
                self._owes_run = False
            if num_written >= len(first):
                with self._lost_lock:
                    self._num_lost -= num_lost
            for _ in range(num_written - len(first)):
                self._drop_first()
            if fault is not None:
                self._say(f"{fault.strerror}; the run goes on, and its log as soon as it can be written")
                return

    def _first_lines(self, num_lost: int) -> list[bytes]:
        """What comes before the lines that wait: the run's line, also in a file made anew, and a gap."""
        now = time.time()
        lines = []
        if self._run_entry and (self._owes_run or self._file.is_empty):
            lines.append(self._line_of(self._run_entry if self._owes_run else {**self._run_entry, "time": now}))
        if num_lost:
            lines.append(self._line_of({"kind": "gap", "time": now, "num_lost": num_lost}))
        return lines

    def _look(self) -> None:
        try:
            self._on_idle()
        except BaseException as error:
            self._say(f"the look at a run that may be silent failed with {type(error).__name__}: {error}")

    def _say(self, what: str) -> None:
        line = " ".join(f"log {self._path}: {what}".split())
        if line not in self._said:
            self._said.add(line)
            with suppress(Exception):
                self._on_lost(line)


def file_of(folder: str | os.PathLike[str], rank: int) -> Path:
    """The file of a rank."""
    return Path(folder) / f"rank-{rank:05d}.jsonl"


@atexit.register
def _close_all() -> None:
    for log in list(_open.values()):
        log.close()


def _forget_all() -> None:
    for log in _open.values():
        log._forget()
    _open.clear()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_forget_all)
