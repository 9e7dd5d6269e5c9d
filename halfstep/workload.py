"""A trainable thing built from a seed: model, batches, loss, optimizer.

Every tool takes a Workload. A user writes one function in a file of theirs, ``def workload(seed: int) -> Workload``;
``load("path/to/file.py:workload")``, or ``load("charlm")`` for a built-in one, makes a ``Source`` of it, which builds a
new Workload for each seed. The same seed gives the same weights and the same batches to the bit, and on one machine
with one number of threads the same losses.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import difflib
import importlib
import importlib.util
import inspect
import math
import random
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset, IterableDataset

from halfstep.errors import HalfstepError

SIGNATURE = "def workload(seed: int) -> halfstep.Workload"
"""What a user's function looks like."""

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
        if not _is_count(accumulate):
            raise _field_error("accumulate", accumulate, "it counts micro-batches", "Use a whole number from 1.")


# --- what each field must be ---------------------------------------------------------------------------------------


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: object) -> bool:
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
    signature = _signature(function)
    if signature and not _binds(signature, *arguments):
        raise _field_error(name, function, f"it takes {signature} and is called as {call}", fix)


def _signature(function: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):  # some built-in callables have none
        return None


def _binds(signature: inspect.Signature, *arguments: Any, **options: Any) -> bool:
    try:
        signature.bind(*arguments, **options)
    except TypeError:
        return False
    return True


# --- where workloads come from -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """Builds a Workload from a seed: ``source(seed)`` seeds every generator of random numbers, then calls ``function``.

    default_steps, default_seeds: how many steps and seeds show a clear result; None where the file does not say
    (module constants DEFAULT_STEPS and DEFAULT_SEEDS).
    """

    spec: str
    function: Callable[..., Workload]
    options: Mapping[str, Any] = field(default_factory=dict)
    default_steps: int | None = None
    default_seeds: int | None = None
    file: Path | None = None

    def __call__(self, seed: int) -> Workload:
        seed_everything(seed)
        with _running(self.file) if self.file else contextlib.nullcontext():
            workload = self.function(seed, **self.options)
        if not isinstance(workload, Workload):
            raise HalfstepError(
                self.spec,
                f"it returned {'None' if workload is None else 'a value of type ' + type(workload).__name__}",
                "End it with return halfstep.Workload(model=..., batches=..., loss=..., optimizer=...).",
            )
        return workload


def load(spec: str, **options: Any) -> Source:
    """The Source that ``spec`` names: a built-in workload, or ``path/to/file.py:function`` (``:workload`` if left out).

    A file is executed once here, as ``python file.py`` would with its directory importable, but not as ``__main__``.
    ``options`` go to the function as keyword arguments.
    """
    # By name, since the built-in workloads are built on this module.
    built_in: Mapping[str, str] = importlib.import_module("halfstep.workloads").BUILT_IN
    if spec in built_in:
        module, name, file = importlib.import_module(built_in[spec]), "workload", None
    else:
        path, name = _split(spec, built_in)
        module, file = _execute(path), path.resolve()
    function = _function(module, name, spec)
    _check_call(function, spec, options)
    return Source(spec, function, options, _count(module, "DEFAULT_STEPS"), _count(module, "DEFAULT_SEEDS"), file)


def _split(spec: str, built_in: Iterable[str]) -> tuple[Path, str]:
    """The file and the function that ``spec`` names."""
    head, colon, tail = spec.rpartition(":")
    path, name = (spec, "workload") if spec.endswith(".py") or not colon else (head, tail)
    if not path.endswith(".py"):
        close = difflib.get_close_matches(spec, list(built_in), n=1)
        raise HalfstepError(
            f"workload {spec!r}",
            f"no built-in workload has this name{_did_you_mean(close)}, and it is not a .py file",
            f"Use one of {', '.join(built_in)}, or path/to/file.py:function.",
        )
    if not Path(path).is_file():
        folder = Path(path).parent
        names = [file.name for file in sorted(folder.glob("*.py"))] if folder.is_dir() else []
        close = difflib.get_close_matches(Path(path).name, names, n=1)
        why = f"there is no such file{_did_you_mean(close)}" if folder.is_dir() else f"there is no directory {folder}"
        raise HalfstepError(f"workload file {path}", why, f"Correct the path, or start one with halfstep new {path}.")
    return Path(path), name


def _did_you_mean(close: list[str]) -> str:
    return f" (did you mean {close[0]}?)" if close else ""


def _execute(path: Path) -> ModuleType:
    """The module in ``path``, executed anew."""
    spec = importlib.util.spec_from_file_location(f"halfstep_workload_{path.stem}", path.resolve())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look a class's module up here
    with _running(path.resolve()):
        spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def _running(file: Path) -> Iterator[None]:
    """Runs code of a user's file: its directory is importable, and what it raises becomes one HalfstepError."""
    directory = str(file.parent)
    sys.path.insert(0, directory)
    try:
        yield
    except HalfstepError:
        raise
    except (Exception, SystemExit) as error:
        message = error.msg if isinstance(error, SyntaxError) else str(error)
        raise HalfstepError(
            _line_at_fault(error, file),
            f"{type(error).__name__}{': ' if message else ''}{message.rstrip('.')}",
            "Correct that line, or install the package that it needs."
            if isinstance(error, ImportError)
            else "Correct that line.",
        ) from error
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(directory)


