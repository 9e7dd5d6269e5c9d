"""Activation checkpointing of a model's repeated blocks: each is computed again when its gradient is."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from halfstep.errors import HalfstepError

_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_grouped_mm", "convolution"}


def repeated_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The blocks of ``model`` by their qualified names.

    They are the children of a ModuleList or Sequential that share their class with another child there, and have
    parameters and parts of their own. Of those inside each other the outer ones.
    """
    found: dict[str, nn.Module] = {}
    _find(model, "", found)
    return found


def _find(module: nn.Module, name: str, found: dict[str, nn.Module]) -> None:
    children = list(module.named_children())
    classes = Counter(type(child) for _, child in children) if isinstance(module, nn.ModuleList | nn.Sequential) else {}
    for key, child in children:
        path = f"{name}.{key}" if name else key
        has_parts = any(True for _ in child.children()) and any(True for _ in child.parameters())
        if classes.get(type(child), 0) > 1 and has_parts and not isinstance(child, nn.ModuleList):
            found[path] = child
        else:
            _find(child, path, found)


def checkpoint_blocks(model: nn.Module, is_selective: bool = False) -> None:
    """Checkpoint each of the repeated blocks of ``model``, in place.

    is_selective: keep what products and attention made, and compute only the rest again.
    """
    blocks = repeated_blocks(model)
    if not blocks:
        raise HalfstepError(
            f"checkpointing of {type(model).__name__}",
            "it has no repeated blocks: no ModuleList or Sequential with two children of one class that have parts",
            "Call torch.utils.checkpoint.checkpoint in its forward around what to compute again.",
        )
    for module in model.modules():
        # transformers switches its cache off as well: a block that runs twice would write its keys twice.
        config = getattr(module, "config", None)
        if getattr(config, "use_cache", False):
            config.use_cache = False  # type: ignore[union-attr]
    for block in blocks.values():
        _wrap(block, is_selective)


def _wrap(block: nn.Module, is_selective: bool) -> None:
    forward = block.forward
    is_again = False

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal is_again
        if torch._C._current_graph_task_id() == -1:
            return forward(*args, **kwargs)
        is_again = True  # by a call of the module, so that its hooks run: they tell which module computes
        try:
            return block(*args, **kwargs)
        finally:
            is_again = False

    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        if is_again:
            return forward(*args, **kwargs)
        contexts: dict[str, Any] = {"context_fn": _selective_contexts} if is_selective else {}
        return checkpoint(run, *args, use_reentrant=False, **contexts, **kwargs)

    block.forward = functools.wraps(forward)(checkpointed)


def _selective_contexts() -> Any:
    return create_selective_checkpoint_contexts(_policy)


def _policy(context: Any, func: Callable[..., Any], *args: Any, **kwargs: Any) -> CheckpointPolicy:
    name = getattr(func, "__name__", "").partition(".")[0]
    keeps = name in _PRODUCTS or "attention" in name
    return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE
