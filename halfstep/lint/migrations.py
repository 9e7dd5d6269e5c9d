"""Deprecated names of mixed precision, and how a call of each is written today."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from typing import Literal

from halfstep.lint.script import Script

REFERENCE = "https://docs.pytorch.org/docs/stable/amp.html"


@dataclass(frozen=True)
class Migration:
    """old, new: qualified names. device: the device type that the old name meant and the new one takes.

    passed: the device goes ``first``, or by the keyword ``device_type``. renamed: the names of the old positional
    arguments, where the new ones stand in another order. keywords: those that the old name takes. since: the version
    of torch that deprecated it. removed: the one that no longer has it.
    """

    old: str
    new: str
    device: Literal["cuda", "cpu"]
    passed: Literal["first", "keyword"] = "first"
    renamed: tuple[str, ...] = ()
    keywords: tuple[str, ...] = ()
    since: str = "2.4"
    removed: str | None = None
    reference: str = REFERENCE

    @property
    def spelt(self) -> str:
        """The new name with its device, for messages."""
        return f'{self.new}({"device_type=" if self.passed == "keyword" else ""}"{self.device}")'


AUTOCAST = ("enabled", "dtype", "cache_enabled")
SCALER = ("init_scale", "growth_factor", "backoff_factor", "growth_interval", "enabled")
MIGRATIONS = {
    migration.old: migration
    for migration in (
        Migration("torch.cuda.amp.autocast", "torch.amp.autocast", "cuda", renamed=AUTOCAST, keywords=AUTOCAST),
        Migration("torch.cpu.amp.autocast", "torch.amp.autocast", "cpu", renamed=AUTOCAST, keywords=AUTOCAST),
        Migration("torch.cuda.amp.GradScaler", "torch.amp.GradScaler", "cuda", keywords=SCALER),
        Migration("torch.cpu.amp.GradScaler", "torch.amp.GradScaler", "cpu", keywords=SCALER),
        Migration("torch.cuda.amp.custom_fwd", "torch.amp.custom_fwd", "cuda", "keyword", (), ("fwd", "cast_inputs")),
        Migration("torch.cuda.amp.custom_bwd", "torch.amp.custom_bwd", "cuda", "keyword", (), ("bwd",)),
        Migration("torch.get_autocast_gpu_dtype", "torch.get_autocast_dtype", "cuda"),
        Migration("torch.set_autocast_gpu_dtype", "torch.set_autocast_dtype", "cuda"),
        Migration("torch.get_autocast_cpu_dtype", "torch.get_autocast_dtype", "cpu"),
        Migration("torch.set_autocast_cpu_dtype", "torch.set_autocast_dtype", "cpu"),
        Migration("torch.is_autocast_cpu_enabled", "torch.is_autocast_enabled", "cpu"),
        Migration("torch.set_autocast_cpu_enabled", "torch.set_autocast_enabled", "cpu"),
    )
}
MODULES = {"torch.cuda.amp": "torch.amp", "torch.cpu.amp": "torch.amp"}
"""Modules of which every public name has moved."""


def migrated_call(script: Script, call: ast.Call, function: str, migration: Migration) -> str | None:
    """The source of ``call`` as a call of ``function``, None when it is not certain what that would be."""
    names = [keyword.arg for keyword in call.keywords]
    if any(name is not None and name not in migration.keywords for name in names):
        return None  # an argument that never existed
    is_starred = any(isinstance(arg, ast.Starred) for arg in call.args)
    if is_starred and (migration.renamed or migration.passed == "keyword"):
        return None
    text = script.text
    span, function_span = script.span(call), script.span(call.func)
    start, end = script.offset(span.line, span.column), script.offset(span.end_line, span.end_column)
    begins = _begins(script, call, text.index("(", script.offset(function_span.end_line, function_span.end_column)))
    if begins is None or len(call.args) > len(migration.renamed or call.args):
        return None
    device = f'"{migration.device}"'
    inserted = [(at, f"{name}=") for at, name in zip(begins[1:], migration.renamed, strict=False)]
    if migration.passed == "first":
        inserted.insert(0, (begins[0], f"{device}, " if call.args or call.keywords else device))
    elif call.args:
        last = script.span(call.args[-1])
        inserted.append((script.offset(last.end_line, last.end_column), f", device_type={device}"))
    else:
        inserted.append((begins[0], f"device_type={device}{', ' if call.keywords else ''}"))
    pieces, done = [function], script.offset(function_span.end_line, function_span.end_column)
    for at, code in inserted:
        pieces += [text[done:at], code]
        done = at
    return "".join([*pieces, text[done:end]]) if start >= 0 else None


def _begins(script: Script, call: ast.Call, parenthesis: int) -> list[int] | None:
    """Where the first argument goes, and where each positional one begins; None with comments or parentheses there."""
    text = script.text
    at = parenthesis + 1
    begins = [at + len(re.match(r"\s*", text[at:])[0])] if call.args or call.keywords else [at]  # type: ignore[index]
    for arg in call.args:
        span = script.span(arg)
        begin = script.offset(span.line, span.column)
        if not re.fullmatch(r"[\s,]*", text[at:begin]):
            return None
        begins.append(begin)
        at = script.offset(span.end_line, span.end_column)
    return None if text.startswith("#", begins[0]) else begins
