"""The step along a path: what the gradients of each optimizer carry, and what still waits for ``update``.

Which parameters a backward pass reaches is not known: it is taken to reach those of every optimizer. Whatever may take
the loss scale out of them again is believed: ``unscale_``, ``step``, ``zero_grad``, a division by the scale, and code
that cannot be seen but is handed the scaler.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from halfstep.lint.event import Event, Path, comparable
from halfstep.lint.values import (
    Const,
    Ident,
    Instance,
    Items,
    Object,
    Parameters,
    Scale,
    Table,
    Tensor,
    Value,
)

if TYPE_CHECKING:
    from halfstep.lint.script import Script

Pair = tuple[Ident, Ident]
"""A scaler and an optimizer that it serves."""
_WINDOW = re.compile(r"^(?!.*(finite|nan|inf|norm|grad|[<>])).*%")
"""A condition that counts micro-batches, and asks for nothing else."""
_JUMPS = frozenset({"continue", "return", "break"})
_READ_ALONE = ("builtins.", "torch.save", "torch.load")


def follow(path: Path) -> Iterator[tuple[Event, Step]]:
    """Every event of ``path`` with the step as it stands just before it. It is one object, which moves on."""
    step = Step(path)
    for event in path:
        yield event, step
        step.take(event)


class Step:
    """Where a path stands in its training step."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._held: dict[Ident, frozenset[Ident]] = {}
        self._off: set[Ident] = set()
        self._position = 0
        self._backward: Event | None = None
        self._scaled: tuple[int, Event] | None = None
        self._cleared: dict[Ident, int] = {}
        self._cleared_all = -1
        self.began: dict[Pair, Event] = {}
        """The backward pass whose gradients a pair served last."""
        self.by_hand = False
        """Whether the scale was multiplied in or divided out by hand since the last ``update``, or may have been."""
        self.unscaled: dict[Pair, Event] = {}
        """The ``unscale_`` of an optimizer since the last ``update`` of its scaler."""
        self.stepped: dict[Pair, Event] = {}
        """The ``scaler.step`` of an optimizer since then."""
        for event in path:
            for value in (event.receiver, event.result, *event.args[:1]):
                if isinstance(value, Object) and value.kind == "optimizer":
                    self._held.setdefault(value.ident, held_by(value))
                elif isinstance(value, Object) and value.kind == "scaler" and is_off(value):
                    self._off.add(value.ident)

    # -- questions --

    @property
    def num_optimizers(self) -> int:
        """How many optimizers the path knows."""
        return len(self._held)

    def scaler_of(self, backward: Event) -> Ident | None:
        """The scaler that multiplied the loss of a backward pass; None where none did, or one that is off."""
        loss = backward.receiver
        scaled = isinstance(loss, Tensor) and "scaled" in loss.tags and loss.scaler not in self._off
        return loss.scaler if scaled and isinstance(loss, Tensor) else None

    def carried(self, event: Event, optimizer: Ident | None) -> Event | None:
        """The scaled backward pass whose scale the gradients of ``optimizer`` still carry when ``event`` comes.

        None for ``optimizer``: of one that is not known; then nothing may have been taken out of any.
        """
        if self._scaled is None:
            return None
        when, backward = self._scaled
        cleared = max(self._cleared.values(), default=-1) if optimizer is None else self._cleared.get(optimizer, -1)
        if when <= max(cleared, self._cleared_all) or not comparable(backward, event):
            return None
        return None if self.skips(backward, event, "unscale_") else backward

    def carried_by(self, event: Event, parameters: Value | None) -> Event | None:
        """The same of the optimizer that holds ``parameters`` (or those of a module, or the one of a gradient)."""
        owners = self.owners(parameters)
        if not owners:
            return self.carried(event, None)
        found = (self.carried(event, owner) for owner in owners)
        return next((backward for backward in found if backward is not None), None)

    def owners(self, parameters: Value | None) -> list[Ident]:
        """The optimizers of the path that hold some of ``parameters``."""
        wanted = idents_of(parameters)
        return [optimizer for optimizer, held in self._held.items() if held & wanted]

    def zeroes(self, event: Event) -> list[Ident]:
        """The optimizers that ``zero_grad`` of an optimizer, a module or a parameter is about; empty when not known."""
        receiver = event.receiver
        if isinstance(receiver, Object) and receiver.kind == "optimizer":
            return [receiver.ident]
        return self.owners(receiver)

    def skips(self, first: Event, second: Event, method: str) -> bool:
        """Whether the path may have gone round a call of ``method`` that belongs between two events.

        It may when another setting calls it, or when it depends on a condition while ``second`` depends on another.
        """
        if self._continued(first, second, method):
            return True
        depends = bool(set(second.decisions) - set(first.decisions))
        for decision in self._path.decisions:
            if isinstance(decision.node, ast.If) and (decision.text, decision.taken) not in first.modes:
                untaken = decision.node.orelse if decision.taken else decision.node.body
                if (decision.is_mode or depends) and any(calls(statement, method) for statement in untaken):
                    return True
        return False

    def _continued(self, first: Event, second: Event, method: str) -> bool:
        """Whether a ``continue`` between two events has left out the rest of a turn that calls ``method``."""
        places = {id(event): at for at, event in enumerate(self._path.events)}
        between = self._path.events[places[id(first)] : places[id(second)]]
        jumps = (event for event in between if event.what == "continue" and event.loops)
        return any(
            statement.lineno > jump.node.lineno and calls(statement, method)  # type: ignore[attr-defined]
            for jump in jumps
            for statement in jump.loops[-1].node.body
        )

    # -- what happens --

    def take(self, event: Event) -> None:
        """Move on over ``event``."""
        self._position += 1
        what = event.what
        if what == "backward":
            self._backward = event
            if self.scaler_of(event) is not None:
                self._scaled = self._position, event
        elif what in {"scaler.unscale_", "scaler.step"}:
            self._serve(event)
        elif what == "scaler.update" and isinstance(event.receiver, Object):
            self._updated(event.receiver.ident)
        elif what == "make" and isinstance(event.result, Object):
            self._forget(event.result.ident)
        elif what in {"optimizer.step", "optimizer.zero_grad", "module.zero_grad"}:
            self._clear(event)
        elif what in {"operator", "gradient.write", "tensor.mul_", "tensor.div_"}:
            if divides_by_scale(event):
                self._cleared_all, self.by_hand = self._position, True
        elif what in {"other", "call"}:
            self._hand_over(event)

    def _serve(self, event: Event) -> None:
        optimizer = optimizer_of(event)
        if optimizer is None:
            self._cleared_all = self._position
            return
        self._cleared[optimizer.ident] = self._position
        pair = pair_of(event)
        if pair is not None:
            (self.unscaled if event.what == "scaler.unscale_" else self.stepped)[pair] = event
            if self._backward is not None:
                self.began[pair] = self._backward

    def _updated(self, scaler: Ident) -> None:
        self._forget(scaler)
        self.by_hand = False

    def _forget(self, ident: Ident) -> None:
        """A scaler was updated, or a loop builds a scaler or an optimizer anew in every turn."""
        for waiting in (self.unscaled, self.stepped):
            for pair in [pair for pair in waiting if ident in pair]:
                del waiting[pair]

    def _clear(self, event: Event) -> None:
        owners = self.zeroes(event)
        if not owners:
            self._cleared_all = self._position
        for owner in owners:
            self._cleared[owner] = self._position

    def _hand_over(self, event: Event) -> None:
        """Code that is not seen may do anything with a scaler, and with an object that holds one."""
        if event.what == "call" and event.name.startswith(_READ_ALONE):
            return
        handed = [*event.args, *(value for _, value in event.keywords)]
        scalers = [value for value in handed if isinstance(value, Object) and value.kind == "scaler"]
        for scaler in scalers:
            self._updated(scaler.ident)
        scale = any(isinstance(value, Scale) for value in handed) and any(idents_of(value) for value in handed)
        holder = any(isinstance(value, Instance) and not value.is_module for value in handed)
        if holder:
            self.unscaled, self.stepped = {}, {}
        if scalers or scale or holder or "unscale" in event.name:
            self._cleared_all, self.by_hand = self._position, True


