"""Deprecated names in a source, with the edits that write them as they are written today.

``halfstep lint --migrate`` applies those of rule HS401. A name that comes straight from ``torch`` is rewritten by
itself. Names that an import bound (``from torch.cuda.amp import autocast``) are rewritten together, with their imports,
since one without the others would not run.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from halfstep.lint.finding import Edit, Span
from halfstep.lint.migrations import MIGRATIONS, MODULES, Migration, migrated_call
from halfstep.lint.names import canonical
from halfstep.lint.offsets import Offsets
from halfstep.lint.rule import Problem
from halfstep.lint.script import Script

GUARD = re.compile(r"version|hasattr|getattr|is_torch|torch\w*\d|_available", re.IGNORECASE)
"""Conditions under which an old and a new name stand side by side on purpose."""


def deprecated_names(script: Script) -> Iterator[Problem]:
    """Each use of a deprecated name, and each import of one that nothing in the file uses."""
    if "amp" not in script.text and "autocast" not in script.text:
        return
    file = _File(script)
    together = _together(file)
    for use in file.uses:
        edits = use.edits if not use.local else together if use.local in file.movable else ()
        yield _problem(use.node, use.migration, edits)
    for binder in file.unused:
        yield _problem(binder.statement, binder.migration, together if binder.local in file.movable else ())


def _problem(node: ast.AST, migration: Migration, edits: tuple[Edit, ...]) -> Problem:
    gone = f" and gone since {migration.removed}" if migration.removed else ""
    message = f"{migration.old} is deprecated since torch {migration.since}{gone}: write {migration.spelt}"
    return Problem(node, message, edits, "safe" if edits else None)


@dataclass(frozen=True)
class _Binder:
    """An import that binds ``local`` to ``meaning``: a deprecated object, their module, or anything else."""

    statement: ast.Import | ast.ImportFrom
    alias: ast.alias
    local: str
    meaning: str

    @property
    def migration(self) -> Migration:
        return MIGRATIONS[self.meaning]

    @property
    def is_old(self) -> bool:
        return self.meaning in MIGRATIONS or self.meaning in MODULES

    @property
    def new(self) -> tuple[str, str]:
        """The module that the name comes from today, and the name there."""
        meaning = MODULES.get(self.meaning) or self.migration.new
        home, _, name = meaning.rpartition(".")
        return home, name

    @property
    def new_local(self) -> str:
        return self.local if self.alias.asname else self.new[1]


@dataclass(frozen=True)
class _Use:
    """A deprecated name in an expression. local: the name that an import of an old one bound, "" for none.

    edits: what rewrites it, empty when that is not certain.
    """

    node: ast.expr
    migration: Migration
    local: str
    edits: tuple[Edit, ...]


class _File:
    """What a source imports and uses of the deprecated names.

    movable: the names bound by imports of old ones of which every use can be rewritten.
    """

    def __init__(self, script: Script) -> None:
        self.script, self.parents = script, script.parents
        self.binders: dict[str, list[_Binder]] = defaultdict(list)
        for statement in script.walk(ast.Import, ast.ImportFrom):
            for alias in statement.names:  # type: ignore[attr-defined]
                binder = _binder(statement, alias)
                self.binders[binder.local].append(binder)
        self.uses = [use for node in script.walk(ast.Name, ast.Attribute) if (use := self._use(node)) is not None]
        used = {use.local for use in self.uses}
        mentioned = self._mentioned()
        old = {local: binders for local, binders in self.binders.items() if self._is_old(binders)}
        self.movable = {local for local in old if self._can_move(local, mentioned)}
        self.unused = [
            binder
            for local, binders in old.items()
            for binder in binders
            if local not in used and binder.meaning in MIGRATIONS and not mentioned[local]
        ]

    def _use(self, node: ast.AST) -> _Use | None:
        migration = MIGRATIONS.get(self.script.names.qualified(node) or "")
        root: ast.AST = node
        while isinstance(root, ast.Attribute):
            root = root.value
        if migration is None or not isinstance(root, ast.Name) or not isinstance(root.ctx, ast.Load):
            return None
        assert isinstance(node, ast.expr)
        binders = self.binders.get(root.id, ())
        if not binders or any(binder.meaning != binders[0].meaning for binder in binders):
            return None  # an alias, whose value is reported; or old and new, each where it is wanted
        if any(self._is_guarded(place) for place in (node, *(binder.statement for binder in binders))):
            return None
        if not self._is_put_to_use(node):
            return None
        binder, edits = binders[0], []
        if binder.meaning in MIGRATIONS:
            function = binder.new_local
        elif binder.meaning in MODULES:
            function = f"{root.id}.{migration.new.rpartition('.')[2]}"
        elif binder.meaning == "torch":
            function = root.id + migration.new.removeprefix("torch")
        else:  # from torch import cuda
            function = migration.new
            if any(other.meaning != "torch" for other in self.binders.get("torch", ())):
                return None
            edits.append(Edit("import", Span(1, 0, 1, 0), "import torch"))
        edit = self._rewritten(node, function, migration)
        local = root.id if binder.is_old else ""
        return _Use(node, migration, local, (edit, *edits) if edit else ())

    def _is_guarded(self, node: ast.AST) -> bool:
        """Whether it stands where an old torch is provided for: under a test of the version, in an ``except``."""
        return any(
            isinstance(around, ast.ExceptHandler)
            or (isinstance(around, ast.If | ast.IfExp) and bool(GUARD.search(ast.unparse(around.test))))
            for around in self.script.ancestors(node)
        )

    def _is_put_to_use(self, node: ast.expr) -> bool:
        """Whether something is made of it. A list or a comparison of names, as compilers have, is no fault."""
        parent = self.parents[node]
        return (
            (isinstance(parent, ast.Call) and node in (parent.func, *parent.args[:1]))
            or node in getattr(parent, "decorator_list", ())
            or node in getattr(parent, "bases", ())
            or node is getattr(parent, "value", None)
            or self._is_type(node)
        )

    def _rewritten(self, node: ast.expr, function: str, migration: Migration) -> Edit | None:
        parent = self.parents[node]
        if isinstance(parent, ast.Call) and parent.func is node:
            code = migrated_call(self.script, parent, function, migration)
            return None if code is None else Edit("replace", self.script.span(parent), code)
        if node in getattr(parent, "decorator_list", ()) and migration.passed == "keyword":
            return Edit("replace", self.script.span(node), f'{function}(device_type="{migration.device}")')
        if migration.new == "torch.amp.GradScaler" and self._is_type(node):
            return Edit("replace", self.script.span(node), function)
        return None

    def _is_type(self, node: ast.AST) -> bool:
        """Whether it stands in an annotation or as the class of ``isinstance``: torch.amp's class does as well."""
        parent = self.parents[node]
        while isinstance(parent, ast.Subscript | ast.BinOp | ast.Tuple):
            node, parent = parent, self.parents[parent]
        if isinstance(parent, ast.Call):
            return getattr(parent.func, "id", "") == "isinstance" and node in parent.args[1:]
        return node in (getattr(parent, "annotation", None), getattr(parent, "returns", None))

    def _mentioned(self) -> dict[str, int]:
        """How often each name is read, bound or offered in ``__all__``."""
        counts: dict[str, int] = defaultdict(int)
        for node in self.script.walk(ast.Name):
            counts[node.id] += 1  # type: ignore[attr-defined]
        for node in self.script.walk(ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef):
            counts[node.name] += 1  # type: ignore[attr-defined]
        for node in self.script.walk(ast.arg):
            counts[node.arg] += 1  # type: ignore[attr-defined]
        for node in self.script.walk(ast.Assign):
            if any(getattr(target, "id", "") == "__all__" for target in node.targets):  # type: ignore[attr-defined]
                for name in ast.walk(node):
                    counts[str(getattr(name, "value", ""))] += 1
        return counts

    def _is_old(self, binders: list[_Binder]) -> bool:
        return all(b.is_old and b.meaning == binders[0].meaning and not self._is_guarded(b.statement) for b in binders)

    def _can_move(self, local: str, mentioned: dict[str, int]) -> bool:
        """Whether every mention of ``local`` is a use that can be rewritten, and its new name is free."""
        uses = [use for use in self.uses if use.local == local]
        new_local = self.binders[local][0].new_local
        is_free = new_local == local or not (mentioned[new_local] or new_local in self.binders)
        return len(uses) == mentioned[local] and all(use.edits for use in uses) and is_free


