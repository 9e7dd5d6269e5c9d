"""What every report is: a headline, tables, sentences; printed, or written as strict JSON.

A page is drawn from the same parts, by ``halfstep.page``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from io import StringIO
from typing import Any

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

TONES = {"good": "green", "bad": "bold red", "open": "yellow", "": ""}
"""How a cell is meant, and the style that the terminal gives it."""


@dataclass(frozen=True)
class Cell:
    """One cell of a table that means good, bad or open."""

    text: str
    tone: str = ""

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Table:
    """columns: titles; one that begins with ``>`` is set to the right. rows: cells, as text or :class:`Cell`."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str | Cell]]
    title: str = ""
    note: str = ""


@dataclass(frozen=True)
class Sheet:
    """A report as people read it: one sentence, what it is about, tables, and closing sentences."""

    headline: str
    facts: str = ""
    tables: Sequence[Table] = ()
    closing: Sequence[str] = field(default_factory=tuple)


@dataclass(frozen=True)
class Figure:
    """A chart for the page, with what it shows: a Plotly figure as plain ``data`` and ``layout``, ready for JSON."""

    title: str
    note: str
    data: Sequence[dict[str, Any]]
    layout: dict[str, Any]


class Report:
    """A report gives its :meth:`sheet` and :meth:`to_dict`; how it is printed follows."""

    def sheet(self) -> Sheet:
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """Strict JSON: NaN and inf are the strings "NaN", "Infinity", "-Infinity"; what is not known is null."""
        raise NotImplementedError

    @property
    def found(self) -> bool:
        """Whether the tool found what it looks for: exit status 1."""
        raise NotImplementedError

    def figures(self) -> Mapping[str, Figure]:
        """What the page draws, each under a short name of its own."""
        return {}

    def render(self, console: Console) -> None:
        sheet = self.sheet()
        console.print(Text(sheet.headline, style="bold"), soft_wrap=not console.is_terminal)
        if sheet.facts:
            console.print(Text(sheet.facts), soft_wrap=not console.is_terminal)
        for table in sheet.tables:
            console.print()
            if table.title:
                console.print(Text(table.title, style="bold"))
            console.print(_rich(table))
            if table.note:
                console.print(Text(table.note), soft_wrap=not console.is_terminal)
        if sheet.closing:
            console.print()
        for sentence in sheet.closing:
            console.print(Text(sentence), soft_wrap=not console.is_terminal)

    def __str__(self) -> str:
        log = Console(file=StringIO(), width=200, color_system=None, force_terminal=False, highlight=False)
        self.render(log)
        assert isinstance(log.file, StringIO)
        return "\n".join(line.rstrip() for line in log.file.getvalue().splitlines())


def _rich(table: Table) -> RichTable:
    drawn = RichTable(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for column in table.columns:
        drawn.add_column(column.removeprefix(">"), justify="right" if column.startswith(">") else "left")
    for row in table.rows:
        drawn.add_row(*(Text(str(cell), TONES[cell.tone] if isinstance(cell, Cell) else "") for cell in row))
    return drawn


def json_number(value: Any) -> Any:
    """``value`` for strict JSON, which has no word for NaN and inf: they become strings, never null and never 0."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def number(value: float | None, spec: str = ".4g") -> str:
    """``value`` for a reader; a dash for what is not known."""
    return "-" if value is None else format(value, spec)


def count_text(count: int, noun: str) -> str:
    """One seed, two seeds."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
