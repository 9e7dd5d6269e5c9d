"""Who made the first non-finite value: one recorded forward and backward pass, at the level of modules.

A value that is finite going in and not finite coming out was made by that module; one that comes in non-finite is only
carried on. Each check waits for the device, so this runs once, when a loss scale is exhausted, and never in a healthy
step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

LOSS = "the loss function"
BATCH = "the batch"


@dataclass(frozen=True)
class Producer:
    """The module that made the first non-finite value. phase: ``forward`` or ``backward``. kind: ``inf`` or ``nan``."""

    module: str
    phase: str
    kind: str

    @property
    def is_module(self) -> bool:
        """Whether it can be named in a policy; a batch, a loss function and a model's own forward cannot."""
        return self.module not in ("", LOSS, BATCH)

    def __str__(self) -> str:
        return f"{self.module or 'the outermost module'} makes it ({self.kind}) in the {self.phase} pass"


class _Call:
    """One call of a module: kinds of non-finite values in inputs and output, and in the gradients of both."""

    def __init__(self, module: str, parent: _Call | None) -> None:
        self.module, self.parent = module, parent
        self.input: str | None = None
        self.output: str | None = None
        self.grad_output: str | None = None
        self.grad_input: str | None = None
        self.is_reached = False  # by the backward pass; of a checkpoint's two calls, one is not


def find_producer(
    model: nn.Module, forward: Callable[[], torch.Tensor], backward: Callable[[torch.Tensor], None]
) -> Producer | None:
    """Run ``loss = forward()`` and ``backward(loss)`` once and name what made the first non-finite value.

    None when every value was finite this time. The gradients that the pass leaves in ``.grad`` are the caller's to
    drop.
    """
    started: list[_Call] = []
    running: list[_Call] = []
    finished: list[_Call] = []
    handles: list[Any] = []

    def look(tensor: torch.Tensor, call: _Call, field: str) -> None:
        def at_gradient(gradient: torch.Tensor) -> None:
            call.is_reached = True
            setattr(call, field, getattr(call, field) or _kind(gradient))

        handles.append(tensor.register_hook(at_gradient))

    def watch(name: str, module: nn.Module) -> None:
        def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
            call = _Call(name, running[-1] if running else None)
            started.append(call)
            running.append(call)
            call.input = _kind((args, kwargs))

            def alias(tensor: torch.Tensor) -> torch.Tensor:
                # A tensor of this call's own: the gradient of the one passed in sums over all who use it.
                if not _takes_gradient(tensor):
                    return tensor
                tensor = tensor.view_as(tensor)
                look(tensor, call, "grad_input")
                return tensor

            return tree_map_only(torch.Tensor, alias, (args, kwargs))

        def after(module: nn.Module, args: Any, output: Any) -> None:
            call = running.pop()
            while call.module != name:  # one that raised was never finished
                call = running.pop()
            call.output = _kind(output)
            for tensor in filter(_takes_gradient, _floats(output)):
                look(tensor, call, "grad_output")
            finished.append(call)

        handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(module.register_forward_hook(after))

    for name, module in model.named_modules():
        watch(name, module)
    try:
        loss = forward()
        # While the loss is finite, an infinity on the way was meant, as in an attention mask.
        if loss_kind := _kind(loss):
            # Modules finish in order of execution, children before their parents.
            for call in finished:
                if call.output and not call.input:
                    return Producer(call.module, "forward", call.output)
            return Producer(BATCH if started and started[0].input else LOSS, "forward", loss_kind)
        backward(loss)
    finally:
        for handle in handles:
            handle.remove()
    return _backward_producer(model, finished)


def _backward_producer(model: nn.Module, finished: list[_Call]) -> Producer | None:
    modules = dict(model.named_modules())
    made: dict[str, str] = {}
    carried: list[_Call] = []
    for call in reversed([call for call in finished if call.is_reached]):
        weights = _kind([p.grad for p in modules[call.module].parameters(recurse=False) if p.grad is not None])
        if call.grad_output:
            carried.append(call)
        elif kind := call.grad_input or weights:
            made[call.module] = kind
    for name, kind in made.items():
        # A container that has the fault inside names it by the part that made it.
        if not any(other.startswith(f"{name}." if name else "") for other in made if other != name):
            return Producer(name, "backward", kind)
    for call in carried:
        # No part made what this one got: its container did, between its parts, or else the loss function.
        if call.parent is None or not call.parent.grad_output:
            name = LOSS if call.parent is None else call.parent.module
            return Producer(name, "backward", call.grad_output or "")
    return None


def _takes_gradient(tensor: torch.Tensor) -> bool:
    return tensor.requires_grad and torch.is_grad_enabled()


def _kind(values: Any) -> str | None:
    """``nan`` or ``inf`` if any tensor in ``values`` holds one, NaN first."""
    kinds = {"nan" if torch.isnan(t).any() else "inf" for t in _floats(values) if not torch.isfinite(t).all()}
    return max(kinds, default=None)


def _floats(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
