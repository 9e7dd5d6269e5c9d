"""The blocks of a model: the repeated parts that shards are gathered for, one after the other."""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Container, Iterable

from torch import nn

from halfstep.errors import HalfstepError


def blocks_of(model: nn.Module, wanted: Iterable[type[nn.Module] | str] | None = None) -> dict[str, nn.Module]:
    """Qualified name to block, the outer ones first.

    wanted: classes, or patterns of qualified names such as ``layers.*``. None finds them: the classes that a model of
            transformers says not to split, else the members of the outermost ``ModuleList``, ``ModuleDict`` or
            ``Sequential`` that has several of one class with parts of their own. Empty where there is no such thing.
    """
    named = {name: module for name, module in model.named_modules() if name}
    if wanted is not None:
        return _chosen(named, wanted)
    whole = {name for each in model.modules() for name in getattr(each, "_no_split_modules", None) or ()}
    found = {name: module for name, module in named.items() if type(module).__name__ in whole}
    return found or _repeated(model, "")


def block_around(path: str, blocks: Container[str]) -> str:
    """The name of the innermost block that the module of this name is, or is in; empty outside of them."""
    while path and path not in blocks:
        path = path.rpartition(".")[0]
    return path


def _chosen(named: dict[str, nn.Module], wanted: Iterable[type[nn.Module] | str]) -> dict[str, nn.Module]:
    chosen: set[str] = set()
    for each in [wanted] if isinstance(wanted, str | type) else wanted:
        if isinstance(each, str):
            found = {name for name in named if fnmatch.fnmatchcase(name, each)}
        else:
            found = {name for name, module in named.items() if isinstance(module, each)}
        if not found:
            what = repr(each) if isinstance(each, str) else each.__name__
            raise HalfstepError(
                f"blocks={what}",
                "no module of the model has this class or a name that it matches",
                f"Names are those of model.named_modules(), such as {', '.join(list(named)[:6]) or 'none'}.",
            )
        chosen |= found
    return {name: module for name, module in named.items() if name in chosen}


def _repeated(module: nn.Module, path: str) -> dict[str, nn.Module]:
    blocks: dict[str, nn.Module] = {}
    counts: Counter[type[nn.Module]] = Counter()
    if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential):
        counts.update(type(child) for child in module.children() if _has_parts(child))
    for name, child in module.named_children():
        child_path = f"{path}.{name}" if path else name
        blocks |= {child_path: child} if counts[type(child)] > 1 else _repeated(child, child_path)
    return blocks


def _has_parts(module: nn.Module) -> bool:
    return any(True for _ in module.children()) and any(True for _ in module.parameters())
