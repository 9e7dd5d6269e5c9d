"""Lint one source text."""

from __future__ import annotations

import re
from collections.abc import Iterable

from halfstep.lint.config import configs_of
from halfstep.lint.finding import Finding
from halfstep.lint.rule import Rule
from halfstep.lint.script import Script

WORTH_READING = re.compile(
    r"autocast|GradScaler|\bamp\b|half\b|bfloat16|float16|fp16|bf16|\.backward\(|precision=|ross_?[eE]ntropy|anomaly"
    r"|autograd\.grad|\.step\("
)
"""What a file holds if any rule may have a word to say about it."""


def check_source(text: str, file: str, rules: Iterable[Rule]) -> list[Finding]:
    """What ``rules`` find in the Python source ``text``, in the order of lines.

    Suppression comments are not looked at here: ``suppress.py`` does that. Raises :class:`SyntaxError` or ValueError
    (a null byte) for a text that Python cannot parse.
    """
    if not WORTH_READING.search(text):
        compile(
            text, file, "exec", dont_inherit=True, flags=0x400
        )  # ast.PyCF_ONLY_AST: a broken file is still reported
        return []
    script = Script(text, file)
    configs = list(configs_of(script))
    found = {}
    for rule in rules:
        subjects = [script] if rule.reads == "python" else configs
        for problem in (problem for subject in subjects for problem in rule.check(subject)):
            span = script.span(problem.node)
            found[span, rule.code] = rule.finding(problem, span, file)
    return [found[key] for key in sorted(found)]
