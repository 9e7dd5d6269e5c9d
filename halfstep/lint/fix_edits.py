"""Edits put into source by LibCST, so that comments, layout and line ends stay as they are.

This module imports libcst: only a file that gets a fix needs it, and ``fix.py`` opens it then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import libcst as cst
from libcst.metadata import CodeRange, MetadataWrapper, ParentNodeProvider, PositionProvider

from halfstep.lint.finding import Edit, Span
from halfstep.lint.fix_imports import add_import

BINDS_LOOSELY = (
    cst.BinaryOperation, cst.UnaryOperation, cst.BooleanOperation, cst.Comparison, cst.IfExp, cst.Lambda,
    cst.NamedExpr, cst.Await, cst.Yield, cst.Tuple, cst.GeneratorExp,
)  # fmt: skip
BINDS_TIGHTLY = (
    cst.BinaryOperation, cst.UnaryOperation, cst.BooleanOperation, cst.Comparison, cst.ComparisonTarget, cst.IfExp,
    cst.Attribute, cst.Subscript, cst.Call, cst.Await,
)  # fmt: skip


class CannotEdit(Exception):
    """The edits cannot be put into this source; ``str()`` says why."""


def apply_edits(text: str, edits: Sequence[Edit]) -> str:
    """``text`` with all ``edits`` in it, everything else as it was. Raises :class:`CannotEdit`."""
    _refuse_overlaps(edits)
    wrapper = _opened(text)
    editor = _Editor(wrapper)
    for edit in edits:
        if edit.action != "import":
            editor.take(edit)
    module = wrapper.module.visit(editor)
    if editor.waiting:
        raise CannotEdit("no statement can stand there")
    for edit in edits:
        if edit.action == "import":
            module = add_import(module, edit.code)
    return module.code


@lru_cache(maxsize=1)  # most of the time goes here, and the fixes of one file are tried one after the other
def _opened(text: str) -> MetadataWrapper:
    try:
        wrapper = MetadataWrapper(cst.parse_module(text))
    except (cst.ParserSyntaxError, RecursionError):
        raise CannotEdit("LibCST cannot read this file") from None
    if wrapper.module.code != text:
        raise CannotEdit("LibCST does not give this file back as it was")
    return wrapper


def _refuse_overlaps(edits: Sequence[Edit]) -> None:
    spans = sorted({(edit.span, edit.action, edit.code) for edit in edits if edit.action in ("replace", "delete")})
    for (first, *_), (second, *_) in pairwise(spans):
        if (second.line, second.column) < (first.end_line, first.end_column) or first == second:
            raise CannotEdit("two of its edits overlap")


class _Editor(cst.CSTTransformer):
    """Replaces expressions and comments where they stand, and rebuilds the blocks whose statements change."""

    def __init__(self, wrapper: MetadataWrapper) -> None:
        super().__init__()
        self._parents = wrapper.resolve(ParentNodeProvider)
        self._expressions: dict[Span, cst.BaseExpression] = {}
        self._statements: dict[Span, cst.CSTNode] = {}
        self._comments: dict[Span, cst.Comment] = {}
        positions = wrapper.resolve(PositionProvider)
        for node, range_ in positions.items():
            if isinstance(node, cst.BaseExpression):
                self._expressions.setdefault(_span_of(node, range_, positions), node)
            elif isinstance(node, cst.BaseSmallStatement | cst.BaseCompoundStatement):
                self._statements[_span(range_)] = node
            elif isinstance(node, cst.Comment):
                self._comments[_span(range_)] = node
        self._new_expressions: dict[cst.CSTNode, cst.BaseExpression] = {}
        self._new_comments: dict[cst.CSTNode, str] = {}
        self.waiting: dict[cst.CSTNode, list[Edit]] = {}
        """Edits of statements that no block has carried out yet."""

    def take(self, edit: Edit) -> None:
        """Find the node that ``edit`` is about."""
        if edit.action == "replace" and edit.span in self._comments:
            self._new_comments[self._comments[edit.span]] = edit.code
        elif edit.action == "replace" and edit.span in self._expressions and (new := _expression(edit.code)):
            old = self._expressions[edit.span]
            self._new_expressions[old] = self._fitting(old, new)
        elif edit.span in self._statements:
            if edit.action != "delete":
                _statements(edit.code)  # raises for one that is not Python
            self.waiting.setdefault(self._statements[edit.span], []).append(edit)
        else:
            raise CannotEdit(f"nothing that can be changed stands at line {edit.span.line}")

    def _fitting(self, old: cst.BaseExpression, new: cst.BaseExpression) -> cst.BaseExpression:
        """``new`` in the parentheses of ``old``, and in some of its own where its place binds tighter than it."""
        kept: tuple[Any, Any] = ((), ()) if isinstance(old, cst.Tuple) else (old.lpar, old.rpar)
        if not kept[0] and not new.lpar and isinstance(new, BINDS_LOOSELY):
            parent = self._parents[old]
            if isinstance(parent, BINDS_TIGHTLY) or (isinstance(parent, cst.Arg) and parent.star):
                kept = [cst.LeftParen()], [cst.RightParen()]
        return new.with_changes(lpar=[*kept[0], *new.lpar], rpar=[*new.rpar, *kept[1]])

    def on_leave(self, original_node: Any, updated_node: Any) -> Any:
        updated: Any = super().on_leave(original_node, updated_node)
        if isinstance(original_node, cst.TrailingWhitespace | cst.EmptyLine):
            return self._line_end(original_node, updated)
        if original_node in self._new_expressions:
            return self._new_expressions[original_node]
        if isinstance(original_node, cst.Module | cst.IndentedBlock):
            body, rest = self._block(original_node.body, updated.body)
            if not body and isinstance(original_node, cst.IndentedBlock):
                body, rest = [cst.SimpleStatementLine([cst.Pass()], leading_lines=rest)], []
            return updated.with_changes(body=body, footer=[*rest, *updated.footer])
        if isinstance(original_node, cst.SimpleStatementSuite):
            return self._suite(original_node, updated)
        return updated

    def _line_end(self, original: Any, updated: Any) -> Any:
        code = self._new_comments.get(original.comment)
        if code is None:
            return updated
        if code:
            return updated.with_changes(comment=cst.Comment(code))
        if isinstance(original, cst.EmptyLine):
            return cst.RemoveFromParent()
        return updated.with_changes(comment=None, whitespace=cst.SimpleWhitespace(""))

    # Statements.

    def _block(self, originals: Sequence[Any], updated: Sequence[Any]) -> tuple[list[Any], list[cst.EmptyLine]]:
        """The statements of a block with its edits, and the comments above one that went and had none after it."""
        body: list[Any] = []
        above: list[cst.EmptyLine] = []
        for old, new in zip(originals, updated, strict=True):
            statements = self._statement(old, new)
            if not statements:
                above = _joined(above, new.leading_lines)
            elif above:
                lines = _joined(above, statements[0].leading_lines)
                statements[0] = statements[0].with_changes(leading_lines=lines)
                above = []
            body += statements
        return body, above if any(line.comment for line in above) else []

    def _suite(self, original: cst.SimpleStatementSuite, updated: cst.SimpleStatementSuite) -> Any:
        """``if x: a; b`` stays on its line when no statement came to it, and becomes a block otherwise."""
        rows = self._rows(original.body, updated.body)
        if rows is None:
            return updated
        trailing = updated.trailing_whitespace
        if not rows:
            return updated.with_changes(body=[cst.Pass()], trailing_whitespace=cst.TrailingWhitespace())
        if len(rows) == 1 and isinstance(rows[0].statement, cst.SimpleStatementLine):
            return updated.with_changes(body=rows[0].statement.body)
        return cst.IndentedBlock(_laid_out(rows, (), trailing))

    def _statement(self, old: Any, new: Any) -> list[Any]:
        """What stands in the place of one statement, or of one line of them joined by ``;``."""
        if isinstance(old, cst.SimpleStatementLine):
            rows = self._rows(old.body, new.body)
            return [new] if rows is None else _laid_out(rows, new.leading_lines, new.trailing_whitespace)
        rows = self._rows([old], [new.with_changes(leading_lines=())])
        return [new] if rows is None else _laid_out(rows, new.leading_lines, None)

    def _rows(self, olds: Sequence[Any], news: Sequence[Any]) -> list[_Row] | None:
        """The lines that statements on one line become; None when no edit is about them."""
        if not any(old in self.waiting for old in olds):
            return None
        rows: list[_Row] = []
        line: list[cst.BaseSmallStatement] = []

        def end_line() -> None:
            if line:
                # A semicolon that stood before what is gone or on another line goes too.
                last = line[-1] if line[-1] is news[-1] else line[-1].with_changes(semicolon=cst.MaybeSentinel.DEFAULT)
                rows.append(_Row(cst.SimpleStatementLine([*line[:-1], last]), is_own=True))
                line.clear()

        for old, new in zip(olds, news, strict=True):
            edits = self.waiting.pop(old, [])
            instead = [edit for edit in edits if edit.action in ("replace", "delete")]
            for edit in edits:
                if edit.action == "before":
                    end_line()
                    rows += [_Row(statement, is_own=False) for statement in _statements(edit.code)]
            for index, statement in enumerate(_statements(instead[0].code) if instead else [new]):
                if index:
                    end_line()
                if isinstance(statement, cst.BaseSmallStatement):
                    line.append(statement)
                elif _is_plain_line(statement):
                    line += statement.body
                else:
                    end_line()
                    rows.append(_Row(statement, is_own=True))
            for edit in edits:
                if edit.action == "after":
                    end_line()
                    rows += [_Row(statement, is_own=False) for statement in _statements(edit.code)]
        end_line()
        return rows


def _is_plain_line(statement: Any) -> bool:
    """Whether it has no comment of its own, so that it can share a line or take the comment of one."""
    is_line = isinstance(statement, cst.SimpleStatementLine)
    return is_line and not statement.leading_lines and statement.trailing_whitespace.comment is None


@dataclass(frozen=True)
class _Row:
    """A statement on lines of its own. ``is_own``: it stood there, or stands in for what did."""

    statement: Any
    is_own: bool


def _laid_out(rows: Sequence[_Row], leading: Sequence[cst.EmptyLine], trailing: Any) -> list[Any]:
    """The statements of ``rows`` with the comments of the line that they come from: above it, and at its end."""
    if not rows:
        return []
    statements = [row.statement for row in rows]
    own = [index for index, row in enumerate(rows) if row.is_own] or [0]
    first, last = statements[own[0]], statements[own[-1]]
    blank, comments = _split(leading)
    if trailing is not None:
        if _is_plain_line(last):
            statements[own[-1]] = last.with_changes(trailing_whitespace=trailing)
        elif trailing.comment:
            comments = [*comments, cst.EmptyLine(comment=trailing.comment)]
    first = statements[own[0]]
    statements[own[0]] = first.with_changes(leading_lines=[*comments, *first.leading_lines])
    statements[0] = statements[0].with_changes(leading_lines=[*blank, *statements[0].leading_lines])
    return statements


def _split(lines: Sequence[cst.EmptyLine]) -> tuple[list[cst.EmptyLine], list[cst.EmptyLine]]:
    """Lines up to the last blank one, and the comments right above the statement."""
    start = max((index + 1 for index, line in enumerate(lines) if line.comment is None), default=0)
    return list(lines[:start]), list(lines[start:])


def _joined(above: Sequence[cst.EmptyLine], lines: Sequence[cst.EmptyLine]) -> list[cst.EmptyLine]:
    """Two runs of lines, one after the other, without the blank lines that would double."""
    start = len(above)
    while start and lines and above[start - 1].comment is None and lines[0].comment is None:
        start -= 1
    return [*above[:start], *lines]


def _expression(code: str) -> cst.BaseExpression | None:
    try:
        return cst.parse_expression(code)
    except cst.ParserSyntaxError:
        return None


def _statements(code: str) -> list[Any]:
    """The statements of ``code``, with the comments above them."""
    try:
        module = cst.parse_module(code)
    except cst.ParserSyntaxError:
        raise CannotEdit(f"the fix is not Python: {code}") from None
    body = list(module.body)
    if body and module.header:
        body[0] = body[0].with_changes(leading_lines=[*module.header, *body[0].leading_lines])
    return body


def _span(range_: CodeRange) -> Span:
    return Span(range_.start.line, range_.start.column, range_.end.line, range_.end.column)


def _span_of(node: cst.BaseExpression, range_: CodeRange, positions: Mapping[cst.CSTNode, CodeRange]) -> Span:
    """As ast counts: a tuple's parentheses are part of it, those of any other expression are not."""
    if isinstance(node, cst.Tuple) and node.lpar:
        return _span(CodeRange(positions[node.lpar[-1]].start, positions[node.rpar[0]].end))
    return _span(range_)
