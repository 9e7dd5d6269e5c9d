"""What a fake device cannot run, in one line: the operation, the module, the line of code, and the way round it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

from halfstep.errors import HalfstepError
from halfstep.record.walk import Site, is_users

_WAYS_ROUND = {
    "aten::bincount": "Say how many bins there are: torch.bincount(x, minlength=n) counts values below n.",
    "aten::repeat_interleave": "Say how long the result is: repeat_interleave(x, repeats, output_size=n).",
    "aten::one_hot": "Say how many classes there are: one_hot(x, num_classes=n).",
    "aten::_pack_padded_sequence": "Plan with the padded batch, which is the most that packed ones hold.",
    "aten::_nested_tensor_from_tensor_list": "Plan with the padded batch, which is the most that nested ones hold.",
}
_ELSE = "Plan the model with an operation of known shape in its place."
_REGISTER = "Give it a form for fake tensors, torch.library.register_fake, or plan with torch's own operations instead."
_NO_FAKE_FORM = ("no fake impl", "register_fake", "Meta tensors", "meta kernel", "fake tensors")
_CUDA = ("Torch not compiled with CUDA", "not linked with support for cuda", "NVIDIA driver", "dummy base class")
_SPARSE = "SparseTensorImpl"


@contextlib.contextmanager
def naming_failures(model: nn.Module) -> Iterator[None]:
    """What is raised meanwhile by code that runs ``model`` on a fake device becomes one HalfstepError."""
    try:
        yield
    except HalfstepError:
        raise
    except Exception as error:
        raise failure_of(error, model) from error


def failure_of(error: Exception, model: nn.Module) -> HalfstepError:
    """The line that tells of ``error``, which a step of ``model`` on a fake device has raised."""
    frames = _frames(error)
    operation = _operation(error, frames)
    where = _where(frames, model)
    text = _text(error)
    if isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
        is_size = isinstance(error, DynamicOutputShapeException) or operation == "aten::one_hot"
        why = f"{'the size of its result depends on' if is_size else 'it reads'} values, which a plan does not have"
        return HalfstepError(f"{operation} {where}", why, _WAYS_ROUND.get(operation or "", _ELSE))
    is_unknown = isinstance(error, UnsupportedOperatorException | NotImplementedError | RuntimeError) and (
        isinstance(error, UnsupportedOperatorException) or any(part in str(error) for part in _NO_FAKE_FORM)
    )
    if is_unknown and operation is not None:
        return HalfstepError(
            f"{operation} {where}", "it has no form for tensors without values", _WAYS_ROUND.get(operation, _REGISTER)
        )
    what = f"{operation} {where}" if operation else where
    if _SPARSE in text:
        return HalfstepError(
            what, "a plan follows the memory of dense tensors only", "Plan with a dense gradient, sparse=False."
        )
    if any(part in text for part in _CUDA):
        return HalfstepError(
            what, f"it calls CUDA itself, and a plan has no such device ({text})", "Leave that call out for a plan."
        )
    if (isinstance(error, ZeroDivisionError | ValueError) and "math domain" in text) or "division by zero" in text:
        return HalfstepError(
            what, f"{text}; where code reads a value, a plan has 0", "Keep it a tensor, or guard it against 0."
        )
    return HalfstepError(what, text, "Correct that line, or give the model what it takes.")


def _text(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    if lines and "TorchScript" in lines[0]:
        lines = lines[-1:]
    name = type(error).__name__
    return f"{name}: {lines[0][:200].rstrip('.')}" if lines else name


def _frames(error: Exception) -> list[FrameType]:
    """From the innermost outwards."""
    frames: list[FrameType] = []
    traceback = error.__traceback__
    while traceback is not None:
        frames.append(traceback.tb_frame)
        traceback = traceback.tb_next
    return frames[::-1]


def _operation(error: Exception, frames: list[FrameType]) -> str | None:
    """``aten::bincount``: what the error says, or the innermost operation that was running."""
    func: Any = getattr(error, "func", None)
    if func is None:
        func = next((f.f_locals.get("func") for f in frames if f.f_code.co_name == "__torch_dispatch__"), None)
    schema = getattr(func, "_schema", None)
    return None if schema is None else str(schema.name)


def _where(frames: list[FrameType], model: nn.Module) -> str:
    """``in layers.0.attention (net.py:12)``."""
    names = {id(module): name for name, module in model.named_modules()}
    site = next((f.f_locals["site"] for f in frames if isinstance(f.f_locals.get("site"), Site)), None)
    running = (names.get(id(f.f_locals.get("self"))) for f in frames if f.f_code.co_name == "_call_impl")
    name = next((found for found in running if found is not None), None if site is None else site.module)
    place = "outside the model" if name is None else f"in {name or 'the model'}"
    line = _line(frames, site)
    return f"{place} ({line})" if line else place


def _line(frames: list[FrameType], site: Site | None) -> str | None:
    for frame in frames:
        if is_users(frame.f_code.co_filename):
            return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
    return None if site is None or site.file is None else f"{Path(site.file).name}:{site.line}"
