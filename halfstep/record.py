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
from torch.utils._pytree import tree_leaves

LOSS = "the loss function"


@dataclass(frozen=True)
class Producer:
    """The module that made the first non-finite value. phase: ``forward`` or ``backward``. kind: ``inf`` or ``nan``."""

    module: str
    phase: str
    kind: str

    @property
    def is_module(self) -> bool:
        """Whether it can be named in a policy; a loss function and a model's own forward cannot."""
        return self.module not in ("", LOSS)

    def __str__(self) -> str:
        return f"{self.module or 'the outermost module'} makes it ({self.kind}) in the {self.phase} pass"


class _Trace:
    """What one module saw: kinds of non-finite values in its outputs, and in the gradients of outputs and inputs."""

    def __init__(self) -> None:
        self.output: str | None = None
        self.input: str | None = None
        self.grad_output: str | None = None
        self.grad_input: str | None = None


def find_producer(
    model: nn.Module, forward: Callable[[], torch.Tensor], backward: Callable[[torch.Tensor], None]
) -> Producer | None:
    """Run ``loss = forward()`` and ``backward(loss)`` once and name what made the first non-finite value.

    None when every value was finite this time. The gradients that the pass leaves in ``.grad`` are the caller's to
    drop.
    """
    traces: dict[str, _Trace] = {}
    finished: list[str] = []
    handles: list[Any] = []

    def watch(name: str, module: nn.Module) -> None:
        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            trace = traces[name] = _Trace()
            trace.input = _kind((args, kwargs))
            _on_gradient((args, kwargs), trace, "grad_input")

        def after(module: nn.Module, args: Any, output: Any) -> None:
            trace = traces[name]
            trace.output = _kind(output)
            _on_gradient(output, trace, "grad_output")
            finished.append(name)

        handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(module.register_forward_hook(after))

    for name, module in model.named_modules():
        watch(name, module)
    try:
        loss = forward()
        # While the loss is finite, an infinity on the way was meant, as in an attention mask.
        if loss_kind := _kind(loss):
            # Modules finish in order of execution, children before their parents.
            for name in finished:
                if (kind := traces[name].output) and not traces[name].input:
                    return Producer(name, "forward", kind)
            return Producer(LOSS, "forward", loss_kind)
        backward(loss)
    finally:
        for handle in handles:
            handle.remove()
    return _backward_producer(model, traces, finished)


def _backward_producer(model: nn.Module, traces: dict[str, _Trace], finished: list[str]) -> Producer | None:
    modules = dict(model.named_modules())
    made: dict[str, str] = {}
    for name in reversed(finished):
        trace = traces[name]
        weights = _kind([p.grad for p in modules[name].parameters(recurse=False) if p.grad is not None])
        if not trace.grad_output and (kind := trace.grad_input or weights):
            made[name] = kind
    for name, kind in made.items():
        # A container that has the fault inside names it by the part that made it.
        if not any(other.startswith(f"{name}." if name else "") for other in made if other != name):
            return Producer(name, "backward", kind)
    if finished and traces[finished[-1]].grad_output:
        return Producer(LOSS, "backward", traces[finished[-1]].grad_output or "")
    return None


def _on_gradient(values: Any, trace: _Trace, field: str) -> None:
    def look(gradient: torch.Tensor) -> None:
        setattr(trace, field, getattr(trace, field) or _kind(gradient))

    for tensor in _floats(values):
        if tensor.requires_grad:
            tensor.register_hook(look)  # type: ignore[no-untyped-call]


def _kind(values: Any) -> str | None:
    """``nan`` or ``inf`` if any tensor in ``values`` holds one, NaN first."""
    kinds = {"nan" if torch.isnan(t).any() else "inf" for t in _floats(values) if not torch.isfinite(t).all()}
    return max(kinds, default=None)


def _floats(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
