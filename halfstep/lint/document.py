"""One document: Python, a notebook or a DeepSpeed configuration, from a file, an editor or standard input."""

from __future__ import annotations

import ast
import io
import json
import sys
import tokenize
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path, PurePath

from halfstep.lint.catalogue import CANNOT_PARSE, LINT_FAILED
from halfstep.lint.check import check_source
from halfstep.lint.finding import Finding
from halfstep.lint.notebook import Notebook, read_notebook
from halfstep.lint.rule import Rule
from halfstep.lint.suppress import suppress

UNREADABLE = (SyntaxError, ValueError, LookupError, RecursionError, MemoryError)
"""What decoding and parsing raise for a file that is at fault itself; the last two where it is nested too deeply."""


def read_source(path: str | Path) -> str:
    """The text of a file, its line ends as they are: Python as PEP 263 says, notebooks and JSON in UTF-8, no mark.

    Raises OSError, and SyntaxError, ValueError or LookupError for a file that is not in the encoding it should be in.
    """
    return decode(Path(path).read_bytes(), str(path))


def decode(content: bytes, file: str) -> str:
    """As :func:`read_source`, for what a file named ``file`` holds."""
    if PurePath(file).suffix in (".ipynb", ".json"):
        return content.decode("utf-8-sig")
    return content.decode(encoding_of(content))


def encoding_of(content: bytes) -> str:
    """What Python takes for the encoding of a source, with its mark if it has one."""
    encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
    return encoding


def lint_bytes(content: bytes, file: str, rules: Sequence[Rule]) -> list[Finding]:
    """As :func:`lint_text`; an encoding that is wrong is HS000 too."""
    try:
        text = decode(content, file)
    except UNREADABLE as error:
        return [cannot_parse(file, error)]
    return lint_text(text, file, rules)


def lint_text(text: str, file: str, rules: Sequence[Rule]) -> list[Finding]:
    """What ``rules`` find in a text and no comment silences, in the order of lines.

    The suffix of ``file`` says what the text is. One that does not parse is one finding, HS000; a rule that fails on it
    is one, HS002. In a notebook, findings are placed in their cells; their edits hold for :attr:`Notebook.source`.
    """
    suffix = PurePath(file).suffix
    if suffix == ".json":
        return _lint_config(text, file, rules)
    if suffix != ".ipynb":
        return lint_python(text, file, rules)
    try:
        notebook = read_notebook(text)
    except UNREADABLE as error:
        return [cannot_parse(file, error)]
    if notebook is None or not notebook.cells:
        return []
    return [_in_cell(finding, notebook) for finding in lint_python(notebook.source, file, rules)]


def lint_python(text: str, file: str, rules: Sequence[Rule]) -> list[Finding]:
    """As :func:`lint_text`, for Python and for the module of a notebook."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of escapes that are not valid: another linter's matter
        findings = _guarded(lambda some: check_source(text, file, some), lambda: ast.parse(text, file), file, rules)
    if any(finding.code == CANNOT_PARSE.code for finding in findings):
        return findings
    return suppress(findings, text, {rule.code for rule in rules}, file)


def _lint_config(text: str, file: str, rules: Sequence[Rule]) -> list[Finding]:
    from halfstep.lint.config import check_config

    return _guarded(lambda some: check_config(text, file, some), lambda: json.loads(text), file, rules)


def _guarded(
    check: Callable[[Sequence[Rule]], list[Finding]], parse: Callable[[], object], file: str, rules: Sequence[Rule]
) -> list[Finding]:
    """``check(rules)``; where that fails, what is wrong with the file, or each rule alone, to see which one fails."""
    try:
        return check(rules)
    except Exception:
        pass
    try:
        parse()
    except UNREADABLE as error:
        return [cannot_parse(file, error)]
    findings = []
    for rule in rules:
        try:
            findings += check([rule])
        except Exception as error:
            findings.append(lint_failed(file, f"{rule.code} {rule.name}", f"{type(error).__name__}: {error}"))
    return sorted(findings, key=lambda finding: (finding.line, finding.column, finding.code))


def cannot_parse(file: str, error: BaseException) -> Finding:
    """HS000: ``file`` cannot be read or parsed because of ``error``."""
    line, column, why = 1, 1, str(error) or type(error).__name__
    if isinstance(error, OSError):
        why = f"it cannot be read: {error.strerror}"
    elif isinstance(error, UnicodeDecodeError):
        line = error.object.count(b"\n", 0, error.start) + 1
        why = f"it is not {error.encoding} ({error.reason}); name its encoding in the first line, as # coding: latin-1"
    elif isinstance(error, SyntaxError):
        # Python counts some errors at the end of a file from line or column 0.
        line, column = max(error.lineno or 1, 1), max(error.offset or 1, 1)
        why = f"Python {sys.version_info.major}.{sys.version_info.minor} cannot parse it: {error.msg}"
    elif isinstance(error, json.JSONDecodeError):
        line, column, why = error.lineno, error.colno, f"it is not JSON: {error.msg}"
    elif isinstance(error, RecursionError | MemoryError):
        why = "it is nested too deeply"
    return _whole_file(file, CANNOT_PARSE, why, line, column)


def lint_failed(file: str, who: str, why: str) -> Finding:
    """HS002: ``who``, a part of ours, failed on ``file``."""
    message = " ".join(f"{who} failed here ({why}), a fault of halfstep: please report it with the file".split())
    return _whole_file(file, LINT_FAILED, message)


def _whole_file(file: str, rule: Rule, message: str, line: int = 1, column: int = 1) -> Finding:
    return Finding(file, line, column, line, column, rule.code, rule.name, message, rule.severity)


def _in_cell(finding: Finding, notebook: Notebook) -> Finding:
    cell, line = notebook.place(finding.line)
    last_cell, last = notebook.place(finding.end_line)
    return replace(finding, cell=cell, line=line, end_line=last if last_cell == cell else line)
