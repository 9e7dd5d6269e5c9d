"""From places in a text, counted by lines, to its characters."""

from __future__ import annotations

import re

from halfstep.lint.finding import Span


class Offsets:
    """The offsets of one text. Its lines end as Python's do: a form feed or U+2028 ends none."""

    def __init__(self, text: str) -> None:
        self._starts = [0, *(match.end() for match in re.finditer("\r\n|\r|\n", text))]

    def begin(self, span: Span) -> int:
        """Where ``span`` begins."""
        return self._starts[span.line - 1] + span.column

    def end(self, span: Span) -> int:
        """The first character after ``span``."""
        return self._starts[span.end_line - 1] + span.end_column
