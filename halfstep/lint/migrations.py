"""Deprecated names of mixed precision, and how a call of each is written today."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Literal

from halfstep.lint.offsets import Offsets
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
    text, offsets = script.text, Offsets(script.text)
    done, end = offsets.end(script.span(call.func)), offsets.end(script.span(call))
    begins = _begins(script, offsets, call, text.index("(", done) + 1)
    if begins is None or (migration.renamed and len(call.args) > len(migration.renamed)):
        return None
    device, comma = f'"{migration.device}"', ", " if call.args or call.keywords else ""
    inserted = [(at, f"{name}=") for at, name in zip(begins[1:], migration.renamed, strict=False)]
    if migration.passed == "first":
        inserted.insert(0, (begins[0], device + comma))
    elif call.args:
        inserted.append((offsets.end(script.span(call.args[-1])), f", device_type={device}"))
    else:
        inserted.append((begins[0], f"device_type={device}{comma}"))
    pieces = [function]
    for at, code in inserted:
        pieces += [text[done:at], code]
        done = at
    return "".join([*pieces, text[done:end]])


def _begins(script: Script, offsets: Offsets, call: ast.Call, inside: int) -> list[int] | None:
    """Where a new first argument goes, and where each positional one begins.

    None when comments or parentheses stand in between. ``inside``: the offset after the call's parenthesis.
    """
    text = script.text
    begins = [inside]
    if call.args or call.keywords:
        begins[0] += len(text[inside:]) - len(text[inside:].lstrip())
    for arg in call.args:
        begins.append(offsets.begin(script.span(arg)))
        if text[inside : begins[-1]].strip(" \t\r\n,"):
            return None
        inside = offsets.end(script.span(arg))
    return begins
