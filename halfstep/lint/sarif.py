"""Findings as SARIF 2.1.0, for GitHub's code scanning and for editors.

GitHub takes 25,000 results in a run and keeps the 5,000 most severe; errors come first here.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Sequence
from difflib import SequenceMatcher
from itertools import takewhile
from pathlib import Path
from typing import Any
from urllib.parse import quote

from halfstep import __version__
from halfstep.lint.annotations import name_from, whole_message
from halfstep.lint.catalogue import catalogue
from halfstep.lint.finding import Finding
from halfstep.lint.report import STYLES, LintReport
from halfstep.lint.rule import Rule
from halfstep.lint.rule_page import rule_page

MAX_RESULTS = 25_000
MAX_CHARACTERS_OPENED = 1_000_000
"""Findings carry their fix until so much source was rewritten for them: each alone, which takes a second for 100,000
characters."""
ROOT = "%SRCROOT%"
SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"

Mend = Callable[[Finding], Sequence[str] | None]
"""A finding to the lines of its file once it is mended; None when it cannot be."""


def sarif(report: LintReport, root: Path, mend: Mend) -> str:
    """The report as the text of a SARIF file. ``root``: the repository's folder, which files are named from."""
    severities = list(STYLES)
    findings = sorted(report.findings, key=lambda finding: severities.index(finding.severity))  # stable: order by place
    rules = sorted({finding.code for finding in findings})
    seen: Counter[str] = Counter()
    results = []
    num_characters = 0
    for finding in findings[:MAX_RESULTS]:
        lines = report.sources.get((finding.file, finding.cell), ())
        result = _result(finding, rules, lines, root, seen)
        if finding.cell is None and finding.fix is not None:
            num_characters += sum(map(len, lines))
            if num_characters <= MAX_CHARACTERS_OPENED and (mended := mend(finding)) is not None:
                result["fixes"] = [_fix(finding, lines, mended, root)]
        results.append(result)
    run: dict[str, Any] = {
        "tool": {
            "driver": {
                "name": "halfstep lint",
                "semanticVersion": __version__,
                "rules": [_rule(catalogue()[code]) for code in rules],
            }
        },
        "columnKind": "unicodeCodePoints",
        "originalUriBaseIds": {ROOT: {"description": {"text": "The folder of the repository."}}},
        "invocations": [{"executionSuccessful": True, "toolExecutionNotifications": _notes(len(findings))}],
        "results": results,
    }
    return json.dumps({"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2) + "\n"


def _rule(rule: Rule) -> dict[str, Any]:
    page = rule_page(rule)
    return {
        "id": rule.code,
        "name": rule.name,
        "shortDescription": {"text": rule.summary},
        "fullDescription": {"text": rule.why.strip()},
        "help": {"text": page, "markdown": page},
        "defaultConfiguration": {"level": rule.severity},
        "properties": {"tags": ["mixed-precision"], "problem.severity": _github_severity(rule)},
    }


def _github_severity(rule: Rule) -> str:
    return "recommendation" if rule.severity == "note" else rule.severity


def _result(
    finding: Finding, rules: Sequence[str], lines: Sequence[str], root: Path, seen: Counter[str]
) -> dict[str, Any]:
    line = lines[finding.line - 1].strip() if finding.line <= len(lines) else finding.message
    key = hashlib.sha256(f"{finding.code}\0{line}".encode()).hexdigest()[:16]
    place = f"{finding.file}\0{key}"
    seen[place] += 1
    location: dict[str, Any] = {
        "physicalLocation": {"artifactLocation": _artifact(finding, root), "region": _region(finding)}
    }
    if finding.cell is not None:
        location["logicalLocations"] = [{"name": f"cell {finding.cell}"}]
    return {
        "ruleId": finding.code,
        "ruleIndex": rules.index(finding.code),
        "level": finding.severity,
        "message": {"text": whole_message(finding)},
        "locations": [location],
        # Of the line's text and not its number, so that a finding that only moved is known again.
        "partialFingerprints": {"primaryLocationLineHash": f"{key}:{seen[place]}"},
    }


def _artifact(finding: Finding, root: Path) -> dict[str, str]:
    name = name_from(root, finding.file)
    if Path(name).is_absolute():
        return {"uri": Path(name).as_uri()}
    return {"uri": quote(name), "uriBaseId": ROOT}


def _region(finding: Finding) -> dict[str, int]:
    if finding.cell is not None:
        return {"startLine": 1}  # the lines of a cell are none of the notebook file's own
    return {
        "startLine": finding.line,
        "startColumn": finding.column,
        "endLine": finding.end_line,
        "endColumn": finding.end_column + 1,
    }


def _fix(finding: Finding, before: Sequence[str], after: Sequence[str], root: Path) -> dict[str, Any]:
    # The matcher takes time with the square of the lines, and most of them stand before or after the fix.
    same = _num_same(before, after)
    old, new = before[same:], after[same:]
    rest = _num_same(old[::-1], new[::-1])
    changes = SequenceMatcher(None, old[: len(old) - rest], new[: len(new) - rest], autojunk=False).get_opcodes()
    replacements = [
        _replacement(before, after, *(number + same for number in at)) for change, *at in changes if change != "equal"
    ]
    change = {"artifactLocation": _artifact(finding, root), "replacements": replacements}
    return {"description": {"text": f"{finding.name} ({finding.fix} fix)"}, "artifactChanges": [change]}


def _num_same(lines: Sequence[str], others: Sequence[str]) -> int:
    """How many lines they have in common before the first that differs."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(lines, others, strict=False)))


def _replacement(
    before: Sequence[str], after: Sequence[str], begin: int, end: int, new_begin: int, new_end: int
) -> dict[str, Any]:
    """The lines from ``begin`` to ``end``, counted from 0, become others. Nothing ends the last line of a file."""
    region = {"startLine": begin + 1, "startColumn": 1, "endLine": end + 1, "endColumn": 1}
    text = "".join(f"{line}\n" for line in after[new_begin:new_end])
    if end == len(before):
        region |= {"endLine": end, "endColumn": len(before[-1]) + 1}
        text = text.removesuffix("\n")
        if begin and (begin == end or new_begin == new_end):
            region |= {"startLine": begin, "startColumn": len(before[begin - 1]) + 1}
            text = f"\n{text}" if new_begin < new_end else text
    return {"deletedRegion": region, "insertedContent": {"text": text}}


def _notes(num_findings: int) -> list[dict[str, Any]]:
    if num_findings <= MAX_RESULTS:
        return []
    text = f"{num_findings - MAX_RESULTS} more findings are left out: GitHub takes {MAX_RESULTS} in a run."
    return [{"level": "warning", "message": {"text": text}}]
