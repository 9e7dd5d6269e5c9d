"""Where a run through a source stands: names, objects, surroundings, decisions, and the events so far."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import TypeVar

from halfstep.lint.event import Decision, Event, Loop
from halfstep.lint.formats import devices_among
from halfstep.lint.names import Names
from halfstep.lint.relevance import Relevance
from halfstep.lint.values import Ident, Instance, Object, Unknown, Value, join

MAX_WORK = 60_000
"""Nodes that one path may evaluate; a longer one is cut off."""


class CutOff(Exception):
    """The path has spent its work."""


@dataclass
class Frame:
    """The local names of one call. ``parent``: the frame of the enclosing function, for free names."""

    values: dict[str, Value] = field(default_factory=dict)
    parent: int | None = None
    owner: Value | None = None


Formats = dict[Ident, frozenset[str]]
Devices = dict[Ident, frozenset[str]]
Snapshot = tuple[dict[str, Value], dict[tuple[Ident, str], Value], Formats, Devices]


class State:
    """One path in the making.

    oracle: the first decisions to take; later ones take their usual side. base: a state whose globals and objects this
    one begins with.
    """

    def __init__(
        self, names: Names, relevance: Relevance, oracle: tuple[bool, ...] = (), base: State | None = None
    ) -> None:
        self.names, self.relevance, self.oracle = names, relevance, oracle
        self.frames: list[Frame] = [Frame()] if base is None else [Frame(dict(base.frames[0].values)), *base.frames[1:]]
        self.frame = 0
        self.heap: dict[tuple[Ident, str], Value] = {} if base is None else dict(base.heap)
        self.formats: dict[Ident, frozenset[str]] = {} if base is None else dict(base.formats)
        """The formats of the weights of a module; an absent one has never been cast here."""
        self.devices: dict[Ident, frozenset[str]] = {} if base is None else dict(base.devices)
        """The device types that a module was moved to; empty when it was moved to one that is not known."""
        self.frozen: set[Ident] = set() if base is None else set(base.frozen)
        self.contexts: list[Object] = []
        self.loops: list[Loop] = []
        self.calls: list[ast.AST] = []
        self.functions: list[ast.AST] = []
        self.returned: list[Value] = []
        self.outside = 0
        """How many contexts were open when the present function was called."""
        self.yielded: tuple[Object, ...] = ()
        """The contexts that were open where the present function yielded."""
        self.enclosing: list[Decision] = []
        self.decided: dict[str, bool] = {}
        self.num_recalled = 0
        """How often an answer of ``decided`` was asked for and found."""
        self.taken: list[Decision] = []
        self.updates: dict[Ident, int] = {}
        self.events: list[Event] = []
        self.sites: dict[object, Event] = {}
        self.inlined: set[ast.AST] = set()
        self.quiet = 0
        """Above 0, both sides of every condition run one after the other, and only sites are kept."""
        self.forward_depth = 0
        self.work = 0

    # -- names --

    def lookup(self, name: str) -> Value | None:
        index: int | None = self.frame
        while index is not None:
            frame = self.frames[index]
            if name in frame.values:
                return frame.values[name]
            index = frame.parent
        return self.frames[0].values.get(name)

    def bind(self, name: str, value: Value) -> None:
        self.frames[self.frame].values[name] = value
        self.forget(name)

    def becomes(self, known: Unknown, value: Value) -> None:
        """What its use tells about a value that was not known holds for every name of it."""
        if known.name:
            values = self.frames[self.frame].values
            values.update({name: value for name, held in values.items() if held is known})
            self.heap.update({key: value for key, held in self.heap.items() if held is known})

    def forget(self, name: str) -> None:
        """Decisions that read ``name`` hold no longer: it has been assigned."""
        if self.decided:
            self.decided = {t: v for t, v in self.decided.items() if name not in self.relevance.words(t)}

    # -- both sides of a condition that does not matter for the order --

    def snapshot(self) -> Snapshot:
        return dict(self.frames[self.frame].values), dict(self.heap), dict(self.formats), dict(self.devices)

    def restore(self, snapshot: Snapshot) -> None:
        values, heap, formats, devices = snapshot
        self.frames[self.frame].values, self.heap = dict(values), dict(heap)
        self.formats, self.devices = dict(formats), dict(devices)

    def merge(self, other: Snapshot) -> None:
        """Keep what this state and ``other`` agree in; a name known on one side alone keeps its value."""
        values, heap, formats, devices = other
        _merge(self.frames[self.frame].values, values)
        _merge(self.heap, heap)
        for ident, known in formats.items():
            self.formats[ident] = self.formats.get(ident, frozenset({"fp32"})) | known
        for ident in self.formats.keys() - formats.keys():
            self.formats[ident] |= {"fp32"}
        for ident in self.devices.keys() | devices.keys():
            mine, others = self.devices.get(ident), devices.get(ident)
            self.devices[ident] = mine | others if mine and others else frozenset()

    # -- events --

    def emit(
        self,
        what: str,
        node: ast.AST,
        name: str = "",
        receiver: Value | None = None,
        args: tuple[Value, ...] = (),
        keywords: tuple[tuple[str, Value], ...] = (),
        result: Value | None = None,
    ) -> None:
        event = Event(
            what,
            name,
            node,
            receiver,
            args,
            keywords,
            result,
            tuple(self.contexts),
            tuple(self.loops),
            tuple(self.enclosing),
            tuple(self.calls),
            self.functions[-1] if self.functions else None,
            self._whereabouts(receiver, args),
        )
        if not self.quiet and not (self.forward_depth and what in _SITES_ALONE):
            self.events.append(event)
        region = event.region
        around = None if region is None else region.node, len(self.loops) > 0
        key = (id(node), what, name, receiver, args, keywords, event.devices, around)
        self.sites.setdefault(key, event)

    def _whereabouts(self, receiver: Value | None, args: tuple[Value, ...]) -> frozenset[str]:
        moved = self.devices.get(receiver.ident) if isinstance(receiver, Object | Instance) else None
        return moved or devices_among((receiver, *args))

    def spend(self) -> None:
        self.work += 1
        if self.work > MAX_WORK:
            raise CutOff

    def ident(self, node: ast.AST) -> Ident:
        places = [*self.calls, node]
        return tuple(at for place in places for at in (place.lineno, place.col_offset))  # type: ignore[attr-defined]

    def copy_attributes(self, old: Ident, new: Ident) -> None:
        """A deep copy has the attributes and formats of what it was made of."""
        self.heap |= {(new, name): value for (ident, name), value in self.heap.items() if ident == old}
        if old in self.formats:
            self.formats[new] = self.formats[old]
        if old in self.devices:
            self.devices[new] = self.devices[old]


Key = TypeVar("Key")
_SITES_ALONE = {"operator", "call", "compare", "store", "other", "item", "cast", "forward", "local"}


def _merge(mine: dict[Key, Value], other: dict[Key, Value]) -> None:
    for key, value in other.items():
        known = mine.get(key)
        if known is not value:
            mine[key] = value if known is None else join(known, value)
