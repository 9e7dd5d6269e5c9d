"""What lint found: printed with the lines of source, counted, or as JSON."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from halfstep.lint.finding import Finding, Safety, Severity
from halfstep.report import Report, Sheet, Table, count_text

STYLES: Mapping[Severity, str] = {"error": "bold red", "warning": "yellow", "note": "cyan"}
FIX_FLAGS: Mapping[Safety, str] = {"safe": "--fix", "unsafe": "--unsafe-fixes"}
NUM_LINES_AROUND = 2
MAX_COLUMNS = 120
"""What is shown of a line of source at most; of a longer one, the part around the mistake."""
MIN_COLUMNS = 40
CUT = "..."

Sources = Mapping[tuple[str, int | None], Sequence[str]]
"""File and cell to its lines; cell is None but in a notebook."""


@dataclass(frozen=True)
class LintReport(Report):
    """findings: in the order in which they are shown. sources: the lines of each file and cell that has a finding.

    num_fixed: how many findings are gone because they were mended. counts_only: print one line a rule.
    """

    findings: Sequence[Finding]
    sources: Sources = field(default_factory=dict)
    num_files: int = 0
    num_fixed: int = 0
    counts_only: bool = False

    @property
    def found(self) -> bool:
        """Whether anything but notes was found; a note is advice that fails no build."""
        return any(finding.severity != "note" for finding in self.findings)

    def to_dict(self) -> Any:
        """A list of findings, each as :meth:`Finding.to_dict` gives it."""
        return [finding.to_dict() for finding in self.findings]

    def json(self) -> str:
        return json.dumps(self.to_dict(), indent=2) + "\n"

    def summary(self) -> str:
        """One sentence: how many of each severity, and how many can be fixed by which flag."""
        counts = Counter(finding.severity for finding in self.findings)
        found = ", ".join(count_text(counts[severity], severity) for severity in STYLES if counts[severity])
        text = f"{found or 'nothing found'} in {count_text(self.num_files, 'file')}"
        if self.num_fixed:
            text += f", {self.num_fixed} fixed"
        numbers = Counter(finding.fix for finding in self.findings)
        fixes = [f"{numbers[safety]} with {flag}" for safety, flag in FIX_FLAGS.items() if numbers[safety]]
        return text + (f"; can be fixed: {', '.join(fixes)}" if fixes else "")

    def sheet(self) -> Sheet:
        counts = Counter((finding.code, finding.name) for finding in self.findings)
        rows = [(str(number), code, name) for (code, name), number in sorted(counts.items(), key=_most_first)]
        return Sheet(self.summary(), tables=[Table([">count", "code", "name"], rows)] if rows else ())

    def render(self, console: Console) -> None:
        if self.counts_only:
            super().render(console)
            return
        for line in self._lines(console.width):
            console.print(line, soft_wrap=True)

    def __str__(self) -> str:
        if self.counts_only:
            return super().__str__()
        return "\n".join(line.plain.rstrip() for line in self._lines())

    def _lines(self, width: int | None = None) -> Iterator[Text]:
        for finding in self.findings:
            yield from draw(finding, self.sources.get((finding.file, finding.cell), ()), width)
            yield Text()
        yield Text(self.summary(), "bold")


def source_lines(text: str) -> list[str]:
    """The lines of a text as Python counts them; ``splitlines`` also breaks at form feeds and rarer characters."""
    return re.split(r"\r\n|\r|\n", text)


def place_of(finding: Finding) -> str:
    """``file:line:column``, with the cell in between for a notebook."""
    cell = "" if finding.cell is None else f"cell {finding.cell}:"
    return f"{finding.file}:{cell}{finding.line}:{finding.column}"


def draw(finding: Finding, lines: Sequence[str], width: int | None = None) -> list[Text]:
    """A finding with the lines around it and carets under its first line; without ``lines``, the finding alone.

    width: of the terminal in characters; None where there is none.
    """
    style, gutter = STYLES[finding.severity], 1
    shown = [Text.assemble((place_of(finding), "bold"), ": ", (finding.code, style), f" {finding.message}")]
    if 0 < finding.line <= len(lines):
        first, last = max(1, finding.line - NUM_LINES_AROUND), min(len(lines), finding.line + NUM_LINES_AROUND)
        while first < finding.line and not lines[first - 1].strip():
            first += 1
        while last > finding.line and not lines[last - 1].strip():
            last -= 1
        gutter = len(str(last))
        columns = MAX_COLUMNS if width is None else max(MIN_COLUMNS, min(MAX_COLUMNS, width - gutter - len(" | ")))
        shown.append(Text(f"{'':{gutter}} |", "blue"))
        for number in range(first, last + 1):
            line = lines[number - 1]
            if number != finding.line:
                shown.append(Text.assemble((f"{number:{gutter}} | ", "blue"), _cut(line, 0, columns)))
                continue
            end = finding.end_column if finding.end_line == finding.line else len(line.rstrip())
            begin = _begin(line, finding.column - 1, end, columns)
            code, before = _cut(line, begin, columns), finding.column - 1 - begin + (len(CUT) if begin else 0)
            carets = _carets(code, before, min(before + end - finding.column + 1, len(code)), style)
            shown.append(Text.assemble((f"{number:{gutter}} | ", "blue"), code))
            shown.append(Text.assemble((f"{'':{gutter}} | ", "blue"), carets))
    if finding.fix is not None:
        shown.append(Text.assemble((f"{'':{gutter}} = fix: ", "blue"), f"{finding.fix}, {FIX_FLAGS[finding.fix]}"))
    return shown


def _begin(line: str, start: int, end: int, columns: int) -> int:
    """Where to begin a line so that its characters from ``start`` to ``end`` are seen, or their first ones."""
    if len(line) <= columns or end <= columns or start <= columns // 3:
        return 0
    return min(start, max(start - columns // 3, end - columns)) if end - start < columns else start


def _cut(line: str, begin: int, columns: int) -> str:
    """``columns`` characters of a line from ``begin``, with marks where it goes on."""
    shown = line[begin : begin + columns]
    return (CUT if begin else "") + shown + (CUT if begin + columns < len(line) else "")


def _carets(line: str, begin: int, end: int, style: str) -> Text:
    # A tab stays a tab and a wide character is two blanks, so that the carets stand under what they mean.
    indent = "".join("\t" if character == "\t" else " " * cell_len(character) for character in line[:begin])
    return Text.assemble(indent, ("^" * max(1, cell_len(line[begin:end])), style))


def _most_first(item: tuple[tuple[str, str], int]) -> tuple[int, tuple[str, str]]:
    return -item[1], item[0]
