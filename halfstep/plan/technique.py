"""What can be changed to save memory besides the policy, by name: each changes a workload, a policy, or both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from halfstep.errors import HalfstepError
from halfstep.policy import Policy
from halfstep.workload import Workload


@dataclass(frozen=True)
class Technique:
    """name: as a stack lists it. apply: (workload, policy) to the changed pair; the model may be changed in place."""

    name: str
    apply: Callable[[Workload, Policy], tuple[Workload, Policy]]


TECHNIQUES: dict[str, Technique] = {}


def technique_of(name: str) -> Technique:
    """The technique called ``name``; a HalfstepError that lists them all if there is none."""
    found = TECHNIQUES.get(name)
    if found is None:
        raise HalfstepError(f"technique {name!r}", "there is none of this name", f"Use {', '.join(TECHNIQUES)}.")
    return found
