"""The index of one rank of a run: what a page asks of a log, answered without reading it again."""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
import stat
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, get_args

from halfstep.errors import HalfstepError
from halfstep.watch import metrics
from halfstep.watch.entry import Entry
from halfstep.watch.index import Index
from halfstep.watch.intake import Intake, Progress
from halfstep.watch.layers import layers
from halfstep.watch.log import file_of
from halfstep.watch.reading import Tail, open_log, ranks_of
from halfstep.watch.rule import Severity
from halfstep.watch.run_state import State, state_of

_CHUNK = 256 * 1024
"""Bytes of a log that are taken in before the clock is looked at."""
_LONGEST_TURN_S = 0.2
"""Seconds of a transaction, after which other processes have their turn."""
_PRINT = 4096
"""Bytes at the start of a log, and before the first that is new, by which it is known again."""
_MOST = 2**62
_ALERTS = (
    "SELECT json_extract(content, '$.rule'), json_extract(content, '$.severity'), count(*) FROM entries "
    "WHERE kind = 'alert' GROUP BY 1, 2 ORDER BY 1, 2"
)
"""Rule, severity and how often."""
_WORST_FIRST = get_args(Severity)
T = TypeVar("T")


class Store:
    """What the log of a rank says, as a page asks for it; :meth:`update` takes in what was appended.

    Any thread may call any method; calls on one store take turns. Several stores, also of several processes, may have
    the same log. The index is RUN/.index-00000.sqlite, or in a temporary folder until :meth:`close` where that cannot
    be written. HalfstepError when there is no log, or no longer.

    Ranges of steps include both ends; None is the first or the last step that there is.
    """

    def __init__(self, folder: str | os.PathLike[str], rank: int = 0) -> None:
        self._folder, self._rank = Path(folder), rank
        self._log = file_of(folder, rank)
        self._lock = threading.RLock()
        self._seen: tuple[int, ...] | None = None  # the stamp of the log when all of it was in, up to the offset _end
        self._end = 0
        self._stamp()
        self._index = Index(self._folder / f".index-{rank:05d}.sqlite")

    def update(self, longest_s: float = 0.2) -> bool:
        """Take in what was appended, for about ``longest_s`` seconds; whether that was all."""
        deadline = time.monotonic() + longest_s
        with self._lock:
            stamp = self._stamp()
            self._index.follow()
            if stamp == self._seen and self._ask(lambda db: not self._is_new(db)):
                return True
            while True:
                until = min(deadline, time.monotonic() + _LONGEST_TURN_S)
                is_complete = self._ask(partial(self._take, until=until), writes=True)
                if is_complete or time.monotonic() >= deadline:
                    self._seen = stamp if is_complete else None
                    return is_complete

    @property
    def version(self) -> int:
        """Grows with every change of an answer."""
        return self._ask(lambda db: Progress.read(db).version)

    def summary(self) -> dict[str, Any]:
        """The run in short; numbers that are not finite are words, and what is unknown is None."""
        return self._ask(self._summary)

    def series(self, names: Sequence[str], first: int | None, last: int | None, points: int) -> dict[str, Any]:
        """For each metric of halfstep.watch.metrics its ``steps`` and ``values``, and ``nonfinite`` steps with words.

        About ``points`` values at most: every step, or the lowest and highest of buckets of steps, at their own steps.
        HalfstepError for an unknown metric.
        """
        return self._ask(lambda db: metrics.series(db, names, *_clip(db, first, last), points))

    def marks(self, first: int | None, last: int | None, points: int) -> dict[str, list[list[int]]]:
        """``skips`` and ``replays``: the first step of a bucket that had one, and how many there were."""
        return self._ask(lambda db: metrics.marks(db, *_clip(db, first, last), points))

    def entries(
        self, kinds: Sequence[str], first: int | None = None, last: int | None = None, limit: int = 1000
    ) -> list[Entry]:
        """The newest entries of some of the kinds of halfstep.watch.intake.KEPT, in the order of the log.

        One that has no step of its own has that of the last step before it.
        """
        places = ", ".join("?" * len(kinds))
        question = (
            f"SELECT content FROM entries WHERE kind IN ({places}) AND step >= ? AND step <= ? "
            "ORDER BY offset DESC LIMIT ?"
        )
        limits = (max(first or 0, 0), _MOST if last is None else min(last, _MOST), limit)
        rows = self._ask(lambda db: db.execute(question, (*kinds, *limits)).fetchall())
        return [json.loads(content) for (content,) in reversed(rows)]

    def layers(self, first: int | None, last: int | None, points: int) -> dict[str, Any] | None:
        """The norms of the gradients of all parameters over steps, see :func:`halfstep.watch.layers.layers`."""
        return self._ask(lambda db: layers(db, *_clip(db, first, last), points))

    def close(self) -> None:
        """Safe to call twice."""
        with self._lock:
            self._index.close()

    def _ask(self, question: Callable[[sqlite3.Connection], T], writes: bool = False) -> T:
        """The answer of one transaction; of a new index when this one fails."""
        with self._lock:
            while True:
                try:
                    with self._index.transaction(writes) as db:
                        return question(db)
                except sqlite3.Error as error:
                    self._seen = None
                    self._index.renew(error)

    def _take(self, db: sqlite3.Connection, until: float) -> bool:
        progress = Progress.read(db)
        try:
            if progress.fingerprint != _fingerprint(self._log, progress.offset):
                self._index.clear(db)
                progress = Progress.read(db)
            intake, tail = Intake(db, progress), Tail(self._log, progress.offset)
            is_complete = False
            while not is_complete:
                before = tail.offset
                entries = tail.read(_CHUNK)
                if tail.num_starts:  # it was replaced just now
                    self._index.clear(db)
                    return False
                intake.take(entries)
                is_complete = tail.offset == before
                if time.monotonic() >= until:
                    break
            intake.flush()
            if tail.offset != progress.offset:
                progress.offset, progress.fingerprint = tail.offset, _fingerprint(self._log, tail.offset)
                progress.version += 1
        except OSError as error:
            raise self._gone(error) from None
        state, _ = _state(db, progress)
        if state != progress.state:
            progress.state = state
            progress.version += 1
        progress.write(db)
        self._end = tail.offset
        return is_complete

    def _is_new(self, db: sqlite3.Connection) -> bool:
        """Whether time has changed the state of the run, or another process the index."""
        progress = Progress.read(db)
        return progress.offset != self._end or _state(db, progress)[0] != progress.state

    def _summary(self, db: sqlite3.Connection) -> dict[str, Any]:
        progress = Progress.read(db)
        state, why = _state(db, progress) if self._seen else ("reading", "its log is being read")
        first, last = _clip(db, None, None)
        num_steps, num_skipped, num_replays = metrics.totals(db, first, last)
        newest = db.execute("SELECT loss, grad_norm, scale FROM steps_0 WHERE key = ?", (last,)).fetchone()
        loss, grad_norm, scale = newest or (None, None, None)
        run = progress.run or {}
        info = run.get("info")
        about = info if isinstance(info, dict) else {}
        alerts = db.execute(_ALERTS).fetchall()
        return {
            "name": self._folder.resolve().name,
            "state": state,
            "why": why,
            "policy": run.get("policy"),
            **{name: about.get(name) for name in ("effective", "reason", "device", "versions")},
            "rank": self._rank,
            "ranks": ranks_of(self._folder),
            "num_ranks": run.get("num_ranks"),
            "first_step": first if num_steps else None,
            "last_step": last if num_steps else None,
            "num_steps": num_steps,
            "started": progress.started,
            "updated": progress.updated,
            "num_skipped": num_skipped,
            "num_replays": num_replays,
            "num_alerts": sum(count for _, _, count in alerts),
            "alert_counts": [list(row) for row in alerts],
            "worst": min((severity for _, severity, _ in alerts), key=_rank_of, default=None),
            "loss": loss,
            "grad_norm": grad_norm,
            "scale": scale,
            "seconds": progress.throughput.usual_pause,
            "session": run.get("session"),
        }

    def _stamp(self) -> tuple[int, ...]:
        """By what a log that has changed is known, without reading it."""
        try:
            status = os.lstat(self._log)
        except OSError as error:
            raise self._gone(error) from None
        if not stat.S_ISREG(status.st_mode):
            raise HalfstepError(f"log {self._log}", "it is no regular file", "Name a folder that a run has written.")
        return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns

    def _gone(self, error: OSError) -> HalfstepError:
        is_gone = isinstance(error, FileNotFoundError | NotADirectoryError)
        reason = error.strerror or "it is no file"
        why = "it is not there, or not any more" if is_gone else f"it cannot be read ({reason})"
        return HalfstepError(f"log {self._log}", why, "Name the folder of a run.")


