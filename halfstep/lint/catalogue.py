"""Every code that lint reports: the rules of ``halfstep/lint/rules``, and what is reported beside them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from functools import cache

from halfstep.lint.rule import Problem, Rule
from halfstep.lint.rules import all_rules
from halfstep.lint.script import Script
from halfstep.lint.suppress import UNUSED_NOQA


def _no_problem(_script: Script) -> Iterator[Problem]:
    return iter(())  # the runner reports these


CANNOT_PARSE = Rule(
    code="HS000",
    name="cannot-parse",
    severity="error",
    summary="A file cannot be read or parsed, so nothing is known about it.",
    why=(
        "No rule looks at a file that is not Python, not UTF-8 or not valid JSON. The other files of the run are linted"
        " all the same."
    ),
    bad=("for batch in loader\n    step(batch)\n",),
    good=("for batch in loader:\n    step(batch)\n",),
    check=_no_problem,
)
LINT_FAILED = Rule(
    code="HS002",
    name="lint-failed",
    severity="error",
    summary="A rule failed on a file: a fault of halfstep, not of the file.",
    why=(
        "What the rule would have found there is unknown; the other rules and files are not affected. Please report it"
        " with the file."
    ),
    bad=(),
    good=(),
    check=_no_problem,
)


@cache
def catalogue() -> Mapping[str, Rule]:
    """Code to rule, in the order of codes."""
    rules = (CANNOT_PARSE, UNUSED_NOQA, LINT_FAILED, *all_rules())
    return {rule.code: rule for rule in sorted(rules, key=lambda rule: rule.code)}


def did_you_mean(word: str) -> str:
    """What to do about ``word``, which is neither a code nor a name."""
    known = {text.lower(): text for rule in catalogue().values() for text in (rule.code, rule.name)}
    close = get_close_matches(word.lower(), known, 1, cutoff=0.8)  # less, and HS9 is taken for HS159
    if close:
        return f"Did you mean {known[close[0]]}?"
    return f"Use a code, from HS101 to {max(catalogue())}, its beginning, such as HS1, or a name."
