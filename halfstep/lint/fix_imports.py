"""An import added to source where imports of its kind stand."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

import libcst as cst

LINE_LENGTH = 88
"""Names are added to an import up to this length; it is the shortest limit that formatters have by default."""

_Name = tuple[str, str | None, str | None]
"""A module, a name in it or None for itself, and what the name is imported as."""


def add_import(module: cst.Module, code: str) -> cst.Module:
    """``module`` with the import ``code`` in it: unless it is there, merged into one from the same place, or below.

    It goes after the first run of imports that names the same package, or after the first run at all, and so after a
    docstring and ``__future__`` imports.
    """
    new = _import_in(cst.parse_statement(code))
    assert new is not None, code
    imports = [(index, found) for index, line in enumerate(module.body) if (found := _import_in(line)) is not None]
    missing = _names(new)
    for _, old in imports:
        missing = [name for name in missing if name not in _names(old)]
    if not missing:
        return module
    body = list(module.body)
    for index, old in imports:
        merged = _merged(old, missing)
        if merged is not None and len(_code(merged)) <= LINE_LENGTH:
            body[index] = body[index].with_changes(body=[merged])
            return module.with_changes(body=body)
    aliases = [alias for alias, name in zip(new.names, _names(new), strict=True) if name in missing]
    aliases[-1] = aliases[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
    line = cst.SimpleStatementLine([new.with_changes(names=aliases)])
    place = _place(module, imports, missing[0][0].split(".")[0])
    return module.with_changes(body=[*body[:place], line, *body[place:]])


def _import_in(line: Any) -> Any:
    """The import that is alone on its line, None for anything else."""
    is_alone = isinstance(line, cst.SimpleStatementLine) and len(line.body) == 1
    if not is_alone or not isinstance(line.body[0], cst.Import | cst.ImportFrom):
        return None
    return None if isinstance(line.body[0].names, cst.ImportStar) else line.body[0]


def _names(node: Any) -> list[_Name]:
    parsed: Any = ast.parse(_code(node)).body[0]
    if isinstance(parsed, ast.Import):
        return [(alias.name, None, alias.asname) for alias in parsed.names]
    home = "." * parsed.level + (parsed.module or "")
    return [(home, alias.name, alias.asname) for alias in parsed.names]


def _merged(old: Any, missing: Sequence[_Name]) -> Any:
    """The import ``old`` with the missing names in it, None when they come from elsewhere or it has parentheses."""
    home = _names(old)[0][0]
    if isinstance(old, cst.Import) or old.lpar or any(name is None or other != home for other, name, _ in missing):
        return None
    spelt = ", ".join(f"{name} as {alias}" if alias else str(name) for _, name, alias in missing)
    added = _import_in(cst.parse_statement(f"from {home} import {spelt}"))
    last = old.names[-1].with_changes(comma=cst.Comma(whitespace_after=cst.SimpleWhitespace(" ")))
    return old.with_changes(names=[*old.names[:-1], last, *added.names])


def _place(module: cst.Module, imports: Sequence[tuple[int, Any]], package: str) -> int:
    """The index in the module's body where a new import of ``package`` goes."""
    same = [index for index, node in imports if any(home.split(".")[0] == package for home, *_ in _names(node))]
    rest = [index for index, node in imports if _names(node)[0][0] != "__future__"]
    if not same and not rest:
        return max([index + 1 for index, _ in imports], default=int(module.get_docstring() is not None))
    place = (same or rest)[0]
    indices = {index for index, _ in imports}
    while place in indices:
        place += 1
    return place


def _code(node: cst.CSTNode) -> str:
    return cst.Module([]).code_for_node(node)