def _rank_of(severity: str) -> int:
    return _WORST_FIRST.index(severity) if severity in _WORST_FIRST else len(_WORST_FIRST)


def _clip(db: sqlite3.Connection, first: int | None, last: int | None) -> tuple[int, int]:
    """The range of steps that are there; (1, 0) for none."""
    bounds = metrics.STEPS.bounds(db)
    if bounds is None:
        return 1, 0
    first = bounds[0] if first is None else max(first, bounds[0])
    last = bounds[1] if last is None else min(last, bounds[1])
    return (first, last) if first <= last else (1, 0)


def _state(db: sqlite3.Connection, progress: Progress) -> tuple[State, str]:
    silent_s = None if progress.updated is None else time.time() - progress.updated
    has_steps = metrics.STEPS.bounds(db) is not None
    return state_of(progress.run, progress.end, has_steps, silent_s, progress.throughput.usual_pause)


def _fingerprint(log: Path, offset: int) -> str:
    """Of the first ``offset`` bytes, by those at their start and at their end; a log that is shorter has another."""
    if offset == 0:
        return ""
    with open_log(log) as file:
        start = file.read(min(offset, _PRINT))
        file.seek(max(0, offset - _PRINT))
        end = file.read(min(offset, _PRINT))
    return hashlib.sha256(start + end).hexdigest()
