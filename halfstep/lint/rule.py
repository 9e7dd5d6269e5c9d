"""A rule: what it finds, why it matters, examples that are its tests, and how it is mended."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from halfstep.lint.finding import Edit, Finding, Safety, Severity, Span


@dataclass(frozen=True)
class Problem:
    """What a rule yields: the node at fault, one line for this place, and the edits that mend it."""

    node: ast.AST
    message: str
    edits: tuple[Edit, ...] = ()
    fix: Safety | None = None


@dataclass(frozen=True)
class Rule:
    """One kind of mistake. A file of ``halfstep/lint/rules`` holds one, under the name ``RULE``.

    code: HS1xx the result is wrong, HS2xx slow or memory lost, HS3xx fragile, HS4xx deprecated.
    name: in kebab-case. summary: one sentence for lists. why: Markdown paragraphs with the numbers.
    bad: sources in which the rule reports exactly the lines that end in ``# HSxxx``. good: sources in which it, and
    every other rule, is silent. fix: the safety of its fix, None when it has none; fix_note says what the fix does
    and, for an unsafe one, why it is unsafe.
    """

    code: str
    name: str
    severity: Severity
    summary: str
    why: str
    bad: tuple[str, ...]
    good: tuple[str, ...]
    check: Callable[[Any], Iterator[Problem]]
    fix: Safety | None = None
    fix_note: str = ""
    reads: str = "python"
    """``python`` for a ``check`` that takes a :class:`~halfstep.lint.script.Script`, ``deepspeed`` for one that takes a
    :class:`~halfstep.lint.config.Config`."""

    def finding(self, problem: Problem, span: Span, file: str) -> Finding:
        """``problem`` of this rule, as it is reported."""
        return Finding(
            file,
            span.line,
            span.column + 1,
            span.end_line,
            span.end_column,
            self.code,
            self.name,
            problem.message,
            self.severity,
            problem.fix,
            None,
            problem.edits,
        )

    def __post_init__(self) -> None:
        assert self.reads in {"python", "deepspeed"}, self.reads
        assert not (self.fix == "unsafe" and not self.fix_note), f"{self.code}: an unsafe fix says why"
