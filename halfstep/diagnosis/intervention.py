"""Run one call of the user's code another way, as an edit of its line would have it, to try the edit before it is made.

The call is the one that made the first non-finite value: known by its module, torch function, file and line. A changed
call goes through autograd like any other, so that its gradient is that of the edited line.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from halfstep.record import LOSS, Producer, Site
from halfstep.record.recorder import op_name
from halfstep.record.walk import function_name, user_line

Change = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""Runs a torch function with its arguments in another way, and returns what the line then has."""


class Intervention(TorchFunctionMode):
    """While it is open, the call of ``producer`` runs as ``change`` has it. ``num_changed`` counts how often."""

    def __init__(self, model: nn.Module, producer: Producer, change: Change) -> None:
        super().__init__()
        self._model, self._change = model, change
        module = None if producer.module == LOSS else producer.module
        self._place = (module, producer.function, producer.file, producer.line)
        self._running: list[str | None] = [None]
        self._handles: list[Any] = []
        self.num_changed = 0

    def __enter__(self) -> Self:
        for name, module in self._model.named_modules():
            self._handles.append(module.register_forward_pre_hook(lambda *_, name=name: self._running.append(name)))
            self._handles.append(module.register_forward_hook(self._leave, always_call=True))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _leave(self, *_: Any) -> None:
        self._running.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        place = (self._running[-1], function_name(func), *user_line())
        if place != self._place:
            return func(*args, **(kwargs or {}))
        self.num_changed += 1
        return self._change(func, args, kwargs or {})


def clamped(limit: float, goes_in: bool = False) -> Change:
    """The result of the call, or what goes into it, kept within what a format can hold: ``.clamp(-limit, limit)``."""

    def clamp(value: torch.Tensor) -> torch.Tensor:
        return value.clamp(-limit, limit)

    def change(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if goes_in:
            return _call(func, args, *_map_floats(clamp, (args, kwargs)))
        result = func(*args, **kwargs)
        is_in_place = bool(args) and result is args[0] and isinstance(result, torch.Tensor)
        return result.clamp_(-limit, limit) if is_in_place else _map_floats(clamp, result)

    return change


def in_fp32(device_type: str) -> Change:
    """The call in fp32, on inputs that are widened before it: ``.float()``, outside of autocast."""

    def change(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with torch.autocast(device_type, enabled=False):
            return _call(func, args, *_map_floats(torch.Tensor.float, (args, kwargs)))

    return change


def with_eps(eps: float) -> Change:
    """The call with ``eps=``, where its function has such an argument."""

    def change(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = inspect.signature(func).bind(*args, **kwargs)
        call.arguments["eps"] = eps
        return func(*call.args, **call.kwargs)

    return change


def away_from_zero(place: int, eps: float) -> Change:
    """The call with no element of its argument number ``place`` nearer to 0 than ``eps``; a sign stays."""

    def change(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        value = args[place]
        away = torch.where(value < 0, -eps, eps).to(value.dtype)
        moved = torch.where(value.abs() < eps, away, value)
        return _call(func, args, (*args[:place], moved, *args[place + 1 :]), kwargs)

    return change


class MaskedRows:
    """A visitor of a walk: the softmax of a row in which everything is masked out is that of zeros, not 0 / 0."""

    sees_views = False

    def visit(self, site: Site, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if op_name(func) in ("_softmax", "_log_softmax"):
            values, dim = args[:2]
            masked = (values == -math.inf).all(dim, keepdim=True)
            args = (values.masked_fill(masked, 0.0), *args[1:])
        return func(*args, **kwargs)


def _call(func: Any, args: tuple[Any, ...], changed: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``func`` on changed arguments. One that works in place has to write into the tensor that it was given."""
    result = func(*changed, **kwargs)
    is_in_place = bool(args) and result is changed[0] and isinstance(result, torch.Tensor)
    return args[0].copy_(result) if is_in_place else result


def _map_floats(function: Callable[[torch.Tensor], torch.Tensor], values: Any) -> Any:
    def one(value: torch.Tensor) -> torch.Tensor:
        return function(value) if value.is_floating_point() else value

    return tree_map_only(torch.Tensor, one, values)
