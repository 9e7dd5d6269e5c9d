"""Runs of one captured micro-batch, to see whether another policy, another scale or an edit mends it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any

from torch import nn

from halfstep.diagnosis.capture import Capture, largest_scale
from halfstep.policy import Policy
from halfstep.record.producer import LOSS, Producer, overflows
from halfstep.record.recorder import OperationRecorder
from halfstep.record.walk import eager

Contexts = Iterable[AbstractContextManager[object]]


class Trials:
    """A run is good if loss and gradient are finite; and where they are finite as captured, but ``producer`` makes an
    infinity that is lost again on the way, if its line makes none.

    base: the micro-batch as it was captured. is_bad: whether there is anything to mend. Models that are compiled run
    eagerly: each policy would be compiled anew.
    """

    def __init__(self, capture: Capture, producer: Producer | None) -> None:
        self.capture, self.policy = capture, capture.policy
        self._overflows_at: tuple[object, ...] | None = None
        self.base = self.capture.run(under=[eager()])
        if self.base.is_finite and producer is not None:
            self._overflows_at = (producer.module, producer.phase, producer.file, producer.line)
        self.is_bad = not self._run(self.policy, capture.scale)

    def is_good(self, policy: Policy, under: Callable[[], Contexts] = tuple) -> bool:
        """Whether loss and gradient are finite under ``policy``, at a scale that a run under it would come to.

        ``under`` makes the contexts of one run.
        """
        if policy.scale.kind == "none":
            return self._run(policy, 1.0, under())
        if self._run(policy, self.capture.scale, under()):
            return True
        # A dynamic scale goes down by itself. Where that alone mends it, it says nothing for the policy.
        goes_down = policy.scale.kind == "dynamic" and policy.scale.floor < self.capture.scale
        if not goes_down or self.largest_scale is not None:
            return False
        return self._run(policy, policy.scale.floor, under())

    @cached_property
    def largest_scale(self) -> float | None:
        """The largest loss scale below that of the capture at which it is finite; None if that is none, or no cure."""
        scale = self.policy.scale
        if scale.kind == "none" or not math.isfinite(self.base.loss) or self.capture.scale <= scale.floor:
            return None
        if not self._run(self.policy, scale.floor):
            return None
        return largest_scale(lambda lower: self._run(self.policy, lower), scale.floor, self.capture.scale)

    def leaf_before(self, module: str | None) -> str | None:
        """The module without parts that finished last before ``module`` began for the first time; None: of all."""
        order = _Order(self.capture.model, module)
        self.capture.run(under=[eager(), order])
        return order.leaf

    def _run(self, policy: Policy, scale: float, under: Contexts = ()) -> bool:
        if self._overflows_at is None:
            return self.capture.run(policy, scale, [eager(), *under]).is_finite
        recorder = OperationRecorder(self.capture.model)
        is_finite = self.capture.run(policy, scale, [*under, recorder]).is_finite
        record = recorder.read()
        sites = [record.operations[index].site for index in overflows(record)]
        return is_finite and not any(
            (LOSS if s.module is None else s.module, s.phase, s.file, s.line) == self._overflows_at for s in sites
        )


class _Order:
    """Notes which module without parts finishes last, until ``module`` begins for the first time."""

    def __init__(self, model: nn.Module, module: str | None) -> None:
        self._model, self._module = model, module
        self._handles: list[Any] = []
        self._is_over = False
        self.leaf: str | None = None

    def __enter__(self) -> None:
        for name, module in self._model.named_modules():
            self._handles.append(module.register_forward_pre_hook(lambda *_, name=name: self._begin(name)))
            if next(module.children(), None) is None:
                self._handles.append(module.register_forward_hook(lambda *_, name=name: self._end(name)))

    def __exit__(self, *_: Any) -> None:
        for handle in self._handles:
            handle.remove()

    def _begin(self, name: str) -> None:
        self._is_over |= name == self._module

    def _end(self, name: str) -> None:
        if not self._is_over:
            self.leaf = name
