"""What ``halfstep lint`` does once its flags are read."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from rich.console import Console
from rich.markdown import Markdown

from halfstep.errors import HalfstepError
from halfstep.files import write_whole
from halfstep.lint.annotations import workflow_commands
from halfstep.lint.cache import Cache
from halfstep.lint.catalogue import catalogue
from halfstep.lint.document import decode, lint_python, lint_text, read_source
from halfstep.lint.finding import Finding
from halfstep.lint.mend import Mended, Rewrite, Rewritten, mend
from halfstep.lint.notebook import read_notebook
from halfstep.lint.report import LintReport, Sources, draw, place_of, source_lines
from halfstep.lint.rule import Rule
from halfstep.lint.rule_page import find_rule, rule_page
from halfstep.lint.runner import lint_files
from halfstep.lint.sarif import sarif
from halfstep.lint.settings import Settings, check_selectors, find_settings
from halfstep.lint.tree import find_files
from halfstep.lint.watch import SECONDS_BETWEEN_LOOKS, watch

FORMATS = ("text", "json", "sarif", "github")
STDIN = "-"

Targets = Mapping[str, frozenset[str]]
"""File to the codes that are looked for in it."""


@dataclass(frozen=True)
class Call:
    """The command line, flag by flag; None and False stand for a flag that was not given."""

    paths: Sequence[str] = ()
    select: Sequence[str] | None = None
    ignore: Sequence[str] | None = None
    exclude: Sequence[str] | None = None
    fix: bool = False
    unsafe_fixes: bool = False
    diff: bool = False
    migrate: bool = False
    to_halfstep: bool = False
    format: str = "text"
    json_file: str | None = None
    statistics: bool = False
    explain: str | None = None
    watch: bool = False
    no_cache: bool = False
    stdin_filename: str | None = None

    @property
    def reads_stdin(self) -> bool:
        return STDIN in self.paths

    @property
    def rewrites(self) -> bool:
        return self.fix or self.unsafe_fixes or self.diff or self.migrate or self.to_halfstep


def lint(call: Call) -> int:
    """Do what the call says, print it, and return the exit status: 1 when more than notes is found, else 0.

    Raises HalfstepError for a call that cannot work.
    """
    if call.explain is not None:
        _explain(find_rule(call.explain))
        return 0
    _check(call)
    if call.watch:
        _watch(call)
    if call.reads_stdin:
        return _lint_stdin(call)
    targets = _targets(call)
    found = lint_files(targets, None if call.no_cache else Cache()).findings
    mended = _mend_files(call, targets, found) if call.rewrites else []
    if call.diff:
        return _show_difference(mended, LintReport(found, num_files=len(targets)))
    for file in mended:
        file.write()
    again = {file.file: lint_text(file.after, file.file, _rules(targets[file.file])) for file in mended}
    findings = [finding for finding in found if finding.file not in again]
    findings += [finding for findings_of_file in again.values() for finding in findings_of_file]
    findings.sort(key=lambda finding: finding.file)
    return _show(call, findings, len(targets), sum(file.num_fixed for file in mended), {}, sys.stdout)
