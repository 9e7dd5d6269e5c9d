"""The Accelerator that a Trainer makes for itself, where halfstep stands in front of it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from halfstep.integrations.accelerate import Accelerator
from halfstep.integrations.regions import OpenRegions
from halfstep.region import Region


class TrainerAccelerator(Accelerator):
    """What the Trainer makes: its loss is computed inside the region, and what models return is fp32 all the same."""

    def __init__(self, model_of: Callable[[], nn.Module | None], **kwargs: Any) -> None:
        """``model_of`` gives the Trainer's model, for what is computed before anything is prepared."""
        self._is_inside = False
        self._model_of = model_of
        self.adopted: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        super().__init__(**kwargs, opens_regions=False)  # they are opened here, unless they are open

    @property
    def has_stepper(self) -> bool:
        return bool(self._steppers)

    def adopt(self, model: nn.Module) -> None:
        """Let calls of ``model`` open regions of this accelerator, and of no earlier one."""
        super()._adopt(getattr(model, "_orig_mod", model))  # of a compiled model the one with the names of rules
        self.adopted.add(model)
        if model in self._regions:
            return
        if (opened := _opened_by.get(model)) is not None and (earlier := opened()) is not None:
            earlier.remove()
        self._regions[model] = regions = OpenRegions(model, self.region)
        _opened_by[model] = weakref.ref(regions)

    _adopt = adopt

    def region(self) -> AbstractContextManager[Any]:
        """The region, unless it is open. Without gradients a new one, since casts that are made there have none."""
        if not torch.is_grad_enabled():
            return self._formats().evaluation()
        return nullcontext() if self._is_inside else self._opened()

    _region = region

    def _formats(self) -> Region:
        self._build()
        model = self._model_of()
        if self._steppers or model is None:
            return super()._formats()
        if self._evaluation is None or self._evaluation.model is not model:
            self._evaluation = Region(model, self._policy)  # to evaluate, and for what DPO computes beforehand
        return self._evaluation

    @contextmanager
    def inside(self) -> Iterator[None]:
        """What runs in here is in the region already."""
        before, self._is_inside = self._is_inside, True
        try:
            yield
        finally:
            self._is_inside = before

    @contextmanager
    def _opened(self) -> Iterator[None]:
        with self.inside(), self._formats():
            yield


_opened_by: weakref.WeakKeyDictionary[nn.Module, weakref.ref[OpenRegions]] = weakref.WeakKeyDictionary()
"""Who hooks a model: of several trainers over one, each after the other, it is the last."""