def is_off(scaler: Object) -> bool:
    """Whether a scaler does nothing, or belongs to a framework that drives it."""
    return scaler.argument("enabled") == Const(False) or scaler.type == "accelerate.scaler"


def optimizer_of(event: Event) -> Object | None:
    """The optimizer that ``scaler.step`` or ``unscale_`` is called for, None when it is not known."""
    value = event.argument("optimizer", 0)
    return value if isinstance(value, Object) and value.kind == "optimizer" else None


def pair_of(event: Event) -> Pair | None:
    """The scaler and the optimizer of ``scaler.step`` or ``unscale_``; None where one is not known or off."""
    scaler, optimizer = event.receiver, optimizer_of(event)
    if not isinstance(scaler, Object) or optimizer is None or is_off(scaler):
        return None
    return scaler.ident, optimizer.ident


def is_managed(optimizer: Object) -> bool:
    """Whether a framework steps it: one that ``accelerator.prepare`` gave back."""
    return optimizer.argument("prepared") is not None


def held_by(optimizer: Object) -> frozenset[Ident]:
    """The modules whose parameters an optimizer was built over; empty when that is not known."""
    return idents_of(optimizer.argument("params", 0))


def idents_of(value: Value | None) -> frozenset[Ident]:
    """The modules that parameters, a gradient or groups of parameters belong to; a module is its own."""
    if isinstance(value, Parameters | Tensor):
        return value.of
    if isinstance(value, Items):
        return frozenset(ident for item in value.items for ident in idents_of(item))
    if isinstance(value, Table):
        return idents_of(value.get("params"))
    if isinstance(value, Instance) or (isinstance(value, Object) and value.kind == "module"):
        return frozenset({value.ident})
    return frozenset()


