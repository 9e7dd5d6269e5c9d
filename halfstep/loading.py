"""Loading states without rounding them: of an optimizer, and of a model with 16-bit weights."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import nn, optim

from halfstep.states import copied


def keep_formats(optimizer: optim.Optimizer) -> Callable[[], None]:
    """Make ``optimizer.load_state_dict`` keep the format of every state; returns what takes this back.

    torch casts each floating state to the dtype of its parameter: fp32 moments of a 16-bit weight would be rounded.
    """
    loading: list[Mapping[str, Any]] = []

    def remember(_: optim.Optimizer, state: dict[str, Any]) -> None:
        loading.append(state)

    def put_back(loaded: optim.Optimizer) -> None:
        saved = loading.pop()
        ids = [number for group in saved["param_groups"] for number in group["params"]]
        parameters = [p for group in loaded.param_groups for p in group["params"]]
        for number, parameter in zip(ids, parameters, strict=True):
            for name, value in saved["state"].get(number, {}).items():
                now = loaded.state[parameter][name]
                if isinstance(value, torch.Tensor) and value.dtype != now.dtype:
                    loaded.state[parameter][name] = copied(value, now.device)

    handles = [
        optimizer.register_load_state_dict_pre_hook(remember),
        optimizer.register_load_state_dict_post_hook(put_back),
    ]

    def remove() -> None:
        for handle in handles:
            handle.remove()

    return remove


class Weights(Protocol):
    """Whoever keeps more of a parameter than the 16 bits that the model holds."""

    def __contains__(self, parameter: object) -> bool: ...

    def set_weight(self, parameter: torch.Tensor, weight: torch.Tensor) -> None: ...


class ExactLoading:
    """Hooks for ``model.load_state_dict``: of weights finer than the 16-bit parameter, ``weights`` keeps all it can.

    They lie on the modules that own parameters and hold ``weights`` weakly; those of a copied or pickled model do
    nothing.
    """

    def __init__(self, weights: Weights | None = None) -> None:
        self._weights = (lambda: None) if weights is None else weakref.ref(weights)
        self._watched: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._given: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __reduce__(self) -> tuple[type[ExactLoading], tuple[()]]:
        return ExactLoading, ()

    def watch(self, model: nn.Module) -> list[Callable[[], None]]:
        """Hook every module with parameters that has no hook yet; returns what takes the hooks back."""
        removers: list[Callable[[], None]] = []
        for module in model.modules():
            if module._parameters and module not in self._watched:
                self._watched.add(module)
                removers.append(module.register_load_state_dict_pre_hook(self.before).remove)
                removers.append(module.register_load_state_dict_post_hook(self.after).remove)
        return removers

    def before(self, module: nn.Module, state: Mapping[str, Any], prefix: str, *_: Any) -> None:
        weights = self._weights()
        for name, parameter in module._parameters.items():
            value = state.get(prefix + name)
            is_known = parameter is not None and weights is not None and parameter in weights
            if not is_known or not isinstance(value, torch.Tensor):
                continue
            assert parameter is not None
            if value.shape == parameter.shape and value.dtype in (torch.float32, torch.float64):
                self._given.append((parameter, value))

    def after(self, module: nn.Module, _: Any) -> None:
        weights = self._weights()
        given, self._given = self._given, []
        for parameter, value in given:
            if weights is not None:
                weights.set_weight(parameter, value)
