"""The pyramid of an index: rows of single steps, and over them buckets of ever more steps, which keep their extremes.

A bucket is written once all its steps are there, so that a log that grows only adds rows, and one that goes back to a
checkpoint only takes some away. The steps at the edges of a range, and the newest, are read from the levels below.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

Row = tuple[Any, ...]
FACTOR = 8
"""Buckets of a level in one of the next."""
DEPTH = 8
"""Pyramid above the single steps."""


@dataclass(frozen=True)
class Pyramid:
    """One table of steps, ``NAME_0``, and a table of buckets for each level.

    unit:           a bucket of level n has unit x FACTOR^n steps, those that are missing included.
    step_columns:   of a step's row, behind its step. bucket_columns: of a bucket's row, behind its number.
    of_steps, of_buckets: the columns of a bucket over rows of steps, or over smaller buckets, in their order.
    """

    name: str
    unit: int
    step_columns: Sequence[str]
    bucket_columns: Sequence[str]
    of_steps: Callable[[Sequence[Row]], Row]
    of_buckets: Callable[[Sequence[Row]], Row]

    def schema(self) -> Iterator[str]:
        """The statements that make the tables."""
        for level in range(DEPTH + 1):
            columns = self.bucket_columns if level else self.step_columns
            # No type on the columns: SQLite keeps what comes, a number or the word for one that is not finite.
            yield f"CREATE TABLE {self.name}_{level} (key INTEGER PRIMARY KEY, {', '.join(columns)})"

    def bounds(self, db: sqlite3.Connection) -> tuple[int, int] | None:
        """The first and the last step, None when there are none."""
        first, last = db.execute(f"SELECT (SELECT min(key) FROM {self.name}_0), max(key) FROM {self.name}_0").fetchone()
        return None if last is None else (first, last)

    def add(self, db: sqlite3.Connection, rows: Sequence[Row]) -> None:
        """Keep steps, all later than those that are there, in their order."""
        if not rows:
            return
        bounds = self.bounds(db)
        before, last = bounds[1] if bounds else -1, rows[-1][0]
        self._insert(db, 0, rows)
        for level in range(1, DEPTH + 1):
            size, below = self._size(level), self._size(level - 1)
            done, now = (before + 1) // size, (last + 1) // size
            if done == now:
                return
            start, stop = done * size // below, now * size // below
            old = list(self._select(db, level - 1, start, rows[0][0] if rows else stop))
            merge = self.of_steps if level == 1 else self.of_buckets
            per_bucket = size // below
            rows = [
                (number, *merge(list(group)))
                for number, group in groupby([*old, *rows], key=lambda row: row[0] // per_bucket)
                if number < now
            ]
            self._insert(db, level, rows)

    def cut(self, db: sqlite3.Connection, step: int) -> None:
        """Drop every step after ``step``, and the buckets that are no longer whole."""
        db.execute(f"DELETE FROM {self.name}_0 WHERE key > ?", (step,))
        bounds = self.bounds(db)
        end = bounds[1] + 1 if bounds else 0
        for level in range(1, DEPTH + 1):
            db.execute(f"DELETE FROM {self.name}_{level} WHERE key >= ?", (end // self._size(level),))

    def read(
        self,
        db: sqlite3.Connection,
        first: int,
        last: int,
        most: int,
        step_columns: Sequence[str] | None = None,
        bucket_columns: Sequence[str] | None = None,
    ) -> list[Row]:
        """The columns of buckets over the steps from ``first`` to ``last``, about ``most`` of them at most.

        Their borders do not move when the range grows a little, so that a picture of a live run stands still.
        """
        columns = (step_columns or self.step_columns, bucket_columns or self.bucket_columns)
        width = max(1, -(-(last - first + 1) // max(1, most)))
        level = max(level for level in range(DEPTH + 1) if self._size(level) <= width)
        if level == 0:
            rows = self._select(db, 0, first, last + 1, columns[0])
            return [self.of_steps(list(group)) for _, group in groupby(rows, key=lambda row: row[0] // width)]
        width = -(-width // self._size(level)) * self._size(level)
        parts = self._parts(db, level, first, last, columns)
        return [
            self.of_buckets([row for _, row in group]) for _, group in groupby(parts, key=lambda part: part[0] // width)
        ]

    def _parts(
        self, db: sqlite3.Connection, level: int, first: int, last: int, columns: tuple[Sequence[str], Sequence[str]]
    ) -> Iterator[tuple[int, Row]]:
        """The first step and the row of buckets that make up the range: of ``level``, and smaller ones at its edges."""
        if first > last:
            return
        if level == 0:
            if rows := list(self._select(db, 0, first, last + 1, columns[0])):
                yield first, (0, *self.of_steps(rows))
            return
        size = self._size(level)
        start, stop = -(-first // size), (last + 1) // size
        if start > stop:  # within one bucket
            yield from self._parts(db, level - 1, first, last, columns)
            return
        yield from self._parts(db, level - 1, first, start * size - 1, columns)
        for row in self._select(db, level, start, stop, columns[1]):
            yield row[0] * size, row
        yield from self._parts(db, level - 1, stop * size, last, columns)

    def _size(self, level: int) -> int:
        return self.unit * FACTOR**level if level else 1

    def _insert(self, db: sqlite3.Connection, level: int, rows: Sequence[Row]) -> None:
        if rows:
            db.executemany(f"INSERT INTO {self.name}_{level} VALUES ({', '.join('?' * len(rows[0]))})", rows)

    def _select(
        self, db: sqlite3.Connection, level: int, start: int, stop: int, columns: Sequence[str] = ("*",)
    ) -> Iterable[Row]:
        names = ", ".join(columns) if columns == ("*",) else ", ".join(["key", *columns])
        return db.execute(
            f"SELECT {names} FROM {self.name}_{level} WHERE key >= ? AND key < ? ORDER BY key", (start, stop)
        )
