"""Mend source: the edits of findings, applied and checked by linting the result again."""

from __future__ import annotations

import ast
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from halfstep.errors import HalfstepError
from halfstep.lint.finding import Edit, Finding

MAX_ROUNDS = 10

Lint = Callable[[str, str], list[Finding]]
"""(text, file) to what is found in it."""

Refusal = tuple[Finding, str]
"""A finding that stays, and why its fix was not applied."""

_Group = list[Finding]
"""Findings that the same edits mend."""


@dataclass(frozen=True)
class Fixed:
    """A text after its fixes, what they mended, and which of them were refused, each with the reason."""

    text: str
    applied: list[Finding] = field(default_factory=list)
    refused: list[Refusal] = field(default_factory=list)


def fix_source(text: str, file: str, lint: Lint, unsafe: bool = False) -> Fixed:
    """Apply the safe fixes that ``lint`` offers for ``text``, and with ``unsafe`` the others too.

    All edits of a finding are applied or none. Fixes that overlap are applied one after the other, with a new lint in
    between. A fix stays only when its result parses, its finding is gone and no other has come; fixing the result again
    changes nothing. Raises HalfstepError when libcst, which edits, is not installed.
    """
    applied: list[Finding] = []
    for _ in range(MAX_ROUNDS):
        fixes = _Round(text, file, lint, unsafe)
        text, good = fixes.mend()
        if not good:
            return Fixed(text, applied, fixes.refused)
        applied += [finding for group in good for finding in group]
    left = [finding for group in _Round(text, file, lint, unsafe).groups for finding in group]
    return Fixed(text, applied, [(finding, f"more than {MAX_ROUNDS} rounds of fixes") for finding in left])


class _Round:
    """The fixes of one text that do not touch each other."""

    def __init__(self, text: str, file: str, lint: Lint, unsafe: bool) -> None:
        self.text, self.file, self.lint = text, file, lint
        findings = lint(text, file)
        self.num_before = Counter(finding.code for finding in findings)
        groups: dict[tuple[Edit, ...], _Group] = {}
        for finding in findings:
            if finding.edits and (finding.fix == "safe" or (unsafe and finding.fix == "unsafe")):
                groups.setdefault(finding.edits, []).append(finding)
        self.groups = list(groups.values())
        self.refused: list[Refusal] = []

    def mend(self) -> tuple[str, list[_Group]]:
        """The text with fixes that are good together, and the groups that they mend.

        A fix that touches another waits for the next round; when nothing else is applied it is tried by itself.
        """
        waiting = self.groups
        while waiting:
            batch, waiting = _apart(waiting)
            text, good = self._good(batch)
            if good:
                return text, good
        return self.text, []

    def _good(self, batch: list[_Group]) -> tuple[str, list[_Group]]:
        """The part of ``batch`` that can be applied together, after the text with it."""
        text, why = self._apply(batch)
        if why is None:
            return text, batch
        if len(batch) == 1:
            self.refused += [(finding, why) for finding in batch[0]]
            return self.text, []
        left = self._good(batch[: len(batch) // 2])
        right = self._good(batch[len(batch) // 2 :])
        if not left[1] or not right[1]:
            return left if left[1] else right
        both = left[1] + right[1]
        text, why = self._apply(both)
        return (text, both) if why is None else left

    def _apply(self, batch: list[_Group]) -> tuple[str, str | None]:
        """The text with the fixes of ``batch``, and why it may not stay, or None."""
        edits = list(dict.fromkeys(edit for group in batch for edit in group[0].edits))
        text, why = edited(self.text, edits)
        if why is not None:
            return text, why
        num_mended = Counter(finding.code for group in batch for finding in group)
        after = self.lint(text, self.file)
        num_after = Counter(finding.code for finding in after)
        for finding in after:
            if num_after[finding.code] > self.num_before[finding.code]:
                return text, f"it would bring {finding.code} {finding.name} in line {finding.line}: {finding.message}"
        for code, num in num_mended.items():
            if num_after[code] > self.num_before[code] - num:
                return text, f"{code} would still be found"
        return text, None


def edited(text: str, edits: Sequence[Edit]) -> tuple[str, str | None]:
    """``text`` with ``edits`` in it, and why that is no good, or None. Raises HalfstepError without libcst."""
    try:
        from halfstep.lint.fix_edits import CannotEdit, apply_edits
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "libcst":
            raise
        raise HalfstepError(
            "a fix", "it needs libcst, which is not installed", "Run: pip install 'halfstep[lint]'"
        ) from None
    try:
        after = apply_edits(text, edits)
    except CannotEdit as error:
        return text, str(error)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of escapes that are not valid, which were there before
        try:
            ast.parse(after)
        except (SyntaxError, ValueError):
            return text, "the result would not be Python"
    return after, None if after != text else "it changes nothing"


def _apart(groups: Sequence[_Group]) -> tuple[list[_Group], list[_Group]]:
    """Those whose edits touch nothing of one before them, and the rest."""
    apart: list[_Group] = []
    rest: list[_Group] = []
    taken: list[_Range] = []
    for group in groups:
        ranges = list(_ranges(group[0].edits))
        if any(start <= other_end and other_start <= end for start, end in ranges for other_start, other_end in taken):
            rest.append(group)
        else:
            apart.append(group)
            taken += ranges
    return apart, rest


_Range = tuple[tuple[int, int], tuple[int, int]]


def _ranges(edits: Sequence[Edit]) -> Iterator[_Range]:
    """What edits touch, ends included: two insertions at one place touch each other."""
    for edit in edits:
        start, end = (edit.span.line, edit.span.column), (edit.span.end_line, edit.span.end_column)
        if edit.action == "before":
            yield start, start
        elif edit.action == "after":
            yield end, end
        elif edit.action != "import":
            yield start, end