def divides_by_scale(event: Event) -> bool:
    """Whether an operation takes the scale out of gradients, or may: it involves the scale, and no loss alone."""
    if not any(isinstance(value, Scale) for value in event.args):
        return False
    losses = [value for value in event.args if isinstance(value, Tensor) and "gradient" not in value.tags]
    return event.name == "mul" or not losses


def scaled_by(backward: Event) -> ast.expr | None:
    """The scaler of ``scaler.scale(loss).backward()``, as the source writes it; None where it is not at hand."""
    node = backward.receiver.node if isinstance(backward.receiver, Tensor) else None
    is_scale = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "scale"
    return node.func.value if is_scale and isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else None


def scaler_name(script: Script, backward: Event) -> str:
    """How messages call the scaler of a backward pass."""
    scaler = scaled_by(backward)
    return "scaler" if scaler is None else script.source(scaler)


def called_on(script: Script, event: Event) -> str:
    """What the method of an event is called on, as the source writes it; "" where that is not at hand."""
    node = event.node
    return script.source(node.func.value) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else ""


def handed(script: Script, event: Event) -> str:
    """The optimizer that ``scaler.step`` or ``unscale_`` is handed, as the source writes it; "" likewise."""
    node = event.node
    return script.source(node.args[0]) if isinstance(node, ast.Call) and node.args else ""


def in_helper(event: Event, word: str) -> bool:
    """Whether ``event`` happens in a function of this source that has ``word`` in its name."""
    return word in getattr(event.function, "name", "").lower()


def frame_of(event: Event, anchor: Event) -> tuple[ast.AST, ...]:
    """The calls that lead to the innermost function that holds both."""
    depth = 0
    while depth < min(len(event.calls), len(anchor.calls)) and event.calls[depth] is anchor.calls[depth]:
        depth += 1
    return event.calls[:depth]


def place(event: Event, anchor: Event) -> ast.AST:
    """Where the function that holds ``anchor`` comes to ``event``: its own node, or the call that leads there."""
    depth = len(frame_of(event, anchor))
    return event.calls[depth] if depth < len(event.calls) else event.node


def left_early(events: tuple[Event, ...], first: Event) -> Event | None:
    """The ``continue`` or ``return`` among ``events`` that leaves the iteration of ``first`` on a condition.

    None also for one that waits for the end of an accumulation window, and for one that leaves the loop itself.
    """
    found: Event | None = None
    for event in events:
        if event.what == "again":
            break
        outside = event.calls == first.calls[: len(event.calls)]
        if event.what not in _JUMPS or not outside:
            continue
        new = [decision for decision in event.decisions if decision not in first.decisions]
        if new and not any(_WINDOW.search(decision.text) for decision in new):
            if event.what == "break" or (event.what == "return" and _leaves_loop(event)):
                return None
            found = event
    return found


def since(path: Path, first: Event, index: int) -> tuple[Event, ...]:
    """The events of ``path`` after ``first`` and before ``index``."""
    start = next(at for at in range(index - 1, -1, -1) if path.events[at] is first)
    return path.events[start + 1 : index]


def is_abandoned(events: tuple[Event, ...], first: Event) -> bool:
    """Whether the step that ``first`` began was given up among ``events``: left early, or its gradients zeroed."""
    if left_early(events, first) is not None:
        return True
    zeroed = False
    for event in events:
        zeroed = zeroed or event.what in {"optimizer.zero_grad", "module.zero_grad"}
        if zeroed and event.what == "backward":
            return True
    return False


def _leaves_loop(event: Event) -> bool:
    """Whether a ``return`` leaves a loop of its function for good."""
    if event.function is None:
        return True
    first, last = event.function.lineno, event.function.end_lineno  # type: ignore[attr-defined]
    return any(first <= loop.node.lineno <= last for loop in event.loops)


def calls(node: ast.AST, method: str) -> bool:
    """Whether ``node`` holds a call of a method of this name."""
    return any(
        isinstance(inner, ast.Call) and isinstance(inner.func, ast.Attribute) and inner.func.attr == method
        for inner in ast.walk(node)
    )
