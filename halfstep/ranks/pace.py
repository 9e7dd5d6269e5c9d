"""Who is slow: how long each rank works by itself in a step, compared by rank 0 every few seconds.

A rank that is slow takes no longer over a step than the others do, since they wait for it. What differs is the time
from where all have met, a collective of the step, to where it waits for others again.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from typing import Any

import torch

from halfstep.ranks.progress import Place, Progress

LOOK_S = 5.0
"""Between two looks at all ranks, at least. From 500 ranks on it grows with them, since rank 0 reads each of them."""
NUM_STEPS = 10
"""Of every rank, at least, from one look to the next."""


class WorkClock:
    """Seconds that pass between :meth:`start` and :meth:`stop`, summed: the own work of a rank.

    On CUDA the device's time between the two places in its stream, so that a slow device counts and a host that runs
    ahead does not. It is there when the device has come that far.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._sum_s = 0.0
        self._begun: Any = None
        self._pending: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque(maxlen=1000)

    def start(self) -> None:
        """Work begins. Nothing happens if it has already."""
        if self._begun is None:
            self._begun = _event() if self._is_cuda else time.perf_counter()

    def stop(self) -> None:
        """Work ends. Nothing happens if it has already."""
        begun, self._begun = self._begun, None
        if begun is None:
            return
        if not self._is_cuda:
            self._sum_s += time.perf_counter() - begun
            return
        self._pending.append((begun, _event()))
        while self._pending and self._pending[0][1].query():
            first, last = self._pending.popleft()
            self._sum_s += first.elapsed_time(last) / 1000

    def seconds(self) -> float:
        return self._sum_s


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class Pace:
    """The clock of this rank, and on rank 0 the comparison with the others, in the thread that posts its place.

    entries: of kind ``ranks``, for the log; see :mod:`halfstep.watch.entry`.
    """

    def __init__(self, progress: Progress, device: torch.device, look_s: float | None = None) -> None:
        self.progress = progress
        self.clock = WorkClock(device)
        self.entries: deque[dict[str, Any]] = deque(maxlen=100)
        self._look_s = max(LOOK_S, progress.num / 100) if look_s is None else look_s
        self._before: dict[int, Place] = {}
        self._time = time.monotonic()
        progress.work_s = self.clock.seconds
        if progress.rank == 0:
            progress.on_beat.append(self.look)

    def look(self) -> None:
        """Compare what ranks have done since the look before, if that is long enough ago and all have done enough."""
        now = time.monotonic()
        if self._before and now - self._time < self._look_s:
            return
        places = self.progress.read()
        if places is None or len(places) < self.progress.num:
            return
        before = self._before
        if {rank: place.session for rank, place in before.items()} != {r: p.session for r, p in places.items()}:
            self._before, self._time = places, now
            return
        num_steps = {rank: place.num_steps - before[rank].num_steps for rank, place in places.items()}
        if min(num_steps.values()) < NUM_STEPS:
            return
        work_ms = {r: 1000 * (p.work_s - before[r].work_s) / num_steps[r] for r, p in places.items()}
        slowest = max(work_ms, key=lambda rank: work_ms[rank])
        others_ms = statistics.median([ms for rank, ms in work_ms.items() if rank != slowest])
        step_ms = 1000 * (now - self._time) / num_steps[self.progress.rank]
        self.entries.append(
            {
                "kind": "ranks",
                "time": time.time(),
                "step": places[self.progress.rank].step,
                "num_ranks": len(places),
                "step_ms": step_ms,
                "others_ms": others_ms,
                "slowest": slowest,
                "slowest_host": places[slowest].host,
                "slowest_ms": work_ms[slowest],
                "troubles": [f"{place}: {place.trouble}" for place in places.values() if place.trouble],
            }
        )
        self._before, self._time = places, now


_current: Pace | None = None


def pace_of(progress: Progress, device: torch.device) -> Pace:
    """The one of this process."""
    global _current
    if _current is None or _current.progress is not progress:
        _current = Pace(progress, device)
    return _current
