"""The ways through a source, each one run with its own decisions."""

from __future__ import annotations

import ast
from collections import deque
from contextlib import suppress

from halfstep.lint.event import Event, Path
from halfstep.lint.names import Names, last_name
from halfstep.lint.relevance import Relevance
from halfstep.lint.state import CutOff, State
from halfstep.lint.statements import Run

MAX_PATHS = 40
"""Paths of one root, those with the fewest unusual decisions first."""
MAX_TOTAL_WORK = 120_000
"""Nodes that all paths of a file may evaluate."""

Definition = ast.FunctionDef | ast.AsyncFunctionDef


class Paths:
    """paths: every way followed. sites: every distinct event of them and of what has no order. complete: whether
    nothing was left out; a rule that concludes from the absence of something asks for it."""

    def __init__(self, tree: ast.Module, names: Names, lines: list[str]) -> None:
        self.paths: list[Path] = []
        self.sites: list[Event] = []
        self.complete = True
        self._names, self._relevance = names, Relevance(tree, lines)
        self._seen: set[object] = set()
        self._work = 0
        inlined: set[ast.AST] = set()
        self._explore(tree, None, None, None, inlined)
        base = Run(names, self._relevance)
        with suppress(CutOff, RecursionError):
            base.definitions(tree.body)
        # What nothing has called is called from outside. A later one may be called by an earlier one.
        called = _called_names(tree)
        waiting = _definitions(tree)
        # Those that nobody names come first, and an __init__ comes when no method of its class has run it.
        waiting.sort(key=lambda pair: (pair[0].name == "__init__", pair[0].name in called))
        for definition, cls in waiting:
            if definition not in inlined and self._relevance.is_worth(definition, cls):
                self._explore(tree, definition, cls, base, inlined)

    def _explore(
        self,
        tree: ast.Module,
        definition: Definition | None,
        cls: ast.ClassDef | None,
        base: State | None,
        inlined: set[ast.AST],
    ) -> None:
        root: ast.AST = tree if definition is None else definition
        before = () if base is None else tuple(base.sites.values())
        todo: deque[tuple[tuple[bool, ...], int]] = deque([((), 0)])
        num_paths = 0
        while todo:
            if num_paths >= MAX_PATHS or self._work > MAX_TOTAL_WORK:
                self.complete = False
                return
            oracle, free_from = todo.popleft()
            run = Run(self._names, self._relevance, oracle, base)
            try:
                if definition is None:
                    run.module(tree.body)
                else:
                    run.function(definition, cls)
            except (CutOff, RecursionError):
                self.complete = False
            num_paths += 1
            self._work += run.work
            inlined |= run.inlined
            self.paths.append(Path(root, tuple(run.events), tuple(run.taken), before))
            for key, event in run.sites.items():
                if key not in self._seen:
                    self._seen.add(key)
                    self.sites.append(event)
            taken = tuple(decision.taken for decision in run.taken)
            for index in range(free_from, len(taken)):
                todo.append(((*taken[:index], not taken[index]), index + 1))


def _definitions(tree: ast.Module) -> list[tuple[Definition, ast.ClassDef | None]]:
    """The functions of a module and the methods of its classes. One inside another runs where it is called."""
    functions: list[tuple[Definition, ast.ClassDef | None]] = []
    pending: list[ast.stmt] = list(tree.body)
    while pending:
        node = pending.pop(0)
        if isinstance(node, Definition):
            functions.append((node, None))
        elif isinstance(node, ast.ClassDef):
            functions.extend((method, node) for method in _methods(node))
        elif isinstance(node, ast.If | ast.Try | ast.With):
            pending.extend(child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt))
    return functions


def _methods(cls: ast.ClassDef | None) -> list[Definition]:
    return [] if cls is None else [node for node in cls.body if isinstance(node, Definition)]


def _called_names(tree: ast.Module) -> set[str]:
    return {last_name(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
