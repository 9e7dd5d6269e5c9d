"""The table of docs/peers.md: a row for each fault, a column for each library, a cell for what was seen."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType

from peers import (
    bf16_guard,
    changed_in_region,
    found_inf_two,
    inf_clipped,
    overflow_in_window,
    ragged_counts,
    scale_exhausted,
    scheduler_on_skip,
    short_window,
    state_formats,
    unsupported_format,
)
from peers.columns import COLUMNS, Seen, look, version_of

FAULTS = (
    scale_exhausted,
    inf_clipped,
    found_inf_two,
    overflow_in_window,
    scheduler_on_skip,
    state_formats,
    bf16_guard,
    unsupported_format,
    changed_in_region,
    short_window,
    ragged_counts,
)

seen: Callable[[ModuleType, str], Seen] = functools.cache(look)
"""What a library did with a fault; each is run once in a process."""


def title(fault: ModuleType) -> str:
    assert fault.__doc__
    return fault.__doc__.splitlines()[0].removesuffix(".")


def lines() -> list[str]:
    """Markdown, a line for each row."""
    rows = [["", *COLUMNS], ["---"] * (len(COLUMNS) + 1)]
    for number, fault in enumerate(FAULTS, 1):
        cells = [seen(fault, column).words if version_of(column) else "not installed" for column in COLUMNS]
        rows.append([f"{number}. {title(fault)}", *cells])
    return ["| " + " | ".join(row) + " |" for row in rows]
