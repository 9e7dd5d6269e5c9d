"""Lint one source text."""

from __future__ import annotations

import re
from collections.abc import Iterable

from halfstep.lint.finding import Finding
from halfstep.lint.rule import Rule
from halfstep.lint.script import Script

WORTH_READING = re.compile(
    r"autocast|GradScaler|\bamp\b|half\b|bfloat16|float16|fp16|bf16|backward|precision|torch\.optim|masked_fill|finfo"
    r"|autograd|normalize|log\(|\.numpy\("
)


def check_source(text: str, file: str, rules: Iterable[Rule]) -> list[Finding]:
    """What ``rules`` find in the Python source ``text``, in the order of lines.

    Suppression comments are not looked at here: ``suppress.py`` does that. Raises :class:`SyntaxError` or ValueError
    (a null byte) for a text that Python cannot parse.
    """
    if not WORTH_READING.search(text):
        compile(text, file, "exec", dont_inherit=True, flags=0x400)  # ast.PyCF_ONLY_AST: a broken file is still reported
        return []
    script = Script(text, file)
    found = {}
    for rule in rules:
        if rule.reads != "python":
            continue
        for problem in rule.check(script):
            span = script.span(problem.node)
            found[span, rule.code] = Finding(
                file,
                span.line,
                span.column + 1,
                span.end_line,
                span.end_column,
                rule.code,
                rule.name,
                problem.message,
                rule.severity,
                problem.fix,
                None,
                problem.edits,
            )
    return [found[key] for key in sorted(found)]