def _line_at_fault(error: BaseException, file: Path) -> str:
    """``train.py line 12``: the last line on the way to ``error`` that stands in the user's file or beside it."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{Path(error.filename).name} line {error.lineno}"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).parent == file.parent]
    return f"{Path(frames[-1].filename).name} line {frames[-1].lineno}" if frames else file.name


def _function(module: ModuleType, name: str, spec: str) -> Callable[..., Workload]:
    found = getattr(module, name, None)
    if found is None:
        functions = [
            key
            for key, value in vars(module).items()
            if inspect.isfunction(value) and value.__module__ == module.__name__ and not key.startswith("_")
        ]
        close = difflib.get_close_matches(name, functions, n=1)
        raise HalfstepError(
            spec,
            f"the file has no function {name!r}{_did_you_mean(close)}; "
            + (f"its functions are {', '.join(functions)}" if functions else "it defines no function at all"),
            f"Name one of them after the colon, or write {SIGNATURE}.",
        )
    if not callable(found):
        raise HalfstepError(
            spec,
            f"{name} is of type {type(found).__name__}, not a function, and every run needs a new Workload",
            f"Write {SIGNATURE}.",
        )
    function: Callable[..., Workload] = found
    return function


def _check_call(function: Callable[..., Workload], spec: str, options: Mapping[str, Any]) -> None:
    signature = _signature(function)
    if signature is None or _binds(signature, 0, **options):
        return
    if not _binds(signature, 0):
        raise HalfstepError(
            spec, f"it takes {signature} and is called with the seed alone, as workload(0)", f"Write {SIGNATURE}."
        )
    known = list(signature.parameters)[1:]
    unknown = [option for option in options if option not in known]
    close = difflib.get_close_matches(unknown[0], known, n=1) if unknown else []
    raise HalfstepError(
        f"{spec} with option {', '.join(unknown or options)}",
        f"it takes no such option{_did_you_mean(close)}",
        f"Its options are {', '.join(known)}." if known else "It has no options; leave them out.",
    )


def _count(module: ModuleType, name: str) -> int | None:
    value: int | None = getattr(module, name, None)
    if value is not None and not _is_count(value):
        raise HalfstepError(f"{name} = {value!r}", "it is not a count", "Use a whole number from 1, or leave it out.")
    return value


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
    tensor = next(_tensors(batch), None)
    if tensor is None:
        raise HalfstepError(
            f"batch of type {type(batch).__name__}",
            "it holds no tensor, so its samples cannot be counted",
            "Put the inputs in it as a tensor with the samples along the first dimension.",
        )
    return tensor.shape[0] if tensor.dim() else 1


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _tensors(value)
    elif isinstance(batch, tuple | list):
        for value in batch:
            yield from _tensors(value)
    elif dataclasses.is_dataclass(batch):
        for item in dataclasses.fields(batch):
            yield from _tensors(getattr(batch, item.name, None))


def seed_everything(seed: int) -> None:
    """Seeds the random numbers of Python, of NumPy where it is installed, and of torch on every device."""
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**32:
        raise HalfstepError(f"seed {seed!r}", "it is not a whole number from 0 to 2^32 - 1", "Use 0, 1, 2 and so on.")
    random.seed(seed)
    with contextlib.suppress(ImportError):
        import numpy

        numpy.random.seed(seed)
    torch.manual_seed(seed)
