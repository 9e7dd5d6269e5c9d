"""Follows every storage of a training step from birth to death.

A walk (``halfstep.record.Walk``) brings each operation with its place. A storage is born with the first tensor over it
and dies with the last: one weak reference a storage tells. What it was held for is known only at the end, since an
activation is what a forward pass made and left behind.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from halfstep.plan.answers import DEVICE
from halfstep.plan.step_trace import BACKWARD, FORWARD, STEP, Storage
from halfstep.record.walk import Site, Walk, is_view

_TO_COPY = torch.ops.aten._to_copy.default
_LIFT_FRESH = torch.ops.aten.lift_fresh.default
_COME_AND_GO = ("inputs", "gradients")
_NOWHERE = Site(None, None, "", None, None)


class _Entry:
    __slots__ = ("born", "died", "died_in", "label", "nbytes", "op", "phase", "reference", "site")

    def __init__(self, nbytes: int, label: str | None, site: Site, op: Any, phase: str | None, born: int) -> None:
        self.nbytes, self.label, self.site, self.op, self.phase, self.born = nbytes, label, site, op, phase, born
        self.died: int | None = None
        self.died_in: str | None = None
        self.reference: Any = None


class Ledger:
    """A visitor of a walk. :meth:`restart` begins the step that counts; :meth:`storages` are those of it.

    ``in_forward`` is set by who runs the loss function, and tells a forward pass from the end of a step.
    """

    sees_views = False

    def __init__(self) -> None:
        self.in_forward = False
        self.num_operations = 0
        self.phases: list[tuple[str, int]] = []
        self.time = 0
        self._alive: dict[int, _Entry] = {}
        self._entries: list[_Entry] = []
        self._kept_before: list[int] = []
        self._awaits_backward = False

    def hold(self, tensors: Iterable[torch.Tensor], label: str) -> None:
        """Say what ``tensors`` are held for: one of COMPONENTS. Those not seen before are born now."""
        for tensor in tensors:
            entry = self._alive.get(tensor.untyped_storage()._cdata)
            if entry is None:
                self._birth(tensor.untyped_storage(), label, _NOWHERE, None)
            else:
                entry.label = label

    def restart(self) -> None:
        """Begin again at time 0 with what is alive."""
        self._entries = list(self._alive.values())
        for entry in self._entries:
            if entry.label is None:  # made by an earlier step and kept
                entry.label = "buffers"
            entry.born, entry.phase, entry.site, entry.op = 0, None, _NOWHERE, None
        self.time, self.num_operations, self._awaits_backward = 0, 0, False
        self.phases = []
        self._kept_before = self._kept()

    def visit(self, site: Site, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.num_operations += 1
        result = func(*args, **kwargs)
        label = None
        if func is _TO_COPY:
            source = self._alive.get(args[0].untyped_storage()._cdata)
            if source is not None and source.label == "weights" and self.in_forward and result.dtype.itemsize == 2:
                label = "16-bit weights"
        for leaf in [result] if isinstance(result, torch.Tensor) else tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                if storage._cdata not in self._alive:
                    self._birth(storage, label, site, func)
        return result

    def is_steady(self) -> bool:
        """Whether as much is kept after this step as was before it; what it replaced may have been made anew."""
        return self._kept() == self._kept_before

    def _kept(self) -> list[int]:
        return sorted(entry.nbytes for entry in self._alive.values() if entry.label not in _COME_AND_GO)

    def storages(self) -> list[Storage]:
        """What the step held, each with the component that it turned out to be, in the order of birth.

        What was there before comes in an order of its own, the same in every window: an optimizer that makes a state
        anew puts it behind the others.
        """
        died = self._deaths()
        held = [
            Storage(
                entry.nbytes,
                self._component(entry),
                entry.phase,
                None if entry.op is None else str(entry.op),
                entry.site.module,
                entry.site.file,
                entry.site.line,
                entry.born,
                time,
            )
            for entry, time in zip(self._entries, died, strict=True)
        ]
        return sorted(held, key=lambda each: (each.born, each.died or math.inf, each.nbytes))

    def _deaths(self) -> list[int | None]:
        """When each entry died. Those that die in a row do so in the order of their birth.

        What is freed at one stroke, such as autocast's casts, dies in an order that addresses decide. No peak depends
        on it.
        """
        times = [entry.died for entry in self._entries]
        dead = [(time, at) for at, time in enumerate(times) if time is not None]
        row: list[tuple[int, int]] = []
        for time, at in [*sorted(dead), (0, 0)]:
            if row and (time != row[-1][0] + 1 or self._entries[at].died_in != self._entries[row[-1][1]].died_in):
                for (when, _), entry in zip(row, sorted(each for _, each in row), strict=True):
                    times[entry] = when
                row = []
            row.append((time, at))
        return times

    def _birth(self, storage: Any, label: str | None, site: Site, op: Any) -> None:
        phase = self._next()
        key, entry = storage._cdata, _Entry(storage.nbytes(), label, site, op, phase, self.time)
        entry.reference = weakref.ref(storage, lambda _: self._death(key))
        self._alive[key] = entry
        self._entries.append(entry)

    def _death(self, key: int) -> None:
        entry = self._alive.pop(key)
        entry.died_in = self._next()
        entry.died = self.time

    def _next(self) -> str:
        """Count an event; the phase that it belongs to."""
        if torch._C._current_graph_task_id() != -1:
            phase, self._awaits_backward = BACKWARD, False
        elif self.in_forward:
            phase, self._awaits_backward = FORWARD, True
        else:  # where a backward pass starts from is made before the engine runs
            phase = BACKWARD if self._awaits_backward else STEP
        self.time += 1
        if not self.phases or self.phases[-1][0] != phase:
            self.phases.append((phase, self.time))
        return phase

    def _component(self, entry: _Entry) -> str:
        if entry.label is not None:
            return entry.label
        if entry.phase == FORWARD and entry.died_in == FORWARD:
            return "forward temporaries"
        return {FORWARD: "activations", BACKWARD: "backward temporaries", STEP: "step temporaries"}[entry.phase or STEP]


class LedgerWalk(Walk):
    """A walk that shows a ledger what ``torch.tensor`` makes as well, which ``lift_fresh`` hands on like a view."""

    def hides(self, func: Any) -> bool:
        return func is not _LIFT_FRESH and super().hides(func)


class Unplaced(TorchDispatchMode):
    """Brings a ledger the operations without their places, which costs less than a walk."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ledger = ledger

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch would wrap each call to keep its compiler out, which does not run here."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE or (is_view(func) and func is not _LIFT_FRESH):
            return func(*args, **(kwargs or {}))
        return self._ledger.visit(_NOWHERE, func, args, kwargs or {})
