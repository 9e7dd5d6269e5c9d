"""The weights that an optimizer trains along a path: in which format, who made them so, and how they are stepped."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from halfstep.lint import vocabulary
from halfstep.lint.event import Event, Path
from halfstep.lint.formats import format_of
from halfstep.lint.script import Script
from halfstep.lint.values import Const, Ident, Instance, Items, Object, Parameters, Table, Tensor, Value

PLAIN_OPTIMIZERS = ("torch.optim.", "bitsandbytes.optim.")
"""Homes of optimizers that write an update into the weight itself: no master copy, no stochastic rounding."""


@dataclass(frozen=True)
class Trained:
    """optimizer: as it was made, by event ``made``. formats: of the weights it was given. cast: what put them into 16
    bit. step: its first step along the path, ``scaler.step`` or ``optimizer.step``; None without one."""

    optimizer: Object
    made: Event
    formats: frozenset[str]
    cast: ast.AST
    step: Event | None

    @property
    def writes_plainly(self) -> bool:
        """Whether its updates go into the 16-bit weights, and are rounded there."""
        return self.optimizer.type.startswith(PLAIN_OPTIMIZERS)


class Formats:
    """The formats of weights as a path goes on. :meth:`see` takes its events in order."""

    def __init__(self) -> None:
        self._cast: dict[Ident, tuple[frozenset[str], Event]] = {}
        self._frozen: set[Ident] = set()

    def see(self, event: Event) -> None:
        receiver, made = event.receiver, event.result
        if event.what == "make" and isinstance(made, Object) and made.kind == "module":
            self._cast.pop(made.ident, None)
            asked = format_of(event.argument("torch_dtype") or event.argument("dtype"))
            if asked:
                self._cast[made.ident] = asked, event
        elif event.what.startswith("module.") and isinstance(receiver, Object | Instance):
            if event.name == "requires_grad_":
                on = event.argument("requires_grad", 0)
                (self._frozen.add if on == Const(False) else self._frozen.discard)(receiver.ident)
            elif asked := cast_of(event):
                self._cast[receiver.ident] = asked, event

    def cast_to_16_bit(self, ident: Ident) -> tuple[frozenset[str], Event] | None:
        """The 16-bit formats that a module's trainable weights are in, and the event that put them there."""
        known = self._cast.get(ident)
        return known if known is not None and known[0] <= {"fp16", "bf16"} and ident not in self._frozen else None


def all_trained(script: Script) -> list[Trained]:
    """Every optimizer of every path of a source that trains 16-bit weights; for ``script.once``."""
    return [trained for path in script.paths for trained in trained_in_16_bit(path)]


def trained_in_16_bit(path: Path) -> Iterator[Trained]:
    """Every optimizer of a path that is given weights which are 16 bit at its first step, or at the end without one."""
    formats = Formats()
    made: dict[Ident, Event] = {}
    done: set[Ident] = set()
    for event in (*path.before, *path.events):
        formats.see(event)
        if event.what == "make" and isinstance(event.result, Object) and event.result.kind == "optimizer":
            made[event.result.ident] = event
            done.discard(event.result.ident)
        elif event.what in {"scaler.step", "optimizer.step"}:
            optimizer = event.args[0] if event.what == "scaler.step" and event.args else event.receiver
            if isinstance(optimizer, Object) and optimizer.ident in made and optimizer.ident not in done:
                done.add(optimizer.ident)
                yield from _trained(made[optimizer.ident], formats, event)
    for ident, event in made.items():
        if ident not in done:
            yield from _trained(event, formats, None)


def _trained(made: Event, formats: Formats, step: Event | None) -> Iterator[Trained]:
    optimizer = made.result
    assert isinstance(optimizer, Object)
    for part in _parts(optimizer.argument("params", 0)):
        if isinstance(part, Parameters):
            casts = [formats.cast_to_16_bit(ident) for ident in sorted(part.of)]
            known = next(((found, event.node) for cast in casts if cast is not None for found, event in [cast]), None)
        else:
            known = (part.formats, part.node) if part.is_16_bit and part.node is not None else None
        if known is not None:
            yield Trained(optimizer, made, known[0], known[1], step)
            return


def _parts(params: Value | None) -> Iterator[Parameters | Tensor]:
    """What an optimizer was given, also in groups; frozen parameters were left out by the source."""
    if (isinstance(params, Parameters) and params.only != "frozen") or (
        isinstance(params, Tensor) and "parameter" in params.tags
    ):
        yield params
    elif isinstance(params, Items):
        for item in params.items:
            yield from _parts(item.get("params") if isinstance(item, Table) else item)


def inherits_format(cast: ast.AST) -> bool:
    """Whether a cast takes over the format of other weights: ``adapter.to(base.weight.dtype)``."""
    if not isinstance(cast, ast.Call):
        return False
    wanted = [*cast.args, *(keyword.value for keyword in cast.keywords if keyword.arg == "dtype")]
    return any(
        isinstance(arg, ast.Attribute) and arg.attr == "dtype" and re.search(r"weight|param", ast.unparse(arg.value))
        for arg in wanted
    )


def cast_of(event: Event) -> frozenset[str]:
    """The formats that a call of a module's method puts its weights into; empty when it casts nothing."""
    if event.name in {"half", "bfloat16", "float", "double"}:
        return frozenset({vocabulary.CAST_METHODS[event.name]})
    if event.name != "to":
        return frozenset()
    asked = [format_of(arg) for arg in (*event.args, event.argument("dtype"))]
    return next((formats for formats in asked if formats), frozenset())
