"""Builds what a plan is made of, and gives a batch the size that is planned for."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import MutableMapping
from typing import Any

import torch

from halfstep.plan.subject import Subject
from halfstep.source import load
from halfstep.workload import Workload


def build(subject: Subject) -> Workload:
    """The workload of ``subject``; its model is fake where a FakeDevice is building."""
    return load(subject.spec)(0)


def resized(batch: Any, old: int, new: int) -> Any:
    """``batch`` with ``new`` samples in place of ``old``: every tensor whose first dimension counts samples."""
    if isinstance(batch, torch.Tensor):
        return batch.new_empty((new, *batch.shape[1:])) if batch.dim() and batch.shape[0] == old else batch
    if isinstance(batch, tuple):
        items = [resized(item, old, new) for item in batch]
        return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
    if isinstance(batch, list):
        return [resized(item, old, new) for item in batch]
    if isinstance(batch, MutableMapping):
        mapping = copy.copy(batch)
        for key, value in batch.items():
            mapping[key] = resized(value, old, new)
        return mapping
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        changed = copy.copy(batch)
        for field in dataclasses.fields(batch):
            object.__setattr__(changed, field.name, resized(getattr(batch, field.name), old, new))
        return changed
    return batch
