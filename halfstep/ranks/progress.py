"""Where each rank is: a few words that a thread of each posts in the process group's store once a second.

No collective carries them and no step waits for them, so that they are there when a collective fails. Clocks of
different hosts are never compared: what counts is whether a rank still posts, and what it says of itself.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, Protocol
from weakref import WeakMethod

from torch import distributed

BEAT_S = 1.0
"""Between two posts of a rank. From 1000 ranks on it grows with them, so that the store gets 1000 posts a second."""
_STORE_S = 10.0
"""How long a store that does not answer is waited for."""


@dataclass(frozen=True)
class Place:
    """What a rank says of itself.

    session:   tells this process apart from one before a restart. beat: number of the post.
    step:      that it is in, or that it made last. is_inside: whether it is in it.
    num_calls: collectives that it has begun, in all groups; NaN where a backend does not count them.
    for_s:     how long it has been inside, or outside, by its own clock.
    fault:     why it cannot go on: None while it can, empty when its script has come to its proper end.
    is_victim: whether that is the fault of another rank, or of somebody outside.
    num_steps: that it has begun, whatever their numbers. work_s: seconds of its own work in them; see
               :class:`halfstep.ranks.pace.WorkClock`.
    trouble:   what it goes on with all the same, such as a log that cannot be written; empty without any.
    """

    rank: int
    host: str
    pid: int
    session: str
    beat: int = 0
    step: int = 0
    is_inside: bool = False
    num_calls: float = 0.0
    for_s: float = 0.0
    fault: str | None = None
    is_victim: bool = False
    num_steps: int = 0
    work_s: float = 0.0
    trouble: str = ""

    def __str__(self) -> str:
        return f"rank {self.rank} (host {self.host}, pid {self.pid})"

    @property
    def where(self) -> str:
        if self.is_inside:
            return f"in step {self.step}"
        return f"outside of the stepper, last in step {self.step}" if self.step else "before its first step"


class Arrival(Protocol):
    """A CUDA event, behind a collective."""

    def query(self) -> bool: ...


class Progress:
    """Posts where this rank is, and reads where the others are.

    store:     of the process group; keys that begin with ``halfstep/`` are used. None: nobody posts anything.
    rank, num: of the default process group, as torchrun counts.
    timeout_s: how long a collective may take; None where that is not known.
    on_beat:   called after each post, from the thread.
    is_broken: whether an exception has left a step, and with it maybe a collective that others wait in.
    pending:   what arrives when the device has come through the last collective, and when that was begun; see
               :func:`halfstep.ranks.fault.end_if_overdue`.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        num: int,
        timeout_s: float | None = None,
        beat_s: float | None = None,
    ) -> None:
        self.rank, self.num, self.timeout_s = rank, num, timeout_s
        self.beat_s = max(BEAT_S, num / 1000) if beat_s is None else beat_s
        self.store = None if store is None else _own(store)
        self.on_beat: list[Callable[[], None]] = []
        self.work_s: Callable[[], float] = float
        self.trouble = ""
        self.is_broken = False
        self.pending: tuple[Arrival, float] | None = None
        self.fault: str | None = None
        self._is_victim = False
        self._host, self._pid, self._session = platform.node(), os.getpid(), os.urandom(6).hex()
        self._beat = self._step = self._num_steps = 0
        self._is_inside, self._since = False, time.monotonic()
        self._endings: list[WeakMethod[Callable[[str], None]]] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._work, name="halfstep progress", daemon=True)
        if self.post():
            self._thread.start()

    @property
    def place(self) -> Place:
        """Where this rank is."""
        return Place(
            self.rank,
            self._host,
            self._pid,
            self._session,
            self._beat,
            self._step,
            self._is_inside,
            num_calls(),
            time.monotonic() - self._since,
            self.fault,
            self._is_victim,
            self._num_steps,
            self.work_s(),
            self.trouble,
        )

    def enter(self, step: int) -> None:
        """This rank works on ``step`` from now on. After a fault it stays where that was."""
        if self.fault is None:
            self._num_steps += step != self._step
            self._step, self._is_inside, self._since = step, True, time.monotonic()

    def leave(self) -> None:
        """It does no more."""
        if self.fault is None:
            self._is_inside, self._since = False, time.monotonic()

    def say(self, fault: str, is_victim: bool = False) -> None:
        """Post at once why this rank cannot go on; empty at its proper end. The first word stands."""
        if self.fault is None and self._pid == os.getpid():
            self.fault, self._is_victim = fault, is_victim
            self.post()

    def say_goodbye(self) -> None:
        """The script has ended, by an exception that nobody caught if there is one."""
        error = getattr(sys, "last_value", None)
        self.say("" if error is None else " ".join(f"{type(error).__name__}: {error}".split())[:500])

    def post(self) -> bool:
        """Post where this rank is; whether the store has taken it."""
        if self.store is None:
            return False
        self._beat += 1
        try:
            self.store.set(_key(self.rank), json.dumps(asdict(self.place)))
        except Exception:
            return False
        return True

    def read(self, ranks: Iterable[int] | None = None) -> dict[int, Place] | None:
        """Where ``ranks`` are, all by default, without those that never posted; None if the store does not answer."""
        if self.store is None:
            return None
        wanted = list(range(self.num) if ranks is None else ranks)
        try:
            if not self.store.check([_key(rank) for rank in wanted]):
                wanted = [rank for rank in wanted if self.store.check([_key(rank)])]
            keys = [_key(rank) for rank in wanted]
            texts = self.store.multi_get(keys) if self.store.has_extended_api() else map(self.store.get, keys)
            return {rank: Place(**json.loads(text)) for rank, text in zip(wanted, texts, strict=True)}
        except Exception:
            return None

    def at_end(self, call: Callable[[str], None]) -> None:
        """Have a method called with the reason when the run cannot go on, as long as its object lives."""
        self._endings = [*(ending for ending in self._endings if ending() is not None), WeakMethod(call)]

    def end(self, reason: str) -> None:
        """The run cannot go on: tell those who asked for it."""
        for ending in self._endings:
            call = ending()
            if call is not None:
                with suppress(Exception):
                    call(reason)

    def close(self) -> None:
        """Post no more. One still inside the store when the interpreter ends would abort the process."""
        self._is_over.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(_STORE_S)

    def _work(self) -> None:
        while not self._is_over.wait(self.beat_s):
            self.post()
            for look in self.on_beat:
                look()


