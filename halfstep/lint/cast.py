"""Casts that the source spells out: ``x.half()``, ``x.to(torch.float16)``."""

from __future__ import annotations

import ast

from halfstep.lint import vocabulary
from halfstep.lint.event import Event
from halfstep.lint.finding import Edit
from halfstep.lint.formats import format_of
from halfstep.lint.script import Script
from halfstep.lint.values import UNKNOWN

_METHODS = {"half", "bfloat16", "float", "to", "type"}


def spelled_format(event: Event) -> str:
    """The format that a cast of a tensor or module names; "" for none.

    ``x.to(y.dtype)`` follows another tensor and names none.
    """
    node = event.node
    if event.name not in _METHODS or not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return ""
    if event.name in vocabulary.CAST_METHODS:
        return "" if node.args or node.keywords else vocabulary.CAST_METHODS[event.name]
    given = [*zip(node.args, event.args, strict=False)]
    given += [
        (keyword.value, event.argument("dtype") or UNKNOWN) for keyword in node.keywords if keyword.arg == "dtype"
    ]
    named = (format_of(value) for part, value in given if getattr(part, "attr", "") != "dtype")
    formats = next((formats for formats in named if formats), frozenset())
    return next(iter(formats)) if len(formats) == 1 else ""


def without_cast(script: Script, node: ast.Call) -> Edit:
    """The edit that takes a cast away: ``x.half()`` becomes ``x``."""
    assert isinstance(node.func, ast.Attribute)
    return Edit("replace", script.span(node), script.source(node.func.value))
