"""The page of a rule, generated from the rule: ``halfstep lint --explain`` prints it, docs/rules holds it.

``python -m halfstep.lint.rule_page docs/rules`` writes the pages anew.
"""

from __future__ import annotations

import sys
from pathlib import Path

from halfstep.errors import HalfstepError
from halfstep.files import write_pages
from halfstep.lint.catalogue import catalogue, did_you_mean
from halfstep.lint.rule import Rule

KINDS = {
    "HS0": "The run itself",
    "HS1": "The result is wrong",
    "HS2": "Slow, or memory lost",
    "HS3": "Fragile",
    "HS4": "Deprecated",
}
FIXES = {
    "safe": "Its fix is safe: `halfstep lint --fix` applies it.",
    "unsafe": "Its fix is unsafe: `halfstep lint --unsafe-fixes` applies it.",
    None: "It has no fix.",
}


def rule_page(rule: Rule) -> str:
    """The page as Markdown, which also reads as plain text."""
    parts = [
        f"# {rule.name} ({rule.code})",
        f"Severity: {rule.severity}. {FIXES[rule.fix]}",
        "## What it does",
        rule.summary,
        "## Why is this bad",
        rule.why.strip(),
    ]
    if rule.bad:
        parts += ["## Example", _block(rule, rule.bad[0])]
    if rule.good:
        parts += ["## Use instead", _block(rule, rule.good[0])]
    if rule.fix is not None:
        parts += ["## Fix safety", rule.fix_note.strip() or f"The fix is always {rule.fix}."]
    return "\n\n".join(parts) + "\n"


def index_page() -> str:
    """All rules by kind, each with a link to its page."""
    parts = [
        "# Rules of halfstep lint",
        "Generated from the rules, as each of their pages is. `halfstep lint --explain HS101` prints one.",
    ]
    for prefix, kind in KINDS.items():
        rules = [rule for code, rule in catalogue().items() if code.startswith(prefix)]
        if rules:
            lines = ["| code | name | severity | fix | what it finds |", "|---|---|---|---|---|"]
            lines += [
                f"| [{rule.code}]({rule.code}.md) | {rule.name} | {rule.severity} | {rule.fix or ''} |"
                f" {rule.summary.replace('|', chr(92) + '|')} |"
                for rule in rules
            ]
            parts += [f"## {prefix}: {kind}", "\n".join(lines)]
    return "\n\n".join(parts) + "\n"


def pages() -> dict[str, str]:
    """File name to text, of every page."""
    return {"index.md": index_page()} | {f"{rule.code}.md": rule_page(rule) for rule in catalogue().values()}


def write(directory: str | Path) -> None:
    """Writes every page into ``directory``, made if need be, and removes the pages of rules that are no more."""
    write_pages(directory, pages(), lambda old: old.name.startswith("HS"))


def find_rule(code: str) -> Rule:
    """The rule with this code or name. Raises HalfstepError when there is none."""
    for rule in catalogue().values():
        if code.upper() == rule.code or code == rule.name:
            return rule
    raise HalfstepError(f"--explain {code}", "no rule has this code or name", did_you_mean(code))


def _block(rule: Rule, source: str) -> str:
    language = "json" if rule.reads == "deepspeed" and source.lstrip().startswith("{") else "python"
    return f"```{language}\n{source.strip(chr(10)).rstrip()}\n```"


if __name__ == "__main__":
    write(*sys.argv[1:])
