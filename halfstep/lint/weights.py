"""The weights that an optimizer trains along a path: in which format, who made them so, and how they are stepped."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from halfstep.lint import vocabulary
from halfstep.lint.event import Event, Path
from halfstep.lint.formats import format_of
from halfstep.lint.values import Const, Ident, Instance, Items, Object, Parameters, Table, Value

PLAIN_OPTIMIZERS = ("torch.optim.", "bitsandbytes.optim.")
"""Homes of optimizers that write an update into the weight itself: no master copy, no stochastic rounding."""


@dataclass(frozen=True)
class Trained:
    """optimizer: as it was made, by event ``made``. formats: of the weights it was given. cast: the event that put
    them into 16 bit. step: its first step along the path, ``scaler.step`` or ``optimizer.step``; None without one."""

    optimizer: Object
    made: Event
    formats: frozenset[str]
    cast: Event
    step: Event | None

    @property
    def writes_plainly(self) -> bool:
        """Whether its updates go into the 16-bit weights, and are rounded there."""
        return self.optimizer.type.startswith(PLAIN_OPTIMIZERS)


def trained_in_16_bit(path: Path) -> Iterator[Trained]:
    """Every optimizer of a path that is given weights which are 16 bit at its first step, or at the end without one."""
    formats: dict[Ident, tuple[frozenset[str], Event]] = {}
    frozen: set[Ident] = set()
    made: dict[Ident, Event] = {}
    done: set[Ident] = set()
    for event in (*path.before, *path.events):
        receiver = event.receiver
        if event.what == "make" and isinstance(event.result, Object):
            if event.result.kind == "optimizer":
                made[event.result.ident] = event
                done.discard(event.result.ident)
            elif event.result.kind == "module":
                formats.pop(event.result.ident, None)
                asked = format_of(event.argument("torch_dtype") or event.argument("dtype"))
                if asked:
                    formats[event.result.ident] = asked, event
        elif event.what.startswith("module.") and isinstance(receiver, Object | Instance):
            if event.name == "requires_grad_":
                on = event.argument("requires_grad", 0)
                (frozen.add if on == Const(False) else frozen.discard)(receiver.ident)
            else:
                asked = cast_of(event)
                if asked:
                    formats[receiver.ident] = asked, event
        elif event.what in {"scaler.step", "optimizer.step"}:
            optimizer = event.args[0] if event.what == "scaler.step" and event.args else receiver
            if isinstance(optimizer, Object) and optimizer.ident in made and optimizer.ident not in done:
                done.add(optimizer.ident)
                yield from _trained(made[optimizer.ident], formats, frozen, event)
    for ident, event in made.items():
        if ident not in done:
            yield from _trained(event, formats, frozen, None)


def _trained(
    made: Event, formats: dict[Ident, tuple[frozenset[str], Event]], frozen: set[Ident], step: Event | None
) -> Iterator[Trained]:
    optimizer = made.result
    assert isinstance(optimizer, Object)
    for ident in _owners(optimizer.argument("params", 0)):
        known = formats.get(ident)
        if known is not None and known[0] <= {"fp16", "bf16"} and ident not in frozen:
            yield Trained(optimizer, made, known[0], known[1], step)
            return


def _owners(params: Value | None) -> Iterator[Ident]:
    """The modules whose parameters an optimizer was given, also in groups; frozen ones were left out by the source."""
    if isinstance(params, Parameters) and params.only != "frozen":
        yield from params.of
    elif isinstance(params, Items):
        for item in params.items:
            yield from _owners(item.get("params") if isinstance(item, Table) else item)


def cast_of(event: Event) -> frozenset[str]:
    """The formats that a call of a module's method puts its weights into; empty when it casts nothing."""
    if event.name in {"half", "bfloat16", "float", "double"}:
        return frozenset({vocabulary.CAST_METHODS[event.name]})
    if event.name != "to":
        return frozenset()
    asked = [format_of(arg) for arg in (*event.args, event.argument("dtype"))]
    return next((formats for formats in asked if formats), frozenset())
