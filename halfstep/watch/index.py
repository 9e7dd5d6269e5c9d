"""Where the index of a log lies: an SQLite file that may be lost at any time, since the log has everything."""

from __future__ import annotations

import os
import sqlite3
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from halfstep.errors import HalfstepError
from halfstep.watch.intake import SCHEMA, Progress

VERSION = 3
"""Of the tables; an index of another is made anew."""
LOCKED_S = 2.0
"""Seconds to wait for another process that writes to the index; then it is left alone."""
_BROKEN = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR, sqlite3.SQLITE_CONSTRAINT)


class Index:
    """An open index at ``path``; in a temporary folder where that cannot be, and in memory where not even that.

    Several processes may have the same one open. Its transactions are theirs one at a time; the threads of one process
    have to take turns.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._places = self._all_places()
        self._version = 0
        self._was_broken = False
        self._identity: tuple[int, int] | None = None
        self._db = self._open_next()

    @contextmanager
    def transaction(self, writes: bool) -> Iterator[sqlite3.Connection]:
        """The database, as it was at one moment; what is written is there as a whole or not at all."""
        db = self._db
        db.execute("BEGIN IMMEDIATE" if writes else "BEGIN")
        try:
            yield db
            db.execute("COMMIT")
        finally:
            if db.in_transaction:
                db.execute("ROLLBACK")

    def renew(self, error: sqlite3.Error) -> None:
        """Go on with another index after ``error``: a new one if this one is broken, else one in another place."""
        self._db.close()
        if isinstance(error, sqlite3.ProgrammingError):
            raise error
        self._db = self._open_again() if self._is_broken(error) else self._open_next(error)

    def follow(self) -> None:
        """Open the index anew if somebody has deleted or replaced its file."""
        if self._identity is not None and self._identity != _identity(self._path):
            self._db.close()
            self._db = self._open_again()

    def clear(self, db: sqlite3.Connection) -> None:
        """Make every table anew, inside a transaction."""
        for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
            db.execute(f'DROP TABLE "{name}"')
        for statement in SCHEMA:
            db.execute(statement)
        # By the clock, so that whoever has seen a version never meets it again with other tables.
        self._version = max(self._version + 1, int(time.time() * 1000))
        db.execute("INSERT INTO progress VALUES ('')")
        Progress(self._version).write(db)
        db.execute(f"PRAGMA user_version = {VERSION}")

    def close(self) -> None:
        """Safe to call twice."""
        self._db.close()
        if self._temporary is not None:
            self._temporary.cleanup()

    def _is_broken(self, error: sqlite3.Error) -> bool:
        """Whether a new file in the same place would do; asked once only."""
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
        if code not in _BROKEN or self._was_broken or self._identity is None:
            return False
        self._was_broken = True
        for path in (self._path, Path(f"{self._path}-journal")):
            path.unlink(missing_ok=True)
        return True

    def _all_places(self) -> Iterator[str]:
        yield str(self._path)
        self._identity = None
        try:
            self._temporary = tempfile.TemporaryDirectory(prefix="halfstep-")
            yield os.path.join(self._temporary.name, self._path.name)
        except OSError:
            pass
        yield ":memory:"

    def _open_next(self, error: Exception | None = None) -> sqlite3.Connection:
        for place in self._places:
            try:
                return self._open(place)
            except (sqlite3.Error, OSError) as problem:
                error = problem
                if isinstance(problem, sqlite3.Error) and self._is_broken(problem):
                    return self._open_again()
        raise HalfstepError(f"index {self._path}", f"it can be nowhere ({error})", "Make room on the disk.")

    def _open_again(self) -> sqlite3.Connection:
        try:
            return self._open(str(self._path))
        except (sqlite3.Error, OSError) as error:
            return self._open_next(error)

    def _open(self, place: str) -> sqlite3.Connection:
        is_beside = place == str(self._path)
        if is_beside and os.path.lexists(place) and not stat.S_ISREG(os.lstat(place).st_mode):
            raise OSError("it is no regular file")  # a link may lead anywhere
        db = sqlite3.connect(place, timeout=LOCKED_S, isolation_level=None, check_same_thread=False)
        self._identity = _identity(self._path) if is_beside else None
        try:
            # Nothing waits for the disk: an index that a power cut breaks is made anew.
            db.execute("PRAGMA synchronous = OFF")
            db.execute("PRAGMA cache_size = -16000")
            self._prepare(db)
            if is_beside:
                self._identity = _identity(self._path)
        except BaseException:
            db.close()
            raise
        return db

    def _prepare(self, db: sqlite3.Connection) -> None:
        if db.execute("PRAGMA user_version").fetchone()[0] == VERSION:
            return
        db.execute("BEGIN IMMEDIATE")
        try:
            # Another process may have been first.
            if db.execute("PRAGMA user_version").fetchone()[0] != VERSION:
                self.clear(db)
            db.execute("COMMIT")
        finally:
            if db.in_transaction:
                db.execute("ROLLBACK")


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino
