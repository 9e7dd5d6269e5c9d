"""Which attempt at the job this is: a name that all of its ranks agree on, and no rank of an attempt before.

torchrun keeps its store from one restart to the next, with the addresses that the processes before have left in it, and
neither a count of restarts nor anything else that is the same on every host and new in every attempt. So the ranks make
a name themselves, and put all keys of theirs behind it.
"""

from __future__ import annotations

import os
import time
from typing import Any

from halfstep.errors import HalfstepError, and_more


def agree(store: Any, rank: int, num: int, timeout_s: float) -> str:
    """The name, on every rank; HalfstepError where some have not come within ``timeout_s``.

    Rank 0 draws it. Another rank may read the one of before, so it draws a word too, and takes the name behind which
    rank 0 repeats that word.
    """
    end = time.monotonic() + timeout_s
    word = os.urandom(6).hex()
    if rank == 0:
        store.set("halfstep/attempt", word)
        left = list(range(1, num))
        pause = 0.005
        while left:
            come = [other for other in left if store.check([f"{word}/word/{other}"])]
            for other in come:
                store.set(f"{word}/again/{other}", store.get(f"{word}/word/{other}"))
            left = [other for other in left if other not in come]
            pause = 0.005 if come else _wait(pause, end, [f"rank {other}" for other in left], num)
        return word
    pause = 0.005
    while True:
        if store.check(["halfstep/attempt"]):
            name: str = store.get("halfstep/attempt").decode()
            store.set(f"{name}/word/{rank}", word)
            key = f"{name}/again/{rank}"
            if store.check([key]) and store.get(key).decode() == word:
                return name
        pause = _wait(pause, end, ["rank 0"], num)


def _wait(pause: float, end: float, missing: list[str], num: int) -> float:
    """Wait for ``pause`` seconds; the next pause."""
    if time.monotonic() > end:
        raise HalfstepError(
            f"a job of {num} ranks",
            f"{and_more(missing)} did not come in time",
            "Look at what is printed there, and whether its host reaches MASTER_ADDR and MASTER_PORT.",
        )
    time.sleep(pause)
    return min(2 * pause, 0.2)
