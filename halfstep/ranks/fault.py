"""Which rank is at fault when a collective has failed: one that is gone, has ended, or has not come to it."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence

from halfstep.errors import HalfstepError, and_more
from halfstep.ranks.progress import Place, Progress

Words = Sequence[str]
"""What, why and what to do, of a HalfstepError."""
NUM_MISSED = 3
"""Posts in a row that a rank which is gone has left out."""
_LOOK = 0.25
"""Between two looks, in beats."""


def is_of_ranks(error: RuntimeError) -> bool:
    """Whether an error is that of a collective, as torch's backends raise it, and not of the computation."""
    return type(error).__name__.startswith("Dist") or "gloo" in str(error).lower()


def fault_of(progress: Progress, error: BaseException) -> HalfstepError:
    """What to raise for the ``error`` of a collective: it names who is at fault, alike on every rank that asks.

    One of the ranks finds out and tells the others, since each would have to read all. It takes NUM_MISSED + 1 beats
    at most, and twice as long where that rank ends meanwhile.
    """
    own = progress.place
    progress.say(f"a collective failed {own.where}", is_victim=True)
    what = f"a collective of rank {own.rank} failed {own.where}"
    said = " ".join(str(error).split())
    places = progress.read([0])
    if places is None:
        return HalfstepError(
            what,
            f"{said[:200]}; which rank is at fault is not known, since the store of the group does not answer",
            "See what the other ranks have printed; the host of rank 0, or of torchrun's store, may be gone.",
        )
    # A session of the first rank is one of all of them, so that what was said before a restart is not read.
    key = f"fault/{places[0].session if places else ''}"
    try:
        found = _shared(progress, key, lambda: judged(progress))
    except Exception:
        found = judged(progress)
    if found is None:
        return HalfstepError(
            what,
            f"{said[:200]}; all {progress.num} ranks are alive and have come to it",
            "Look at the network between hosts; a slow one needs a longer timeout_s in halfstep.distributed.start.",
        )
    return HalfstepError(*found)


def fault_at_stop(progress: Progress) -> HalfstepError | None:
    """Who is at fault when somebody outside ends this rank, as torchrun does when another one has ended.

    None if nobody is known to be: the job itself is ended.
    """
    places = progress.read([0])
    if not places:
        return None
    try:
        found = _shared(progress, f"stop/{places[0].session}", lambda: judged(progress, counts_late=False))
    except Exception:
        return None
    return HalfstepError(*found) if found else None


def end_if_overdue(progress: Progress) -> None:
    """End this process if its device waits in a collective for longer than ``timeout_s``.

    For the thread: the script of a rank on CUDA waits for the device, where no exception reaches it.
    """
    if progress.pending is None or progress.timeout_s is None or progress.fault is not None:
        return
    arrival, begun = progress.pending
    if time.monotonic() - begun < progress.timeout_s or arrival.query():
        return
    error = fault_of(progress, TimeoutError(f"the device has waited in it for {progress.timeout_s:g} s"))
    end_process(progress, f"HalfstepError: {error}")


def end_process(progress: Progress, reason: str) -> None:
    """End this process at once, whatever its script waits for: the log, one line on standard error, status 1."""
    progress.say(reason, is_victim=True)
    progress.end(reason)
    os.write(2, f"[rank{progress.rank}]: {reason}\n".encode())
    os._exit(1)


def _shared(progress: Progress, key: str, find: Callable[[], Words | None]) -> Words | None:
    """What the first rank that asks has found; the others wait for it."""
    store = progress.store
    assert store is not None
    if store.add(f"{key}/asked", 1) > 1:
        end = time.monotonic() + (NUM_MISSED + 2) * progress.beat_s
        while time.monotonic() < end:
            if store.check([key]):
                words: Words | None = json.loads(store.get(key))
                return words
            time.sleep(_LOOK * progress.beat_s)
    found = find()
    store.set(key, json.dumps(found))
    return found


def judged(progress: Progress, counts_late: bool = True) -> Words | None:
    """What, why and what to do about who is at fault, from what ranks post for a while; None if nobody is.

    counts_late: whether a rank that has not come as far as the others is at fault.
    """
    places = progress.read() or {}
    missing = [rank for rank in range(progress.num) if rank not in places]
    first = {rank: place.beat for rank, place in places.items()}
    end = time.monotonic() + (NUM_MISSED + 0.5) * progress.beat_s
    while True:
        silent = [place for place in _well(places) if place.beat == first[place.rank] and place.rank != progress.rank]
        late = _late(places) if counts_late else []
        if missing or not (silent or late) or time.monotonic() > end:
            break
        time.sleep(_LOOK * progress.beat_s)
        places |= progress.read({place.rank for place in [*silent, *late]}) or {}
    ended = [place for place in places.values() if place.fault is not None and not place.is_victim]
    failed = [place for place in ended if place.fault]
    if missing:
        return (
            and_more([f"rank {rank}" for rank in missing]),
            "it has opened no process group and built no Stepper, while the others wait for it",
            "Look whether its process started at all, and what it printed.",
        )
    if failed:
        return f"{failed[0]} failed {failed[0].where}", str(failed[0].fault), "The others cannot go on without it."
    if silent:
        return (
            f"{_names(silent)} {'is' if len(silent) == 1 else 'are'} gone",
            f"last seen {_wheres(silent)}, then silent for {NUM_MISSED * progress.beat_s:g} s, with others in step "
            f"{max(place.step for place in places.values())}",
            "If it printed nothing it was killed: look for a lack of memory in the log of its kernel, or for who ended "
            "it. torchrun --max-restarts=N starts all ranks anew.",
        )
    if ended and counts_late:
        return (
            f"{_names(ended)} came to the end of the script",
            f"last seen {_wheres(ended)}, while others wait for another step",
            "Give every rank as many micro-batches; one without data returns (0 * model(x).sum(), 0), which weighs "
            "nothing.",
        )
    if late:
        limit = "" if progress.timeout_s is None else f", which may take {progress.timeout_s:g} s"
        return (
            f"{_names(late)} {'has' if len(late) == 1 else 'have'} not come to a collective",
            f"{late[0].where} for {late[0].for_s:.0f} s, while others wait in it{limit}",
            "Look at what it waits for: its data loader, an evaluation, the disk. What takes so long while all is well "
            "needs a longer timeout_s in halfstep.distributed.start.",
        )
    return None


def _well(places: Mapping[int, Place]) -> list[Place]:
    """Those that said nothing of a fault."""
    return [place for place in places.values() if place.fault is None]


def _late(places: Mapping[int, Place]) -> list[Place]:
    """Those that could go on and have not come as far as the one that has come farthest."""
    farthest = max(map(_reached, places.values()), default=())
    return [place for place in _well(places) if _reached(place) < farthest]


def _reached(place: Place) -> tuple[float, ...]:
    return place.step, place.is_inside, 0.0 if math.isnan(place.num_calls) else place.num_calls


def _names(places: Sequence[Place]) -> str:
    return and_more([str(place) for place in places])


def _wheres(places: Sequence[Place]) -> str:
    return and_more(list(dict.fromkeys(place.where for place in places)))
