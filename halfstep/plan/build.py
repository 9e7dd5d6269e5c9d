"""Builds what a plan is made of, and gives a batch the size that is planned for."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, MutableMapping
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from halfstep import source
from halfstep.errors import HalfstepError
from halfstep.plan.bare_model import class_workload
from halfstep.plan.library_model import library_workload
from halfstep.plan.subject import Subject
from halfstep.source import Source
from halfstep.workload import Workload
from halfstep.workloads import BUILT_IN


def build(subject: Subject, assumed: list[str] | None = None) -> Workload:
    """The workload of ``subject``. What was assumed to make one of a bare model is appended to ``assumed``.

    Its model is fake where a FakeDevice is building. ``subject.spec`` is a workload as everywhere
    (``halfstep.source.load``), ``file.py:Class`` of an ``nn.Module`` class, ``transformers:CLASS``,
    ``transformers:FOLDER`` or the path of a ``config.json``, or ``timm:NAME``.
    """
    bare = library_workload(subject)
    if bare is None and subject.spec not in BUILT_IN:
        path, name = source.split(subject.spec)
        module = source.execute(path)
        found = getattr(module, name, None)
        if isinstance(found, type) and issubclass(found, nn.Module):
            with source.running(path.resolve()):
                bare = class_workload(subject, found)
        else:
            function = source.find_function(module, name, subject.spec)
            source.check_call(function, subject.spec, {})
            made = Source(subject.spec, function, file=path.resolve())
    if bare is not None:
        if assumed is not None:
            assumed += bare[1]
        return bare[0]
    if subject.inputs is not None:
        raise HalfstepError(
            f"inputs of {subject.spec}",
            "a workload draws its own batches",
            "Leave the inputs out; they are for models.",
        )
    return source.load(subject.spec)(0) if subject.spec in BUILT_IN else made(0)


# --- batches -------------------------------------------------------------------------------------------------------


def mapped(value: Any, function: Callable[[Any], Any], is_leaf: Callable[[Any], bool] = lambda part: False) -> Any:
    """``value`` with ``function`` of everything in it that is no container, or that ``is_leaf`` takes for none.

    Containers are tuples, lists, dictionaries and what behaves like one (a ``BatchEncoding``), and dataclasses. Types
    are kept.
    """
    if is_leaf(value):
        return function(value)
    if isinstance(value, tuple):
        items = [mapped(item, function, is_leaf) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, list):
        return type(value)(mapped(item, function, is_leaf) for item in value)
    if isinstance(value, MutableMapping):
        mapping = copy.copy(value)
        for key in list(value):
            mapping[key] = mapped(value[key], function, is_leaf)
        return mapping
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(changed, field.name, mapped(getattr(value, field.name), function, is_leaf))
        return changed
    return function(value)


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors in a batch, in order."""
    found: list[torch.Tensor] = []
    mapped(value, lambda leaf: found.append(leaf) if isinstance(leaf, torch.Tensor) else None)
    return found


def resized(batch: Any, old: int, new: int) -> Any:
    """``batch`` with ``new`` samples in place of ``old``.

    Every tensor whose first dimension counts samples gets ``new`` of them, without values. A list of ``old`` things,
    one a sample, is repeated or cut. Everything else stays, as a count or a table does. A batch of which nothing
    changes, or whose samples do not lie along a dimension, as in a packed sequence, is a HalfstepError.
    """
    if old == new:
        return batch
    num_changed = 0

    def counts(part: Any) -> bool:
        return isinstance(part, torch.Tensor) and part.dim() > 0 and part.shape[0] == old

    def is_sample_list(part: Any) -> bool:
        is_sequence = isinstance(part, list | tuple) and not hasattr(part, "_fields")
        return is_sequence and len(part) == old and not any(counts(tensor) for tensor in tensors_of(part))

    def change(part: Any) -> Any:
        nonlocal num_changed
        if isinstance(part, PackedSequence) or (isinstance(part, torch.Tensor) and not _is_dense(part)):
            kind = "packed sequence" if isinstance(part, PackedSequence) else "sparse or nested tensor"
            raise HalfstepError(
                f"a batch of {new} samples", f"the {kind} in the workload's batch of {old} cannot be resized", _DRAWS
            )
        if is_sample_list(part):
            num_changed += 1
            return type(part)(part[index % old] for index in range(new))
        if counts(part):
            num_changed += 1
            return _with_samples(part, new)
        return part

    changed = mapped(batch, change, lambda part: isinstance(part, PackedSequence) or is_sample_list(part))
    if not num_changed:
        raise HalfstepError(
            f"a batch of {new} samples", f"nothing in the workload's batch counts its {old} samples", _DRAWS
        )
    return changed


_DRAWS = "Let the workload draw batches of the size that is planned for, and give no batch size."


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested


def _with_samples(tensor: torch.Tensor, num: int) -> torch.Tensor:
    is_last = tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    format = torch.channels_last if is_last and not tensor.is_contiguous() else torch.contiguous_format
    shape = (num, *tensor.shape[1:])
    return torch.empty(shape, dtype=tensor.dtype, memory_format=format, requires_grad=tensor.requires_grad)