_current: Progress | None = None
_group: Any = None


def begin(progress: Progress) -> None:
    """Make ``progress`` that of this process, whose default group is open."""
    global _current, _group
    if _current is None:
        atexit.register(_say_goodbye)
    else:
        _current.close()
    _current, _group = progress, distributed.group.WORLD


def current() -> Progress:
    """That of this process; made here for a default group that somebody else has opened."""
    if _current is None or _group is not distributed.group.WORLD:
        try:
            store = distributed.distributed_c10d._get_default_store()
        except Exception:  # MPI has none
            store = None
        begin(Progress(store, distributed.get_rank(), distributed.get_world_size()))
    assert _current is not None
    return _current


def _say_goodbye() -> None:
    if _current is not None:
        _current.say_goodbye()
        _current.close()


def num_calls() -> float:
    """How many collectives this process has begun, in all groups; NaN where a backend does not count them."""
    try:
        groups: list[Any] = list(distributed.distributed_c10d._world.pg_map)
        return float(sum(group._get_sequence_number_for_group() for group in groups))
    except RuntimeError:
        return math.nan


def _own(store: Any) -> Any:
    """A connection of our own, on which a call of torch that waits holds up none of ours."""
    own: Any = distributed.PrefixStore("halfstep", store)  # type: ignore[attr-defined]
    if type(own._underlying_non_prefix_store).__name__ == "TCPStore":
        with suppress(Exception):
            own = own.clone()
            own.set_timeout(timedelta(seconds=_STORE_S))
    return own


def _key(rank: int) -> str:
    return f"rank/{rank}"
