"""What a rule looks at: a parsed source, and what following it gave."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from functools import cached_property
from itertools import chain
from typing import Any, TypeVar

from halfstep.lint.event import Event, Path
from halfstep.lint.finding import Span
from halfstep.lint.names import Names
from halfstep.lint.paths import Paths

LINE_BREAK = re.compile("\r\n|\r|\n")
"""What ends a line for Python; str.splitlines knows others, such as a form feed."""


Derived = TypeVar("Derived")


class Script:
    """A Python source. Raises SyntaxError or ValueError for a text that Python cannot parse."""

    def __init__(self, text: str, file: str) -> None:
        self.text, self.file = text, file
        self.tree = ast.parse(text, file)
        self.lines = LINE_BREAK.split(text)
        self._derived: dict[Callable[[Script], Any], Any] = {}

    @cached_property
    def names(self) -> Names:
        """Which library objects the names mean."""
        return Names(self.tree)

    @cached_property
    def _followed(self) -> Paths:
        return Paths(self.tree, self.names, self.lines)

    @property
    def paths(self) -> list[Path]:
        """Every way through the module's own code and through each function that nothing in the file calls."""
        return self._followed.paths

    @property
    def sites(self) -> list[Event]:
        """Every distinct event of all paths, and those of values, which have no order."""
        return self._followed.sites

    @property
    def is_complete(self) -> bool:
        """Whether every path was followed; a rule that concludes from an absence asks."""
        return self._followed.complete

    def once(self, derive: Callable[[Script], Derived]) -> Derived:
        """What ``derive`` makes of this script, made once for all rules that ask for it."""
        if derive not in self._derived:
            self._derived[derive] = derive(self)
        return self._derived[derive]  # type: ignore[no-any-return]

    def has(self, what: str) -> bool:
        """Whether an event of this kind happens anywhere."""
        return any(event.what == what for event in self.sites)

    def walk(self, *kinds: type[ast.AST]) -> Iterator[ast.AST]:
        """Every node of these types, in no special order."""
        return chain.from_iterable(self._by_kind.get(kind, ()) for kind in kinds)

    @cached_property
    def _by_kind(self) -> dict[type[ast.AST], list[ast.AST]]:
        found: dict[type[ast.AST], list[ast.AST]] = {}
        for node in self._nodes:
            found.setdefault(type(node), []).append(node)
        return found

    def calls(self, *names: str) -> Iterator[ast.Call]:
        """Every call of these library functions, by qualified name, in no special order."""
        return chain.from_iterable(self._calls.get(name, ()) for name in names)

    @cached_property
    def _calls(self) -> dict[str, list[ast.Call]]:
        found: dict[str, list[ast.Call]] = {}
        for node in self._by_kind.get(ast.Call, ()):
            assert isinstance(node, ast.Call)
            name = self.names.qualified(node.func)
            if name is not None:
                found.setdefault(name, []).append(node)
        return found

    @cached_property
    def _nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    @cached_property
    def parents(self) -> dict[ast.AST, ast.AST]:
        """The node around each node."""
        return {child: node for node in self._nodes for child in ast.iter_child_nodes(node)}

    def ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        """What stands around ``node``, from the inside out."""
        while node in self.parents:
            node = self.parents[node]
            yield node

    def function(self, node: ast.AST) -> ast.AST | None:
        """The function that ``node`` stands in; None at the level of the module."""
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
        return next((around for around in self.ancestors(node) if isinstance(around, kinds)), None)

    def statement(self, node: ast.AST) -> ast.stmt:
        """The statement that ``node`` is part of."""
        while not isinstance(node, ast.stmt):
            node = self.parents[node]
        return node

    def source(self, node: ast.AST) -> str:
        """The text of a node, as it is written."""
        place = self.span(node)
        lines = self.lines[place.line - 1 : place.end_line]
        lines[-1] = lines[-1][: place.end_column]
        lines[0] = lines[0][place.column :]
        return "\n".join(lines)

    def span(self, node: ast.AST) -> Span:
        """Where a node stands."""
        return span_of(node, self.lines)


def span_of(node: ast.AST, lines: list[str]) -> Span:
    """Where a node stands; ast counts columns in bytes of UTF-8, we in characters."""
    line, end_line = node.lineno, node.end_lineno or node.lineno  # type: ignore[attr-defined]
    start, end = node.col_offset, node.end_col_offset or 0  # type: ignore[attr-defined]
    return Span(line, _characters(lines[line - 1], start), end_line, _characters(lines[end_line - 1], end))


def _characters(line: str, num_bytes: int) -> int:
    return num_bytes if line.isascii() else len(line.encode()[:num_bytes].decode(errors="ignore"))
