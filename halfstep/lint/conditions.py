"""Conditions: which side a run takes, what it remembers of that, and when it takes both."""

from __future__ import annotations

import ast
import re

from halfstep.lint.calls import Calls
from halfstep.lint.event import Decision
from halfstep.lint.values import Tensor

_STEPWISE = re.compile(r"[%(\[]|\bstep|\bit\b|\biter|\bi\b|\bidx\b|\bindex\b|count|norm|loss|<|>")
"""What a condition on the state of the training holds, and one on a setting does not."""
_MAIN = {"__name__ == '__main__'", "'__main__' == __name__"}


class Left(Exception):
    """A ``return``, ``break`` or ``continue`` on the way out."""


class Return(Left):
    pass


class Break(Left):
    pass


class Continue(Left):
    pass


class Raise(Left):
    pass


class Conditions(Calls):
    """Runs conditions. Where one matters and is not known, the oracle decides."""

    def block(self, body: list[ast.stmt]) -> None:
        raise NotImplementedError

    def _do_If(self, node: ast.If) -> None:
        num_recalled = self.num_recalled
        truth = self.condition(node.test)
        if truth is not None:
            recalled = self.num_recalled > num_recalled
            decision = (
                Decision(node, self.relevance.text(node.test), truth, self._is_mode(node.test)) if recalled else None
            )
            self._side(node, truth, decision)
            return
        if self._only_raises(node.body):
            self.rehearse(node.body)
            self.block(node.orelse)
        elif node.orelse and self._only_raises(node.orelse):
            self.block(node.body)
            self.rehearse(node.orelse)
        elif self._forks(node):
            self._side(node, self.decide(node), self.taken[-1])
        else:
            self._both(node)

    def _side(self, node: ast.If, taken: bool, decision: Decision | None) -> None:
        """Run one branch, under the decision that led there; None where the source leaves no choice."""
        depth = len(self.enclosing)
        if decision is not None:
            self.enclosing.append(decision)
        try:
            self.block(node.body if taken else node.orelse)
        finally:
            del self.enclosing[depth:]

    def condition(self, test: ast.expr) -> bool | None:
        """Whether a condition holds; a part that was decided before keeps its answer."""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            inner = self.condition(test.operand)
            return None if inner is None else not inner
        if isinstance(test, ast.BoolOp):
            stops = isinstance(test.op, ast.Or)
            answers = [self.condition(part) for part in test.values]
            if stops in answers:
                return stops
            return (not stops) if None not in answers else self._recall(test)
        if isinstance(test, ast.Compare) and self.relevance.text(test) in _MAIN:
            return True
        truth = self.truth(self.value(test))
        return truth if truth is not None or self.quiet else self._recall(test)

    def _recall(self, test: ast.expr) -> bool | None:
        """What was decided about a condition before."""
        truth = self.decided.get(self.relevance.text(test))
        self.num_recalled += truth is not None
        return truth

    def _forks(self, node: ast.If) -> bool:
        if self.quiet:
            return False
        inside = [*node.body, *node.orelse]
        if any(self.relevance.matters(part) for part in inside):
            return True
        function = self.functions[-1] if self.functions else None
        holder = function if function is not None else self.loops[-1].node if self.loops else None
        return (
            any(self.relevance.leaves(part) for part in inside)
            and holder is not None
            and self.relevance.matters(holder)
        )

    def decide(self, node: ast.If) -> bool:
        """Take a side: the oracle's, or the one a training step usually takes."""
        index = len(self.taken)
        taken = self.oracle[index] if index < len(self.oracle) else not _leaves_at_once(node.body)
        self.taken.append(Decision(node, self.relevance.text(node.test), taken, self._is_mode(node.test)))
        self._learn(node.test, taken)
        return taken

    def _learn(self, test: ast.expr, truth: bool) -> None:
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            self._learn(test.operand, not truth)
            return
        self.decided[self.relevance.text(test)] = truth
        if isinstance(test, ast.BoolOp) and truth is isinstance(test.op, ast.And):
            for part in test.values:
                self._learn(part, truth)
        opposite = self.relevance.opposite(test) if isinstance(test, ast.Compare) else None
        if opposite is not None:
            self.decided[opposite] = not truth

    def _is_mode(self, test: ast.expr) -> bool:
        value = None
        if isinstance(test, ast.Name):
            value = self.lookup(test.id)
        if isinstance(value, Tensor):
            return False
        text = self.relevance.text(test)
        if self.relevance.words(text) & self.relevance.counters:
            return False
        return not _STEPWISE.search(text) or bool(
            re.match(r"^[\w.]+\.(is_available|is_enabled|get|is_initialized)\(", text)
        )

    @staticmethod
    def _only_raises(body: list[ast.stmt]) -> bool:
        return isinstance(body[-1], ast.Raise)

    def rehearse(self, body: list[ast.stmt]) -> None:
        """Look at the sites of a branch that does not belong to a training step."""
        before = self.snapshot()
        self.quiet += 1
        returned = list(self.returned)
        try:
            self.block(body)
        except Left:
            pass
        finally:
            self.quiet -= 1
        self.returned[:] = returned
        self.restore(before)

    def _both(self, node: ast.If) -> None:
        """Run both branches, one after the other, and keep what they agree in."""
        before = self.snapshot()
        left: list[Left] = []
        self.quiet += 1
        try:
            try:
                self.block(node.body)
            except Left as reason:
                left.append(reason)
            after = self.snapshot()
            self.restore(before)
            try:
                self.block(node.orelse)
            except Left as reason:
                if left:
                    raise
                left.append(reason)
                self.restore(after)
                return
        finally:
            self.quiet -= 1
        if not left:
            self.merge(after)


def _leaves_at_once(body: list[ast.stmt]) -> bool:
    return isinstance(body[-1], ast.Continue | ast.Break | ast.Return | ast.Raise)
