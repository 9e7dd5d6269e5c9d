"""Proposals, in order of cost, each tried on the captured step before it is made."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from halfstep.errors import HalfstepError
from halfstep.policy import Policy
from halfstep.report import Cell, Table

MENDS, DOES_NOT, NOT_TRIED = "mends it", "does not", "not tried"
_TONES = {MENDS: "good", DOES_NOT: "bad", NOT_TRIED: "open"}


@dataclass(frozen=True)
class Advice:
    """What to do, the policy to do it with (None where it is no policy), and what came of trying it."""

    text: str
    policy: str | None
    result: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def try_policies(
    proposals: Iterable[tuple[str, Policy]], mends: Callable[[Policy], bool], limit: int = 1
) -> tuple[Advice, ...]:
    """Try policies, cheapest first, until ``limit`` of them mend it; the rest is marked as not tried.

    A policy that this device refuses is not tried either.
    """
    advice: list[Advice] = []
    for text, policy in proposals:
        result = NOT_TRIED
        if sum(a.result == MENDS for a in advice) < limit:
            try:
                result = MENDS if mends(policy) else DOES_NOT
            except HalfstepError as error:
                text = f"{text} ({error.why})"
        advice.append(Advice(text, str(policy), result))
    return tuple(advice)


def advice_table(advice: Iterable[Advice]) -> Table:
    """The table that ends a report."""
    rows = [(a.text, a.policy or "-", Cell(a.result, _TONES[a.result])) for a in advice]
    return Table(("what to do", "policy", "tried here"), rows, title="Advice")
