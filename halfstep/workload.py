"""A trainable thing built from a seed: model, batches, loss, optimizer.

Every tool takes a Workload. A user writes one function in a file of theirs, ``def workload(seed: int) -> Workload``,
and source.py finds it. The same seed gives the same weights and the same batches to the bit, and on one machine with
one number of threads the same losses.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset, IterableDataset

from halfstep.errors import HalfstepError

_EXAMPLES = {
    "loss": "loss=lambda model, batch: F.cross_entropy(model(batch[0]).float(), batch[1])",
    "optimizer": "optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)",
    "scheduler": "scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, step_size=100)",
    "evaluate": "evaluate=lambda model: held_out_loss(model)",
}


@dataclass(frozen=True, eq=False)
class Workload:
    """What every tool takes. Build a new one for each run: training changes the model and uses up a generator.

    model:      on the CPU and in fp32; the tool moves it and chooses the formats.
    batches:    an iterable of micro-batches, in the same order for the same seed. A DataLoader or a list starts again
                at its end; a generator must be endless, or long enough.
    loss:       ``loss(model, batch)``, the mean over the batch (a scalar tensor), or ``(sum, count)``: a scalar tensor
                and how many tokens or samples it sums over, so that ragged batches weigh what they should.
    optimizer:  ``optimizer(parameters)``, a new torch optimizer over them.
    evaluate:   ``evaluate(model)``, the held-out loss, lower is better. It finds the model's device by itself.
    scheduler:  ``scheduler(optimizer)``; it advances once for each applied step, not for each micro-batch.
    max_norm:   largest global 2-norm of the gradient; above it the gradient is clipped. None never clips.
    accumulate: micro-batches in a window, which is one optimizer step.
    """

    model: nn.Module
    batches: Iterable[Any]
    loss: Callable[[nn.Module, Any], Tensor | tuple[Tensor, int | Tensor]]
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer]
    evaluate: Callable[[nn.Module], float | Tensor] | None = None
    scheduler: Callable[[Optimizer], LRScheduler] | None = None
    max_norm: float | None = None
    accumulate: int = 1

    def __post_init__(self) -> None:
        _check_model(self.model)
        _check_batches(self.batches)
        _check_function("loss", self.loss, "model", "batch")
        _check_function("optimizer", self.optimizer, "parameters")
        if self.evaluate is not None:
            _check_function("evaluate", self.evaluate, "model")
        if self.scheduler is not None:
            _check_function("scheduler", self.scheduler, "optimizer")
        norm, accumulate = self.max_norm, self.accumulate
        if norm is not None and not (_is_number(norm) and 0 < norm < math.inf):
            raise _field_error("max_norm", norm, "it is not a positive number", "Use 1.0, or None to never clip.")
        if not is_count(accumulate):
            raise _field_error("accumulate", accumulate, "it counts micro-batches", "Use a whole number from 1.")


# --- what each field must be ---------------------------------------------------------------------------------------


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _field_error(name: str, value: object, why: str, fix: str) -> HalfstepError:
    shown = repr(value)
    if len(shown) > 60 or " at 0x" in shown:
        shown = f"<{type(value).__name__}>"
    return HalfstepError(f"Workload {name}={shown}", why, fix)


def _check_model(model: object) -> None:
    if isinstance(model, type):
        raise _field_error("model", model, "it is a class", f"Give a model built from it, {model.__name__}(...).")
    if not isinstance(model, nn.Module):
        raise _field_error("model", model, "it is not a torch.nn.Module", "Give the model to train.")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise _field_error(
            "model", model, "none of its parameters requires a gradient, so nothing trains", "Unfreeze what to train."
        )


def _check_batches(batches: object) -> None:
    if isinstance(batches, Tensor | tuple | Mapping | str | bytes):
        raise _field_error(
            "batches",
            batches,
            f"a {type(batches).__name__} is one batch, and iterating over it would take it apart",
            "Give a list, a DataLoader or a generator of batches; [batch] repeats a single one.",
        )
    if isinstance(batches, Dataset) and not isinstance(batches, IterableDataset):
        raise _field_error(
            "batches", batches, "a data set gives single samples", "Wrap it: DataLoader(data_set, batch_size=32)."
        )
    if inspect.isroutine(batches):
        raise _field_error("batches", batches, "it is a function", "Call it, and give the batches that it makes.")
    if not isinstance(batches, Iterable) and not hasattr(batches, "__getitem__"):
        raise _field_error("batches", batches, "it is not iterable", "Give a list, a DataLoader or a generator.")


def _check_function(name: str, function: object, *arguments: str) -> None:
    """HalfstepError unless ``function`` can be called with that many positional arguments."""
    call, fix = f"{name}({', '.join(arguments)})", f"Write {_EXAMPLES[name]}."
    if isinstance(function, Optimizer | LRScheduler):
        raise _field_error(name, function, f"it is already built, and every run needs its own from {call}", fix)
    if not callable(function):
        raise _field_error(name, function, f"it is not a function to call as {call}", fix)
    if name == "loss" and str(getattr(function, "__module__", None)).startswith("torch.nn."):
        raise _field_error(
            name, function, f"torch's losses take outputs and targets, and this is called as {call}", fix
        )
    signature = signature_of(function)
    if signature and not binds(signature, *arguments):
        raise _field_error(name, function, f"it takes {signature} and is called as {call}", fix)


def signature_of(function: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):  # some built-in callables have none
        return None


def binds(signature: inspect.Signature, *arguments: Any, **options: Any) -> bool:
    try:
        signature.bind(*arguments, **options)
    except TypeError:
        return False
    return True


# --- what the tools do with one ------------------------------------------------------------------------------------


def stream(workload: Workload) -> Iterator[Any]:
    """Yields micro-batches in order, without end: what can start again does, as a new epoch.

    HalfstepError when there is no batch at all, and when a generator has no more.
    """
    batches, num_batches = workload.batches, 0
    while True:
        epoch, num_before = iter(batches), num_batches
        for batch in epoch:
            num_batches += 1
            yield batch
        kind = type(batches).__name__
        if num_batches == 0:
            raise HalfstepError(
                f"Workload batches (a {kind})", "it is empty", "Check the data set's length, batch_size and drop_last."
            )
        if epoch is batches or num_batches == num_before:
            raise HalfstepError(
                f"Workload batches (a {kind})",
                f"it ran dry after {num_batches} batch{'es' if num_batches > 1 else ''} and cannot start again",
                "Give a DataLoader or a list, or make the generator endless (while True: yield ...).",
            )


def to_device(batch: Any, device: torch.device | str) -> Any:
    """``batch`` with every tensor in it on ``device``: in tuples, lists, dicts, named tuples and dataclasses.

    Types are kept, and so is whatever is not a tensor. The batch itself is not changed.
    """
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=batch.is_pinned())
    if callable(getattr(batch, "to", None)):  # PackedSequence, transformers' BatchEncoding
        return batch.to(device)
    if isinstance(batch, tuple):
        moved = [to_device(item, device) for item in batch]
        return type(batch)(*moved) if hasattr(batch, "_fields") else type(batch)(moved)
    if isinstance(batch, list):
        return type(batch)(to_device(item, device) for item in batch)
    if isinstance(batch, MutableMapping):
        moved_map = copy.copy(batch)
        for key, value in batch.items():
            moved_map[key] = to_device(value, device)
        return moved_map
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        moved_object = copy.copy(batch)
        for item in dataclasses.fields(batch):
            object.__setattr__(moved_object, item.name, to_device(getattr(batch, item.name), device))
        return moved_object
    return batch


def num_samples(batch: Any) -> int:
    """How many samples ``batch`` holds: the leading dimension of the first tensor in it (1 for a scalar)."""
    tensor = next(tensors(batch), None)
    if tensor is None:
        raise HalfstepError(
            f"batch of type {type(batch).__name__}",
            "it holds no tensor, so its samples cannot be counted",
            "Put the inputs in it as a tensor with the samples along the first dimension.",
        )
    return tensor.shape[0] if tensor.dim() else 1


def tensors(batch: Any) -> Iterator[Tensor]:
    """Every tensor in ``batch``: in mappings, tuples, lists and dataclasses."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from tensors(value)
    elif isinstance(batch, tuple | list):
        for value in batch:
            yield from tensors(value)
    elif dataclasses.is_dataclass(batch):
        for item in dataclasses.fields(batch):
            yield from tensors(getattr(batch, item.name, None))


def seed_everything(seed: int) -> None:
    """Seeds the random numbers of Python, of NumPy where it is installed, and of torch on every device."""
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**32:
        raise HalfstepError(f"seed {seed!r}", "it is not a whole number from 0 to 2^32 - 1", "Use 0, 1, 2 and so on.")
    random.seed(seed)
    with contextlib.suppress(ImportError):
        import numpy

        numpy.random.seed(seed)
    torch.manual_seed(seed)
