"""Loading states without rounding them: of an optimizer, and of a model with 16-bit weights."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import nn, optim

from halfstep.dtypes import LOW_DTYPES
from halfstep.states import copied


def keep_formats(optimizer: optim.Optimizer) -> Callable[[], None]:
    """Make ``optimizer.load_state_dict`` keep the format of every state; returns what takes this back.

    torch casts each floating state to the dtype of its parameter: fp32 moments of a 16-bit weight would be rounded.
    States of torch's own optimizers, which have the format of the weight that they move, become fp32 if they were saved
    beside 16-bit weights without a rest.
    """
    loading: list[Mapping[str, Any]] = []

    def remember(_: optim.Optimizer, state: dict[str, Any]) -> None:
        loading[:] = [state]

    def put_back(loaded: optim.Optimizer) -> None:
        saved = loading.pop()
        ids = [number for group in saved["param_groups"] for number in group["params"]]
        parameters = [p for group in loaded.param_groups for p in group["params"]]
        for number, parameter in zip(ids, parameters, strict=True):
            if number in saved["state"]:
                loaded.state[parameter] = _in_formats_of(saved["state"][number], loaded.state[parameter])
                if type(loaded).__module__.startswith("torch.optim."):
                    widen_state(loaded.state[parameter])

    handles = [
        optimizer.register_load_state_dict_pre_hook(remember),
        optimizer.register_load_state_dict_post_hook(put_back),
    ]

    def remove() -> None:
        for handle in handles:
            handle.remove()

    return remove


def widen_state(state: dict[str, Any]) -> None:
    """Make the 16-bit states of a parameter fp32, in which its weight will be moved."""
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and value.dtype in LOW_DTYPES:
            state[name] = value.float()


def _in_formats_of(saved: Any, loaded: Any) -> Any:
    """``loaded``, with each tensor that has another format than in ``saved`` taken from there; states may be nested."""
    if isinstance(saved, torch.Tensor):
        return loaded if saved.dtype == loaded.dtype else copied(saved, loaded.device)
    if isinstance(saved, Mapping):
        # An optimizer may keep its states under other names than it saves them.
        return {key: _in_formats_of(saved[key], value) if key in saved else value for key, value in loaded.items()}
    if isinstance(saved, list | tuple):
        return type(saved)(map(_in_formats_of, saved, loaded))
    return loaded


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
        self._given: dict[nn.Module, list[tuple[torch.Tensor, torch.Tensor]]] = {}

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
        given = self._given[module] = []  # without what a load has left that failed
        for name, parameter in module._parameters.items():
            value = state.get(prefix + name)
            is_known = parameter is not None and weights is not None and parameter in weights
            if not is_known or not isinstance(value, torch.Tensor):
                continue
            assert parameter is not None
            if value.shape == parameter.shape and value.is_floating_point():
                given.append((parameter, value))

    def after(self, module: nn.Module, _: Any) -> None:
        weights = self._weights()
        for parameter, value in self._given.pop(module, []):
            if weights is not None:
                weights.set_weight(parameter, value)
