"""Accumulation windows: gradients of several micro-batches summed before one step of the optimizer."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache

from halfstep.lint.event import Event, Loop, Path
from halfstep.lint.script import Script
from halfstep.lint.step import is_managed, optimizer_of
from halfstep.lint.values import Object, Value

STEPS = frozenset({"scaler.step", "optimizer.step"})
_MICRO = re.compile(r"accum|micro|grad_acc|sub_?batch|virtual|\.chunk\(|\.split\(", re.I)
"""How sources call what an inner loop over the micro-batches of a window runs over."""

LoopNode = ast.For | ast.AsyncFor | ast.While


@dataclass(frozen=True)
class Period:
    """A condition that holds once in ``length`` turns, such as ``(i + 1) % n == 0`` or ``count == n``.

    index: what is counted. at_end: whether the condition is true at the end of a window, or false there. has_rest:
    whether it ends a window for another reason too, such as the last batch.
    """

    index: ast.expr
    length: ast.expr
    at_end: bool = True
    has_rest: bool = False

    @property
    def negated(self) -> Period:
        return replace(self, at_end=not self.at_end)


@dataclass(frozen=True, eq=False)
class Turn:
    """What happened in one turn of a loop, loops inside it included; ``loop`` is None for a function that is called
    once for each batch."""

    loop: LoopNode | None
    events: tuple[Event, ...]

    @property
    def has_backward(self) -> bool:
        return any(event.what == "backward" for event in self.events)

    @property
    def has_step(self) -> bool:
        return any(is_step(event) for event in self.events)


@dataclass(frozen=True)
class Window:
    """An accumulation window of a source.

    loop: over the micro-batches. ends: the ``if`` that ends a window, None when the loop itself is the window.
    period: its condition. length: the number of micro-batches. idle: turns with a backward and without a step.
    stepping: turns with the step, or what follows the loop.
    """

    loop: LoopNode | None
    ends: ast.If | None
    period: Period | None
    length: ast.expr
    idle: list[Turn] = field(default_factory=list)
    stepping: list[Turn] = field(default_factory=list)

    @property
    def backwards(self) -> Iterator[Event]:
        """Every backward of a micro-batch."""
        return (event for turn in self.idle for event in turn.events if event.what == "backward")

    def holds(self, event: Event) -> bool:
        """Whether a site of the source, whose turn is not known, belongs to this window."""
        if self.loop is None:
            return any(event.function is backward.function for backward in self.backwards)
        return any(loop.node is self.loop for loop in event.loops)


def is_step(event: Event) -> bool:
    """Whether an optimizer that no framework manages is stepped here, by itself or through a scaler."""
    if event.what not in STEPS:
        return False
    optimizer = stepped_by(event)
    return not (isinstance(optimizer, Object) and is_managed(optimizer))


def stepped_by(event: Event) -> Value | None:
    """What ``scaler.step(optimizer)`` or ``optimizer.step()`` steps."""
    return optimizer_of(event) if event.what == "scaler.step" else event.receiver


@lru_cache(2)
def windows(script: Script) -> tuple[Window, ...]:
    """The accumulation windows of a source, each with its turns on all paths."""
    if not script.has("backward"):
        return ()
    periods = Periods(script)
    found: dict[tuple[LoopNode | None, ast.If | None], Window] = {}
    every = [(path, turn) for path in script.paths for turn in turns(path)]
    idle: dict[LoopNode | None, list[Turn]] = {}
    for _, turn in every:
        if turn.has_backward and not turn.has_step:
            idle.setdefault(turn.loop, []).append(turn)
    for path, turn in every:
        for step in filter(is_step, turn.events):
            ends, period = _ending(script, path, step, turn, periods)
            if ends is None or period is None or not turn.has_backward:
                continue
            within = [other for other in idle.get(turn.loop, ()) if not _has_ended(other, ends, period)]
            if within:
                window = Window(turn.loop, ends, period, period.length, within)
                window = found.setdefault((turn.loop, ends), window)
                if turn not in window.stepping:
                    window.stepping.append(turn)
        _loops_that_are_windows(turn, idle, script, found)
    return tuple(found.values())


def _has_ended(turn: Turn, ends: ast.If, period: Period) -> bool:
    """Whether a turn came to the end of a window, and went without a step for another reason."""
    decisions = (decision for event in turn.events for decision in event.decisions)
    return any(decision.node is ends and decision.taken is period.at_end for decision in decisions)


def _ending(
    script: Script, path: Path, step: Event, turn: Turn, periods: Periods
) -> tuple[ast.If | None, Period | None]:
    """The condition under which ``step`` ends a window of the loop of ``turn``."""
    for decision in reversed(step.decisions):
        if isinstance(decision.node, ast.If) and _loop_of(decision.node, step.loops) is turn.loop:
            period = periods.of(decision.node.test, decision.node)
            if period is not None and period.at_end == decision.taken:
                return decision.node, period
    for decision in path.decisions:  # `if (i + 1) % n: continue`
        node = decision.node
        if isinstance(node, ast.If) and not decision.taken and isinstance(node.body[-1], ast.Continue | ast.Return):
            after = step.function is script.function(node) and step.node.lineno > node.lineno  # type: ignore[attr-defined]
            period = periods.of(node.test, node) if after and _loop_of(node, step.loops) is turn.loop else None
            if period is not None and not period.at_end:
                return node, period
    return None, None


def _loop_of(condition: ast.AST, loops: tuple[Loop, ...]) -> ast.AST | None:
    """The innermost loop that a condition stands in, or that calls the function which it stands in."""
    return next((loop.node for loop in reversed(loops) if not encloses(condition, loop.node)), None)


def _loops_that_are_windows(
    turn: Turn,
    idle: dict[LoopNode | None, list[Turn]],
    script: Script,
    found: dict[tuple[LoopNode | None, ast.If | None], Window],
) -> None:
    """``for _ in range(accumulate): ... backward()`` and then a step: the loop is the window."""
    for index, event in enumerate(turn.events):
        loop = event.node
        if event.what != "end" or not isinstance(loop, ast.For) or loop not in idle:
            continue
        if any(inner.loops and inner.loops[-1].node is loop and is_step(inner) for inner in turn.events):
            continue
        if not _MICRO.search(script.source(loop.iter)):
            continue
        rest = turn.events[index:]
        if any(is_step(later) and later.loops == event.loops for later in rest):
            window = found.setdefault((loop, None), Window(loop, None, None, _length(loop), idle[loop]))
            window.stepping.append(Turn(turn.loop, rest))


def _length(loop: ast.For) -> ast.expr:
    iterable = loop.iter
    if isinstance(iterable, ast.Call) and getattr(iterable.func, "id", "") == "enumerate" and iterable.args:
        iterable = iterable.args[0]
    if isinstance(iterable, ast.Call) and getattr(iterable.func, "id", "") == "range" and len(iterable.args) == 1:
        return iterable.args[0]
    return ast.Call(ast.Name("len", ast.Load()), [iterable], [])


def turns(path: Path) -> list[Turn]:
    """The events of a path by the turn of the loop that they happen in, an inner loop's in the outer's too."""
    entered: dict[ast.AST, int] = {}
    found: dict[tuple[ast.AST | None, int, int], list[Event]] = {}
    for event in path:
        if event.what == "loop":
            entered[event.node] = entered.get(event.node, 0) + 1
        for loop in event.loops:
            found.setdefault((loop.node, entered.get(loop.node, 0), loop.turn), []).append(event)
        found.setdefault((None, 0, 0), []).append(event)
    return [Turn(node, tuple(events)) for (node, _, _), events in found.items()]  # type: ignore[arg-type]


def encloses(outer: ast.AST, inner: ast.AST) -> bool:
    """Whether ``inner`` stands within ``outer`` in the source."""
    return _start(outer) <= _start(inner) and _end(inner) <= _end(outer)


def _start(node: ast.AST) -> tuple[int, int]:
    return node.lineno, node.col_offset  # type: ignore[attr-defined]


def _end(node: ast.AST) -> tuple[int, int]:
    return node.end_lineno, node.end_col_offset  # type: ignore[attr-defined]


class Periods:
    """Reads conditions of a source as periods, through names that were assigned once."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._assigned: dict[tuple[ast.AST | None, str], list[ast.expr]] = {}
        self._zeroed: list[tuple[ast.Assign, str]] = []
        for node in script.walk(ast.Assign):
            assert isinstance(node, ast.Assign)
            for target in node.targets:
                if isinstance(target, ast.Name):
                    self._assigned.setdefault((script.function(node), target.id), []).append(node.value)
                if isinstance(node.value, ast.Constant) and node.value.value == 0:
                    self._zeroed.append((node, ast.unparse(target)))
        self.loops = list(script.walk(ast.For, ast.AsyncFor, ast.While))
        self._counted = {
            ast.unparse(node.target) for node in script.walk(ast.AugAssign) if isinstance(node, ast.AugAssign)
        }

    def of(self, test: ast.expr, around: ast.If) -> Period | None:
        """The period of the condition ``test`` of the statement ``around``; None when it is none."""
        return self._read(test, around, 0)

    def zeroed(self, name: str) -> list[ast.Assign]:
        """Where ``name`` is set to 0."""
        return [node for node, target in self._zeroed if target == name]

    def _read(self, test: ast.expr, around: ast.If, depth: int) -> Period | None:
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            inner = self._read(test.operand, around, depth)
            return None if inner is None else inner.negated
        if isinstance(test, ast.BoolOp):
            return self._either(test, around, depth)
        if isinstance(test, ast.Compare) and len(test.ops) == 1:
            return self._compared(test.left, test.ops[0], test.comparators[0], around)
        if isinstance(test, ast.BinOp) and isinstance(test.op, ast.Mod):
            return Period(test.left, test.right, at_end=False)
        if isinstance(test, ast.Name) and depth < 3:
            values = self._assigned.get((self._script.function(around), test.id), [])
            return self._read(values[0], around, depth + 1) if len(values) == 1 else None
        return None

    def _either(self, test: ast.BoolOp, around: ast.If, depth: int) -> Period | None:
        parts = [self._read(part, around, depth) for part in test.values]
        period = next((part for part in parts if part is not None), None)
        if period is None:
            return None
        # `end or last`, and its negation `inside and not last`: the window ends in another case too.
        more = period.at_end is isinstance(test.op, ast.Or)
        return replace(period, has_rest=period.has_rest or more)

    def _compared(self, left: ast.expr, op: ast.cmpop, right: ast.expr, around: ast.If) -> Period | None:
        if isinstance(right, ast.BinOp) and isinstance(right.op, ast.Mod):
            left, right = right, left
        if isinstance(left, ast.BinOp) and isinstance(left.op, ast.Mod):
            if isinstance(op, ast.Eq | ast.NotEq):
                return Period(left.left, left.right, isinstance(op, ast.Eq))
            return Period(left.left, left.right, at_end=False) if isinstance(op, ast.Gt) else None
        name = ast.unparse(left)
        is_reset = name in self._counted and any(encloses(around, node) for node in self.zeroed(name))
        return Period(left, right) if is_reset and isinstance(op, ast.Eq | ast.GtE) else None


def in_turn(event: Event, loop: LoopNode | None) -> ast.AST:
    """The node of the loop's own code that leads to ``event``: the event's, or the call of a function around it."""
    nodes = [*event.calls, event.node]
    if loop is None:
        return nodes[1] if len(nodes) > 1 and isinstance(nodes[0], ast.FunctionDef | ast.AsyncFunctionDef) else nodes[0]
    return next((node for node in nodes if encloses(loop, node)), event.node)
