"""Something that another rank has told of, and goes on with."""

from __future__ import annotations

from collections.abc import Mapping

from halfstep.watch.rule import Finding, Rule
from halfstep.watch.window import Window


def check(window: Window, limits: Mapping[str, float]) -> Finding | None:
    troubles = window.ranks[-1]["troubles"]
    if not troubles:
        return None
    more = f"; and {len(troubles) - 1} more" if len(troubles) > 1 else ""
    return Finding(
        f"{troubles[0]}{more}",
        "Make room on that host's disk, or mend it; training goes on meanwhile, and what is told there may be lost.",
        " ".join(troubles),
    )


RULE = Rule(
    name="rank-trouble",
    severity="warning",
    summary="A rank cannot write its log, and goes on without.",
    why="""\
A full disk stops no training: the log of that rank has a gap, which says how many entries are missing, and goes on when
there is room again. But who is told of alerts is told by rank 0, which may be on another host. So each rank posts its
trouble beside its place, once a second, and rank 0 says it, with the name of the rank, its host and its process.
""",
    check=check,
    kinds=("ranks",),
)
