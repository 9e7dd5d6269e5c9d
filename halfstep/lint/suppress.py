"""Comments that silence findings: ``# noqa``, ``# noqa: HS101`` and, for a whole file, ``# halfstep: noqa: HS101``.

The fix of :data:`UNUSED_NOQA` replaces a comment, which is no node of the tree; without code, the comment goes.
"""

from __future__ import annotations

import io
import re
import tokenize
from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from halfstep.lint.finding import Edit, Finding, Span
from halfstep.lint.rule import Problem, Rule
from halfstep.lint.script import Script

CODES = r"[A-Z]+[0-9]+\b(?:[,\s]+[A-Z]+[0-9]+\b)*"
NO_RULE = re.compile(r"HS(?:[0-9]{1,2}|[0-9]{4,})")
DIRECTIVE = re.compile(rf"#\s*(?P<file>halfstep:\s*)?(?i:noqa)\b(?P<colon>\s*:\s*(?P<codes>{CODES})?)?")


def _no_problem(_script: Script) -> Iterator[Problem]:
    return iter(())  # suppress() reports it: it depends on what the other rules found


UNUSED_NOQA = Rule(
    code="HS001",
    name="unused-noqa",
    severity="warning",
    summary="A noqa comment names a rule that finds nothing there.",
    why=(
        "The comment outlived the mistake, or names the wrong line. It would silence the next mistake of its kind on"
        " this line without anyone noticing.\n\n"
        "Only codes of halfstep that were looked for in this run are judged, and beginnings such as `HS1`, which name"
        " no rule here. Codes of other tools, such as `E501`, and a `# noqa` without codes are left alone."
    ),
    bad=("scaler.scale(loss).backward()  # noqa: HS104\n",),
    good=("scaler.scale(loss).backward()\n",),
    check=_no_problem,
    fix="safe",
    fix_note="The code goes from the comment, and the comment when no code is left in it.",
)


@dataclass(frozen=True)
class Directive:
    """One noqa. codes: what it names, empty for every rule. column: where its comment begins, from 0.

    match: where it stands in the comment.
    """

    is_file_wide: bool
    codes: tuple[str, ...]
    line: int
    column: int
    match: re.Match[str]

    def covers(self, code: str) -> bool:
        return not self.codes or code in self.codes


def suppress(findings: Sequence[Finding], text: str, codes: Collection[str], file: str) -> list[Finding]:
    """The findings of ``text`` that no comment silences, and one HS001 for each comment that names a rule in vain.

    ``codes``: the rules that were looked for; a comment is judged by these alone. A finding is silenced on the line
    where it begins, where it ends, or where its statement ends.
    """
    named = [code for match in DIRECTIVE.finditer(text) for code in _codes(match)] if "noqa" in text.lower() else None
    is_judged = UNUSED_NOQA.code in codes and any(_is_judged(code, codes) for code in named or ())
    if named is None or not (findings or is_judged):
        return list(findings)
    try:
        directives, ends = _read(text)
    except (tokenize.TokenError, SyntaxError):
        return list(findings)  # a broken file: its one finding says so
    used: set[tuple[int, str]] = set()
    kept = []
    for finding in findings:
        lines = _lines_of(finding, ends)
        silencing = [
            (at, finding.code)
            for at, directive in enumerate(directives)
            if directive.covers(finding.code) and (directive.is_file_wide or directive.line in lines)
        ]
        used.update(silencing)
        if not silencing:
            kept.append(finding)
    if UNUSED_NOQA.code in codes and not any(d.is_file_wide and d.covers(UNUSED_NOQA.code) for d in directives):
        for at, directive in enumerate(directives):
            unused = [code for code in directive.codes if _is_judged(code, codes) and (at, code) not in used]
            if unused and UNUSED_NOQA.code not in directive.codes:
                kept.append(_unused(directive, unused, file))
    return sorted(kept, key=lambda finding: (finding.line, finding.column, finding.code))


def _read(text: str) -> tuple[list[Directive], list[int]]:
    """The directives of a text, and the last line of each of its statements."""
    directives, ends = [], []
    for token in tokenize.generate_tokens(io.StringIO(text, newline=None).readline):
        if token.type == tokenize.NEWLINE:
            ends.append(token.start[0])
        elif token.type == tokenize.COMMENT:
            for match in DIRECTIVE.finditer(token.string):
                if match["colon"] and not match["codes"]:
                    continue  # "noqa: because ..." names no rule, and is not taken for one that names them all
                directives.append(Directive(bool(match["file"]), _codes(match), *token.start, match))
    return directives, ends


def _codes(match: re.Match[str]) -> tuple[str, ...]:
    return tuple(re.split(r"[,\s]+", match["codes"])) if match["codes"] else ()


def _is_judged(code: str, codes: Collection[str]) -> bool:
    """Whether it is known that ``code`` silences nothing when no finding has it: it was looked for, or is no rule."""
    return code in codes or NO_RULE.fullmatch(code) is not None


def _lines_of(finding: Finding, ends: Sequence[int]) -> set[int]:
    """Where a comment can stand to silence ``finding``; one that spans a whole block is silenced at its head."""
    at = bisect_left(ends, finding.line)
    end = ends[at] if at < len(ends) else finding.line
    return {finding.line, min(finding.end_line, end), end}


def _unused(directive: Directive, unused: Sequence[str], file: str) -> Finding:
    match, line = directive.match, directive.line
    begin = directive.column + match.start()
    return Finding(
        file,
        line,
        begin + 1,
        line,
        begin + len(match[0]),
        UNUSED_NOQA.code,
        UNUSED_NOQA.name,
        f"{', '.join(unused)} silences nothing {'in this file' if directive.is_file_wide else 'here'}",
        UNUSED_NOQA.severity,
        "safe",
        None,
        (_edit(directive, unused),),
    )


def _edit(directive: Directive, unused: Sequence[str]) -> Edit:
    """Takes the unused codes out of the comment, and the comment away when it says nothing else."""
    match, comment = directive.match, directive.match.string
    left = [code for code in directive.codes if code not in unused]
    if left:
        new = f"{comment[: match.start('codes')]}{', '.join(left)}{comment[match.end() :]}"
    else:
        reason = comment[match.end() :].lstrip(" \t,:-")
        new = comment[: match.start()] + (f"# {reason}" if reason and not reason.startswith("#") else reason)
    span = Span(directive.line, directive.column, directive.line, directive.column + len(comment))
    return Edit("replace", span, new.rstrip())
