"""The command as one job of several ranks, as torchrun starts it: one of them speaks, and all end with one status."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from halfstep.errors import HalfstepError

TOGETHER = ("compare", "trace", "train")
"""The commands that ranks run together; any other is refused under torchrun."""

PATIENCE_S = 3.0
"""How long a rank that fails waits for the others to fail alike. Ranks that do, do so in the same step."""

_END_S = 600.0
"""How long the others wait for rank 0 to write the report, since torchrun ends every rank when one has failed."""

_num_jobs = 0  # of this process; what they leave in the store is told apart by it


class Job:
    """``rank`` of the ``num`` processes that run this command; 0 of 1 without torchrun, or what sets the same names."""

    def __init__(self) -> None:
        is_one_of_many = {"RANK", "WORLD_SIZE"} <= os.environ.keys()
        self.rank = int(os.environ["RANK"]) if is_one_of_many else 0
        self.num = int(os.environ["WORLD_SIZE"]) if is_one_of_many else 1
        self._store: Any = None
        self._is_refused = False

    @property
    def speaks(self) -> bool:
        """Whether this rank prints and writes what all have come to."""
        return self._store is None or self.rank == 0

    def open(self, command: str) -> None:
        """Open the process group for a command that ranks run together; HalfstepError for another under torchrun."""
        if self.num == 1:
            return
        if command not in TOGETHER:
            # A cluster may set a rank for programs that are not to be one of many.
            if "TORCHELASTIC_RUN_ID" in os.environ:
                self._is_refused = True
                raise HalfstepError(
                    f"{command} in {self.num} processes",
                    f"it runs in one process; only {', '.join(TOGETHER)} run over several ranks",
                    "Leave torchrun out.",
                )
            return
        from torch.distributed import distributed_c10d

        from halfstep.distributed import start

        start()
        global _num_jobs
        _num_jobs += 1
        store = distributed_c10d._get_default_store()
        self._store = distributed_c10d.PrefixStore(f"halfstep/{_num_jobs}", store)

    def end(self, status: int, message: str | None) -> int:
        """Say ``message`` on standard error, once if all ranks have the same; the status to end with, that of rank 0.

        What follows from an error of another rank is not said.
        """
        if message is not None and (said := self._said(message)):
            print(f"halfstep: {said}", file=sys.stderr)
        if self._store is None:
            return status
        if self.rank == 0:
            self._store.set("end", str(status))
        elif self._waits_for(["end"], _END_S if message is None else PATIENCE_S):
            status = int(self._store.get("end"))
        return status

    def hears(self, error: BaseException) -> bool:
        """Whether this rank shows an error that nobody foresaw."""
        return self._said(f"{type(error).__name__}: {error}") is not None

    def _said(self, message: str) -> str | None:
        """``message`` as this rank says it; None where that is left to another."""
        if self.num == 1:
            return message
        if self._store is None:
            if self._is_refused and self.rank > 0:
                time.sleep(PATIENCE_S)  # torchrun ends this rank when rank 0 has said it
                return None
            return message if self._is_refused else f"rank {self.rank}: {message}"
        is_first = all(self._error_of(rank) in (None, message) for rank in self._others)
        self._store.set(f"error/{self.rank}", message)
        if not is_first:
            return None  # the other rank's end is what broke this one
        self._waits_for([f"error/{rank}" for rank in self._others], PATIENCE_S)
        if all(self._error_of(rank) == message for rank in self._others):
            return message if self.rank == 0 else None
        return f"rank {self.rank}: {message}"

    @property
    def _others(self) -> list[int]:
        return [rank for rank in range(self.num) if rank != self.rank]

    def _error_of(self, rank: int) -> str | None:
        """What that rank has failed with; None if it has not."""
        key = f"error/{rank}"
        return self._store.get(key).decode() if self._store.check([key]) else None

    def _waits_for(self, keys: list[str], seconds: float) -> bool:
        """Whether the others have set all ``keys`` within that time."""
        end = time.monotonic() + seconds
        while not self._store.check(keys):
            if time.monotonic() > end:
                return False
            time.sleep(0.02)
        return True


current = Job()
"""That of this process; each call of the command begins a new one."""
