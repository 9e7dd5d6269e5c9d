"""Entries of a log on their way into its index."""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from halfstep.watch.entry import Entry, line_of
from halfstep.watch.layers import LAYERS, Parameters
from halfstep.watch.layers import SCHEMA as PARAMETERS
from halfstep.watch.metrics import STEPS, step_rows
from halfstep.watch.pyramid import Row
from halfstep.watch.throughput import Throughput

KEPT = ("alert", "seam", "promotion", "reduction", "ranges", "explanation", "gap", "end")
"""Kinds that are kept as they came. The others are in the levels, or are too many and say little."""
SCHEMA = (
    *STEPS.schema(),
    *LAYERS.schema(),
    PARAMETERS,
    "CREATE TABLE entries (offset INTEGER PRIMARY KEY, kind TEXT, step INTEGER, content TEXT)",
    "CREATE TABLE progress (content TEXT)",
)
_MOST_STEP = 2**53
"""Above it a step is no exact number for a page."""
_MOST_REPLAYS = 2**20
"""Of a step; so that no sum is too large for SQLite."""


@dataclass
class Progress:
    """How far an index has come, and what it knows of the run besides its tables.

    version: grows with every change. offset: of the first byte of the log that is not taken in; fingerprint: of the
    bytes before it. run: the last entry of that kind, run_offset where it begins, and has_stepped whether a step came
    after it. end: the last entry of that kind, of this session. started, updated: in seconds, of the first run that
    counts and of the last entry but alerts. throughput: of the steps since the run's entry or a cut. state: as last
    seen.
    """

    version: int
    offset: int = 0
    fingerprint: str = ""
    run: Entry | None = None
    run_offset: int = 0
    has_stepped: bool = False
    end: Entry | None = None
    started: float | None = None
    updated: float | None = None
    throughput: Throughput = field(default_factory=Throughput)
    state: str = ""

    @classmethod
    def read(cls, db: sqlite3.Connection) -> Progress:
        """sqlite3.DatabaseError where there is none."""
        try:
            content = json.loads(db.execute("SELECT content FROM progress").fetchone()[0])
            return cls(**{**content, "throughput": Throughput(**content["throughput"])})
        except (KeyError, TypeError, ValueError) as error:
            raise sqlite3.DatabaseError(f"no index of ours: {error}") from None

    def write(self, db: sqlite3.Connection) -> None:
        db.execute("UPDATE progress SET content = ?", (json.dumps(vars(self), default=vars),))


class Intake:
    """Takes entries of a Tail into the tables of ``db``, in a transaction of the caller, who ends with :meth:`flush`.

    A step that comes again replaces the one of before and all after it, as a seam does.
    """

    def __init__(self, db: sqlite3.Connection, progress: Progress) -> None:
        self._db, self._progress = db, progress
        bounds = STEPS.bounds(db)
        self._last = bounds[1] if bounds else 0
        self._steps: list[Row] = []
        self._layers: list[Row] = []
        self._parameters: Parameters | None = None

    def take(self, entries: Sequence[tuple[int, Entry]]) -> None:
        """Take in entries, each with its offset in the log, in their order."""
        for offset, entry in entries:
            kind = entry.get("kind")
            if kind == "step":
                self._step(offset, entry)
            elif kind == "layers":
                self._layer(entry)
            elif kind == "run" or kind in KEPT:
                with suppress(RecursionError):  # of a line that is nested too deep to be written again
                    self._keep(offset, kind, entry)
        for _, entry in reversed(entries):
            # An alert is no sign of life: the one of a run that hangs comes from its log's thread.
            if entry.get("kind") != "alert" and (time := _finite(entry.get("time"))) is not None:
                self._progress.updated = time
                break

    def flush(self) -> None:
        """Write what waits."""
        if self._steps:
            STEPS.add(self._db, list(step_rows(self._steps)))
            self._steps = []
        LAYERS.add(self._db, self._layers)
        self._layers = []

    def _step(self, offset: int, entry: Entry) -> None:
        progress, get = self._progress, entry.get
        step = entry["step"]
        if not 0 < step <= _MOST_STEP:
            return
        if step <= self._last:
            self._cut(step - 1, offset if progress.has_stepped else progress.run_offset)
        self._last, progress.has_stepped = step, True
        time, count = float(entry["time"]), _finite(get("count", 1.0))
        seconds, count_per_s = progress.throughput.add(step, time, count)
        self._steps.append(
            (
                step,
                entry["loss"],
                entry["grad_norm"],
                get("scale", 1.0),
                seconds,
                count_per_s,
                get("memory_mib"),
                int(get("applied") is False),
                min(get("num_replays") or 0, _MOST_REPLAYS),
            )
        )

    def _layer(self, entry: Entry) -> None:
        if self._parameters is None:
            self._parameters = Parameters(self._db)
        bounds = LAYERS.bounds(self._db)
        last = self._layers[-1][0] if self._layers else bounds[1] if bounds else 0
        if last < entry["step"] <= self._last and (row := self._parameters.row(entry)):
            self._layers.append(row)

    def _keep(self, offset: int, kind: str, entry: Entry) -> None:
        step = entry.get("step")
        if type(step) is not int or not 0 <= step <= _MOST_STEP:
            step = self._last
        content = line_of({**entry, "step": step})
        progress = self._progress
        if kind == "run":
            progress.run, progress.run_offset, progress.has_stepped = json.loads(content), offset, False
            progress.end, progress.throughput = None, Throughput()
            if progress.started is None:
                progress.started = _finite(entry["time"])
            return
        if kind == "seam":
            self._cut(step, offset)
        elif kind == "end":
            progress.end = json.loads(content)
        self._db.execute("INSERT INTO entries VALUES (?, ?, ?, ?)", (offset, kind, step, content))

    def _cut(self, step: int, offset: int) -> None:
        """What the log says before ``offset`` of steps after ``step`` counts no more."""
        self._progress.throughput = Throughput()
        self._db.execute("DELETE FROM entries WHERE step > ? AND offset < ?", (step, offset))
        if step >= self._last:
            return
        self.flush()
        STEPS.cut(self._db, step)
        LAYERS.cut(self._db, step)
        bounds = STEPS.bounds(self._db)
        self._last = bounds[1] if bounds else 0
        if bounds is None and self._progress.run is not None:
            self._progress.started = _finite(self._progress.run.get("time"))


def _finite(number: Any) -> float | None:
    """A number of the log as a float, None when it is not finite or unknown."""
    return float(number) if isinstance(number, float | int) and math.isfinite(number) else None
