"""Slow plain twin of a recorder of modules: hooks that keep a copy of everything, and a loop."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.utils._pytree import tree_leaves


def plain_modules(model: nn.Module, run: Callable[[], object]) -> list[tuple[str, str, str | None, torch.Tensor]]:
    """(module, kind, name of the parameter, copy) of every activation and gradient while ``run`` runs, in order."""
    found: list[tuple[str, str, str | None, torch.Tensor]] = []
    handles = []

    def keep(module: str, kind: str, name: str | None) -> Callable[[torch.Tensor], None]:
        return lambda tensor: found.append((module, kind, name, tensor.detach().clone()))

    def watch(name: str, module: nn.Module) -> None:
        def after(module: nn.Module, args: object, output: object) -> None:
            for tensor in tree_leaves(output):
                if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                    keep(name, "activation", None)(tensor)
                    if tensor.requires_grad:
                        handles.append(tensor.register_hook(keep(name, "gradient", None)))

        handles.append(module.register_forward_hook(after))
        for own, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad:
                handles.append(parameter.register_hook(keep(name, "weight gradient", f"{name}.{own}".lstrip("."))))

    for name, module in model.named_modules():
        watch(name, module)
    run()
    for handle in handles:
        handle.remove()
    return found
