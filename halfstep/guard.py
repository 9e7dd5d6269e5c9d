"""A clear word where torch has an unclear one: a model with 16-bit weights that is called outside of a region."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import nn

from halfstep.dtypes import LOW_DTYPES
from halfstep.errors import HalfstepError


class Weights(Protocol):
    """Whoever holds weights of the model in 16 bit."""

    def held(self) -> Iterator[torch.Tensor]: ...


class RegionGuard:
    """A forward pre-hook of a model whose ``weights`` meet fp32 inputs, which only autocast brings together.

    It holds ``weights`` weakly; that of a copied or pickled model does nothing.
    """

    def __init__(self, weights: Weights | None = None) -> None:
        self._weights: Any = (lambda: None) if weights is None else weakref.ref(weights)

    def __reduce__(self) -> tuple[type[RegionGuard], tuple[()]]:
        return RegionGuard, ()

    def __call__(self, model: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        weights = self._weights()
        weight = None if weights is None else next(weights.held(), None)
        if weight is None or weight.dtype not in LOW_DTYPES:
            return
        opens_region = hasattr(model.forward, "halfstep_inner")  # cast for inference
        if not opens_region and not torch.is_autocast_enabled(weight.device.type):
            raise HalfstepError(
                "a model with 16-bit weights, called outside of a region",
                "they do not multiply with the fp32 values that come in",
                "Evaluate inside 'with stepper.inference():', train in stepper.step or stepper.forward().",
            )
