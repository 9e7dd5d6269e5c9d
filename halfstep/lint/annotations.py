"""Findings as workflow commands of GitHub Actions, which shows each one at its line in a pull request."""

from __future__ import annotations

from pathlib import Path

from halfstep.lint.finding import Finding
from halfstep.lint.report import STYLES, LintReport

MAX_OF_A_KIND = 10
"""GitHub shows this many errors, warnings and notices of a step, and drops the rest without a word."""

KINDS = {"error": "error", "warning": "warning", "note": "notice"}


def workflow_commands(report: LintReport, root: Path) -> str:
    """One command a finding, errors first, then how many were left out, and the summary as plain text.

    ``root``: the repository's folder, which files are named from.
    """
    lines = []
    for severity in STYLES:
        findings = [finding for finding in report.findings if finding.severity == severity]
        lines += [_command(finding, root) for finding in findings[:MAX_OF_A_KIND]]
        if len(findings) > MAX_OF_A_KIND:
            lines.append(f"{len(findings) - MAX_OF_A_KIND} more of severity {severity}")
    return "\n".join([*lines, report.summary()]) + "\n"


def name_from(root: Path, file: str) -> str:
    """``file`` as it is called from ``root``, with forward slashes; one that lies elsewhere keeps its whole path."""
    path = Path(file).resolve()
    return (path.relative_to(root.resolve()) if path.is_relative_to(root.resolve()) else path).as_posix()


def whole_message(finding: Finding) -> str:
    """The message; for a notebook with its cell and line, which are none of the file's own lines."""
    return finding.message if finding.cell is None else f"cell {finding.cell}, line {finding.line}: {finding.message}"


def _command(finding: Finding, root: Path) -> str:
    where = {"file": name_from(root, finding.file)}
    if finding.cell is None:
        where |= {"line": str(finding.line), "endLine": str(finding.end_line)}
        if finding.line == finding.end_line:  # GitHub takes columns within one line only
            where |= {"col": str(finding.column), "endColumn": str(max(finding.column, finding.end_column))}
    where["title"] = f"{finding.code} {finding.name}"
    properties = ",".join(f"{key}={_escape(value, ',:')}" for key, value in where.items())
    return f"::{KINDS[finding.severity]} {properties}::{_escape(whole_message(finding))}"


def _escape(text: str, more: str = "") -> str:
    for character in "%\r\n" + more:  # the percent sign first: the others bring new ones
        text = text.replace(character, f"%{ord(character):02X}")
    return text
