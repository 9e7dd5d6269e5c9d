"""The open stores of a folder of runs: a few, each for one thread at a time, brought up to date in small bites."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from halfstep.errors import HalfstepError
from halfstep.watch.reading import ranks_of
from halfstep.watch.runs import Runs
from halfstep.watch.store import Store

_BITE_S = 0.2
_PAUSE_S = 0.005
_MOST_USERS = 16
"""Of one store. Whoever waits for it holds a thread of the server, which the pages of other runs need."""
_PATIENCE_S = 5.0


class Gone(HalfstepError):
    """There is no such run, or no such rank of it, or not any more."""


class Busy(HalfstepError):
    """The run is there and cannot be read now; later it may."""


class Shelf:
    """Stores by run and rank. Looking at one run waits for nobody who looks at another.

    most: stores that stay open; the one least recently looked at is closed first.
    A store whose log is longer than a look had time for is brought up to date by a thread, which ends when all are.
    """

    def __init__(self, runs: Runs, most: int = 64) -> None:
        self._runs, self._most = runs, most
        self._lock = threading.Lock()  # of what follows, and held for moments only
        self._slots: OrderedDict[tuple[str, int], _Slot] = OrderedDict()
        self._behind: OrderedDict[tuple[str, int], None] = OrderedDict()
        self._thread: threading.Thread | None = None
        self._is_open = True

    @contextmanager
    def look(
        self, name: str, rank: int, longest_s: float = _BITE_S, patience_s: float = _PATIENCE_S
    ) -> Iterator[tuple[Store, bool]]:
        """The store of a rank, for this thread alone, and whether all of its log is in.

        longest_s:  time for what was appended since. patience_s: time to wait for others who look at it.
        Gone or Busy says why there is no store.
        """
        with self._slot(name, rank, patience_s) as slot:
            try:
                folder = self._runs.folder_of(name)
                if slot.store is None:
                    if rank not in ranks_of(folder):
                        raise Gone(f"run {name}", f"it has no log of rank {rank}", "Choose another rank.")
                    slot.store = Store(folder, rank)
                is_complete = slot.store.update(longest_s)
                if not is_complete:
                    self._catch_up(name, rank)
                yield slot.store, is_complete
            except (HalfstepError, OSError, sqlite3.Error) as error:
                slot.close()
                if isinstance(error, Gone):
                    raise
                self.folder_of(name)
                raise Busy(f"run {name}", f"it cannot be read now ({error})", "It is tried again.") from None

    def folder_of(self, name: str) -> Path:
        """The folder of a run; Gone when there is none, and then its stores are closed."""
        try:
            return self._runs.folder_of(name)
        except HalfstepError as error:
            self.drop(name)
            raise Gone(error.what, error.why, error.fix) from None

    def drop(self, name: str) -> None:
        """Close the stores of a run that nobody looks at."""
        with self._lock:
            for key in [key for key, slot in self._slots.items() if key[0] == name and not slot.num_users]:
                self._slots.pop(key).close()

    def close(self) -> None:
        """Close every store, once who looks at it has finished. Safe to call twice."""
        with self._lock:
            self._is_open = False
            self._behind.clear()
            slots, thread = list(self._slots.values()), self._thread
            self._slots.clear()
        if thread:
            thread.join()
        for slot in slots:
            with slot.lock:
                slot.close()

    @contextmanager
    def _slot(self, name: str, rank: int, patience_s: float) -> Iterator[_Slot]:
        busy = Busy(f"run {name}", "too many look at it at once", "It is tried again.")
        with self._lock:
            slot = self._slots.setdefault((name, rank), _Slot())
            self._slots.move_to_end((name, rank))
            if slot.num_users >= _MOST_USERS:
                raise busy
            slot.num_users += 1
            idle = [key for key, other in self._slots.items() if not other.num_users]
            for key in idle[: max(0, len(self._slots) - self._most)]:
                self._slots.pop(key).close()
        try:
            if not slot.lock.acquire(timeout=patience_s):
                raise busy
            try:
                if not self._is_open:
                    raise Busy(f"run {name}", "halfstep watch is ending", "Start it again.")
                yield slot
            finally:
                slot.lock.release()
        finally:
            with self._lock:
                slot.num_users -= 1

    def _catch_up(self, name: str, rank: int) -> None:
        with self._lock:
            if self._is_open:
                self._behind[name, rank] = None
                if self._thread is None:
                    self._thread = threading.Thread(target=self._work, name="halfstep shelf", daemon=True)
                    self._thread.start()

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._behind:
                    self._thread = None
                    return
                (name, rank), _ = self._behind.popitem(last=False)
            with suppress(Gone, Busy), self.look(name, rank):
                pass
            time.sleep(_PAUSE_S)  # a lock is not fair: let those in who wait for it


class _Slot:
    """A place for a store, and how many hold it or wait for it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.store: Store | None = None
        self.num_users = 0

    def close(self) -> None:
        if self.store is not None:
            with suppress(OSError, sqlite3.Error):
                self.store.close()
            self.store = None
