"""What lint reports: one mistake at one place, and the edits that mend it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Severity = Literal["error", "warning", "note"]
Safety = Literal["safe", "unsafe"]


@dataclass(frozen=True, order=True)
class Span:
    """A piece of source: lines from 1, columns in characters from 0, the end exclusive."""

    line: int
    column: int
    end_line: int
    end_column: int


@dataclass(frozen=True)
class Edit:
    """One change of source, as a value that travels between processes.

    ``replace``: the expression or the statement at ``span`` becomes ``code``; a ``def`` or ``class`` takes its
    decorators with it, and a comment is replaced as text. ``delete``: the statement at ``span`` goes. ``before`` and
    ``after``: ``code``, one or more statements, goes before or after the statement at ``span``, indented like it.
    ``import``: ``code`` is an import statement that the module needs; ``span`` is not read.
    """

    action: Literal["replace", "delete", "before", "after", "import"]
    span: Span
    code: str = ""


@dataclass(frozen=True)
class Finding:
    """file: as it was given. cell: the number from 1 of a notebook's code cell, whose lines are counted from its top.

    line: from 1. column: in characters from 1, as editors count. ``edits`` mend it when ``fix`` is not None; all of
    them are applied, or none.
    """

    file: str
    line: int
    column: int
    end_line: int
    end_column: int
    code: str
    name: str
    message: str
    severity: Severity
    fix: Safety | None = None
    cell: int | None = None
    edits: tuple[Edit, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return {
            "file": self.file,
            "cell": self.cell,
            "line": self.line,
            "column": self.column,
            "end_line": self.end_line,
            "code": self.code,
            "name": self.name,
            "message": self.message,
            "severity": self.severity,
            "fix": self.fix,
        }
