"""A DeepSpeed configuration, in a JSON file or as a dict in Python, with the place of every entry.

JSON is close to Python's own notation, so that one syntax tree serves both: ``true``, ``false`` and ``null`` are names
in it.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

from halfstep.lint.finding import Finding
from halfstep.lint.rule import Rule
from halfstep.lint.script import Script, span_of

_WORDS = {"true": True, "false": False, "null": None}
MARKS = {
    "zero_optimization",
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "zero_allow_untested_optimizer",
    "steps_per_print",
    "wall_clock_breakdown",
}
"""Keys by which a configuration is known; a dict with one of FORMATS alone may be anything."""
FORMATS = {"fp16", "bf16", "bfloat16"}


class Config:
    """One configuration. ``node``: its dict."""

    def __init__(self, node: ast.Dict) -> None:
        self.node = node

    def key(self, *path: str) -> ast.expr | None:
        """Where the entry at ``path`` stands: the node of its key; None when there is none."""
        found = self._find(path)
        return None if found is None else found[0]

    def get(self, *path: str) -> Any:
        """The value at ``path``; None when there is none, or it is no literal (a variable, a call)."""
        found = self._find(path)
        return None if found is None else _literal(found[1])

    def is_on(self, section: str) -> bool:
        """Whether a format is enabled. ``"auto"`` leaves that to the integration, so it is not."""
        return self.get(section, "enabled") is True

    def _find(self, path: Iterable[str]) -> tuple[ast.expr, ast.expr] | None:
        node: ast.expr = self.node
        found: tuple[ast.expr, ast.expr] | None = None
        for name in path:
            if not isinstance(node, ast.Dict):
                return None
            pairs = [(key, value) for key, value in zip(node.keys, node.values, strict=True) if key is not None]
            found = next(((key, value) for key, value in pairs if getattr(key, "value", None) == name), None)
            if found is None:
                return None
            node = found[1]
        return found


def _literal(node: ast.expr) -> Any:
    if isinstance(node, ast.Name):
        return _WORDS.get(node.id)
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None


def _is_config(node: ast.Dict) -> bool:
    keys = {getattr(key, "value", None) for key in node.keys}
    return bool(keys & MARKS) and bool(keys & FORMATS)


def configs_of(script: Script) -> Iterator[Config]:
    """The configurations that a Python source writes as dicts."""
    for node in script.walk(ast.Dict):
        assert isinstance(node, ast.Dict)
        if _is_config(node):
            yield Config(node)


def check_config(text: str, file: str, rules: Iterable[Rule]) -> list[Finding]:
    """What ``rules`` find in a JSON file; nothing when it is no DeepSpeed configuration.

    Raises :class:`ValueError` for a text that is no JSON.
    """
    text = text.removeprefix("\ufeff")
    if not isinstance(json.loads(text), dict):
        return []
    # Line breaks inside brackets mean nothing to Python either, so places are those of the file. Before them an
    # indentation would: it makes room for another bracket.
    first = re.search(r"[^\S\r\n]*\S", text)
    if first is not None and first.group()[0].isspace():
        text = f"{text[: first.start()]}({text[first.start() + 1 :]})"
    tree = ast.parse(text, file, mode="eval")
    if not isinstance(tree.body, ast.Dict) or not _is_config(tree.body):
        return []
    config, lines = Config(tree.body), text.splitlines()
    found = [
        rule.finding(problem, span_of(problem.node, lines), file)
        for rule in rules
        if rule.reads == "deepspeed"
        for problem in rule.check(config)
    ]
    return sorted(found, key=lambda finding: (finding.line, finding.column, finding.code))
