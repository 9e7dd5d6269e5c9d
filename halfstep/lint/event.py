"""What happens on one way through a source: events in order, each with its surroundings."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field

from halfstep.lint.values import Object, Value


@dataclass(frozen=True)
class Loop:
    """A loop that an event happens in. ``turn``: 0 in the first run of its body, 1 in the second."""

    node: ast.For | ast.AsyncFor | ast.While = field(repr=False)
    turn: int


@dataclass(frozen=True)
class Decision:
    """A condition whose truth is not known, and what this path takes it for.

    ``is_mode``: it asks for a setting (``use_amp``, ``cfg.fp16``), which stays for the run and may be the same as
    another under another name; otherwise for something that changes from step to step (``i % n == 0``).
    """

    node: ast.AST = field(compare=False, repr=False)
    text: str
    taken: bool
    is_mode: bool


@dataclass(frozen=True)
class Event:
    """A call, operator or assignment that was understood.

    what: ``scaler.scale scaler.step scaler.update scaler.unscale_ scaler.get_scale scaler.state_dict
    scaler.load_state_dict``, ``optimizer.step optimizer.zero_grad optimizer.state_dict ...``, ``scheduler.step``,
    ``backward`` (of a tensor), ``autograd.grad``, ``clip``, ``gradient.read``, ``gradient.write``, ``forward`` (of a
    module), ``make`` (an object was built: ``result``), ``module.METHOD``, ``replace`` (a submodule or parameter was
    assigned: receiver is the module), ``save``, ``load``, ``enter``, ``leave`` (a ``with``), ``loop``, ``again``,
    ``end`` (first turn, next turn, end of a loop), ``return continue break raise``; ``cast``; ``item``;
    ``tensor.METHOD``, ``call`` of a library function (``name`` is its qualified name), ``operator`` (``name`` is add,
    sub, mul, div, pow, matmul ...), ``compare``, ``store`` (``x[i] = y``), ``read`` (an attribute of a scaler),
    ``KIND.METHOD`` of any other object.

    name: the method, operator, or qualified name. receiver: what it was called on. args, keywords: as passed.
    result: what it gave. contexts: objects of the ``with`` blocks around it, outermost first, those of callers
    included. loops: likewise. decisions: the conditions around it (enclosing ``if``), callers' included. calls: the
    call nodes of this source that lead to it, outermost first. devices: the device types that the module it was called
    on is on, or the tensors it was handed; empty when that is not known.
    """

    what: str
    name: str
    node: ast.AST = field(compare=False, repr=False)
    receiver: Value | None = None
    args: tuple[Value, ...] = ()
    keywords: tuple[tuple[str, Value], ...] = ()
    result: Value | None = None
    contexts: tuple[Object, ...] = ()
    loops: tuple[Loop, ...] = ()
    decisions: tuple[Decision, ...] = ()
    calls: tuple[ast.AST, ...] = ()
    function: ast.AST | None = None
    devices: frozenset[str] = frozenset()

    def argument(self, name: str, position: int | None = None) -> Value | None:
        """The argument passed by name, or at ``position``; None when it was left out."""
        for keyword, value in self.keywords:
            if keyword == name:
                return value
        return self.args[position] if position is not None and position < len(self.args) else None

    @property
    def region(self) -> Object | None:
        """The innermost autocast region around it, also one that is turned off."""
        return next((context for context in reversed(self.contexts) if context.kind == "region"), None)

    @property
    def in_no_grad(self) -> bool:
        return any(context.kind == "no_grad" for context in self.contexts)

    @property
    def modes(self) -> frozenset[tuple[str, bool]]:
        """The settings under which it happens."""
        return frozenset((d.text, d.taken) for d in self.decisions if d.is_mode)


@dataclass(frozen=True)
class Path:
    """One way through a root: the module's own code, or a function that nothing in the file calls.

    events: those of the step and its order; what happens to values alone is in ``Script.sites``. decisions: what the
    path takes every open condition for, in order. before: for a function, what the module's own code did before any
    call: the objects that it made, in order, whichever branch made them.
    """

    root: ast.AST = field(repr=False)
    events: tuple[Event, ...]
    decisions: tuple[Decision, ...]
    before: tuple[Event, ...] = field(default=(), repr=False)

    def __iter__(self) -> Iterator[Event]:
        return iter(self.events)


def comparable(first: Event, second: Event) -> bool:
    """Whether two events surely belong to one run of the program.

    ``if use_amp: scaler.scale(loss).backward()`` and ``if fp16: optimizer.step()`` stand under two settings that may
    be one; a rule that holds them against each other would guess. An event under no setting, or under the settings of
    the other and more, is sure.
    """
    return first.modes <= second.modes or second.modes <= first.modes
