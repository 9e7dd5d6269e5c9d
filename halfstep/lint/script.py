"""What a rule looks at: a parsed source, and what following it gave."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cached_property

from halfstep.lint.event import Event, Path
from halfstep.lint.finding import Span
from halfstep.lint.names import Names
from halfstep.lint.paths import Paths


class Script:
    """A Python source. Raises SyntaxError or ValueError for a text that Python cannot parse."""

    def __init__(self, text: str, file: str) -> None:
        self.text, self.file = text, file
        self.tree = ast.parse(text, file)
        self.lines = text.splitlines()

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

    def has(self, what: str) -> bool:
        """Whether an event of this kind happens anywhere."""
        return any(event.what == what for event in self.sites)

    def walk(self, *kinds: type[ast.AST]) -> Iterator[ast.AST]:
        """Every node of these types, in no special order."""
        return (node for node in self._nodes if isinstance(node, kinds))

    @cached_property
    def _nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    @cached_property
    def parents(self) -> dict[ast.AST, ast.AST]:
        """The node around each node."""
        return {child: node for node in self._nodes for child in ast.iter_child_nodes(node)}

    def statement(self, node: ast.AST) -> ast.stmt:
        """The statement that ``node`` is part of."""
        while not isinstance(node, ast.stmt):
            node = self.parents[node]
        return node

    def source(self, node: ast.AST) -> str:
        """The text of a node, as it is written."""
        return ast.get_source_segment(self.text, node) or ast.unparse(node)

    def span(self, node: ast.AST) -> Span:
        """Where a node stands; ast counts columns in bytes of UTF-8, we in characters."""
        line, end_line = node.lineno, node.end_lineno or node.lineno  # type: ignore[attr-defined]
        return Span(
            line,
            self._characters(line, node.col_offset),  # type: ignore[attr-defined]
            end_line,
            self._characters(end_line, node.end_col_offset or 0),  # type: ignore[attr-defined]
        )

    def _characters(self, line: int, num_bytes: int) -> int:
        text = self.lines[line - 1]
        return num_bytes if text.isascii() else len(text.encode()[:num_bytes].decode(errors="ignore"))