def _binder(statement: ast.AST, alias: ast.alias) -> _Binder:
    if isinstance(statement, ast.Import):
        meaning = alias.name if alias.asname else alias.name.partition(".")[0]
        return _Binder(statement, alias, alias.asname or meaning, canonical(meaning))
    assert isinstance(statement, ast.ImportFrom)
    meaning = f"{'.' * statement.level}{statement.module or ''}.{alias.name}"
    return _Binder(statement, alias, alias.asname or alias.name, canonical(meaning))


def _together(file: _File) -> tuple[Edit, ...]:
    """The edits of all names that are movable: their uses, and their imports. None where a comment would be lost."""
    edits = [edit for use in file.uses if use.local in file.movable for edit in use.edits]
    moved: dict[ast.AST, list[_Binder]] = defaultdict(list)
    for local in sorted(file.movable):
        for binder in file.binders[local]:
            moved[binder.statement].append(binder)
    for statement, binders in moved.items():
        edit = _moved_import(file.script, statement, binders)
        if edit.span == file.script.span(statement) and "#" in file.script.source(statement):
            return ()
        edits.append(edit)
    return tuple(edits)


def _moved_import(script: Script, statement: ast.AST, binders: list[_Binder]) -> Edit:
    """An import statement with some of its names taken from where they are today."""
    if isinstance(statement, ast.Import):
        # The name of a module is no node; it begins where its alias does.
        place, home = script.span(binders[0].alias), binders[0].meaning
        names = {binder.alias: ".".join(binder.new) for binder in binders}
        if len(binders) == 1:
            end = place.column + len(binders[0].alias.name)
            return Edit("replace", Span(place.line, place.column, place.line, end), names[binders[0].alias])
        parts = [f"{names.get(alias, alias.name)}{_as(alias)}" for alias in statement.names]
        return Edit("replace", script.span(statement), f"import {', '.join(parts)}")
    assert isinstance(statement, ast.ImportFrom)
    homes = {binder.new[0] for binder in binders}
    kept = [alias for alias in statement.names if alias not in [binder.alias for binder in binders]]
    if not kept and len(homes) == 1 and all(binder.new[1] == binder.alias.name for binder in binders):
        begin = Offsets(script.text).begin(script.span(statement))
        named = re.compile(rf"from[ \t]+{re.escape(statement.module or '')}(?=\s)").match(script.text, begin)
        if named:
            line, column = script.span(statement).line, script.span(statement).column + named.end() - named.start()
            start = column - len(statement.module or "")
            return Edit("replace", Span(line, start, line, column), homes.pop())
    lines = [f"from {statement.module} import {', '.join(a.name + _as(a) for a in kept)}"] if kept else []
    for home in sorted(homes):
        names_there = [f"{b.new[1]}{_as(b.alias)}" for b in binders if b.new[0] == home]
        lines.append(f"from {home} import {', '.join(names_there)}")
    return Edit("replace", script.span(statement), "\n".join(lines))


def _as(alias: ast.alias) -> str:
    return f" as {alias.asname}" if alias.asname else ""
