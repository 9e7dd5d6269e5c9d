"""The extremes of every operation's result, step by step: what grew, and what is not finite anywhere inside a step.

It sees each operation of a training step and takes two numbers of each, its smallest and largest value, which are read
together once a micro-batch. A step takes 2 to 4 times as long; recording it in full would take up to 10 times.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from halfstep.record.mask import MAIN_OUTPUT_ONLY
from halfstep.record.recorder import floats, is_uninitialised, op_name
from halfstep.record.walk import Site
from halfstep.window import Loss

Place = tuple[Site, str]
"""Where an operation runs, and its name."""

_BETWEEN_RANKS = {"c10d", "_c10d_functional", "fsdp"}
"""Namespaces of operations that send, and of those that fill what is sent: memory that is still being written."""


class History:
    """A visitor of a :class:`halfstep.record.walk.Walk` around training steps.

    It looks at what the closure of a micro-batch runs and at its backward pass, and neither at the optimizer nor at
    what ranks send each other. A closure that runs again starts anew.

    has_talked: whether a forward pass has used a collective of its own, so that no rank can run it alone.
    """

    sees_views = False

    def __init__(self) -> None:
        self.has_talked = False
        self._series: dict[Place, array[float]] = {}
        self._places: list[Place] = []
        self._extremes: list[torch.Tensor] = []
        self._is_inside = self._is_paused = False

    def watched(self, closure: Callable[[], Loss]) -> Callable[[], Loss]:
        """The closure, with what it runs seen."""

        def run() -> Loss:
            self._places.clear()
            self._extremes.clear()
            self._is_inside = True
            try:
                return closure()
            finally:
                self._is_inside = False

        return run

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What runs meanwhile is not seen."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def visit(self, site: Site, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        name = op_name(func)
        is_seen = (self._is_inside or site.phase == "backward") and not self._is_paused
        if func.namespace in _BETWEEN_RANKS:
            # DDP sends buffers before a forward pass, and leaves that out of one that is only looked at.
            self.has_talked |= is_seen and site.phase == "forward" and name != "broadcast_"
            return result
        if is_seen and not is_uninitialised(name):
            results = floats(result)
            for tensor in results[:1] if name.startswith(MAIN_OUTPUT_ONLY) else results:
                if tensor.numel() and not tensor.is_complex():
                    with torch.no_grad():
                        self._extremes += (value.float() for value in torch.aminmax(tensor.detach()))
                    self._places.append((site, name))
        return result

    def read(self, step: int) -> dict[tuple[Place, str], int]:
        """Add the micro-batch to the history as one of ``step``; where it is not finite: ``nan``, ``inf``, ``-inf``.

        Each with its number among the operations of the pass, in the order in which they ran.
        """
        numbers = torch.stack(self._extremes).tolist() if self._places else []
        bad: dict[tuple[Place, str], int] = {}
        largest: dict[Place, float] = {}
        for number, (place, low, high) in enumerate(zip(self._places, numbers[::2], numbers[1::2], strict=True)):
            for value in (low, high):
                if math.isfinite(value):
                    largest[place] = max(largest.get(place, 0.0), abs(value))
                else:
                    bad.setdefault((place, str(value)), number)
        for place, value in largest.items():
            self._series.setdefault(place, array("d")).extend((step, value))
        self._places.clear()
        self._extremes.clear()
        return bad

    def of(self, site: Site, op: str) -> list[tuple[int, float]]:
        """(step, largest magnitude) of the operation of this name at this place; several micro-batches count as one."""
        largest: dict[int, float] = {}
        series = self._series.get((site, op), array("d"))
        for step, value in zip(series[::2], series[1::2], strict=True):
            largest[int(step)] = max(largest.get(int(step), 0.0), value)
        return list(largest.items())
