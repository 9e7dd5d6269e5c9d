"""What state a run is in, from the last of its log and a look at its process."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from typing import Literal, get_args

from halfstep.watch.entry import Entry
from halfstep.watch.rules.stalled import LIMITS, longest_pause

State = Literal["failed", "lost", "stalled", "running", "finished", "empty", "reading"]
STATES: tuple[State, ...] = get_args(State)
"""The first of them that any rank is in is the state of the run; ``reading`` is one whose log is not read yet."""
ENDED: tuple[State, ...] = ("failed", "lost", "finished")


def state_of(
    run: Entry | None,
    end: Entry | None,
    has_steps: bool,
    silent_s: float | None,
    pause_s: float | None,
    limits: Mapping[str, float] = LIMITS,
) -> tuple[State, str]:
    """The state, and why, in words.

    silent_s: seconds since the last entry. pause_s: usual seconds between two steps. None where unknown.
    limits: of the rule ``stalled``, of the run's settings where they are known.
    """
    if end is not None:
        if end.get("state") == "finished":
            return "finished", "the process ended"
        return "failed", str(end.get("reason") or "the process failed and said no reason")
    if run is not None and run.get("host") == platform.node() and _is_gone(run.get("pid")):
        return "lost", f"process {run['pid']} is gone and wrote no end"
    if not has_steps:
        return "empty", "no step has ended yet"
    longest_s = longest_pause(pause_s, limits)
    if silent_s is not None and silent_s > longest_s:
        return "stalled", f"no entry for more than {longest_s:.0f} s"
    return "running", "steps arrive"


def _is_gone(pid: object) -> bool:
    """Whether this machine has no such process; what cannot be told is not gone."""
    if os.name == "nt" or not isinstance(pid, int) or pid <= 0:  # on Windows the question would end the process
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        return False
    return False
