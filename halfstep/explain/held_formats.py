"""In which 16-bit format, if any, what leaves a module is held when a policy runs.

Autocast computes some operations in fp32, so the format of a policy is not that of every tensor. A tensor meets 16 bit
if it is stored so, or if a cast to 16 bit reads it: a norm's output stays fp32 and is cast by the linear layer after
it. A cast works in both directions, so the same is true of the tensor's gradient.
"""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from halfstep.dtypes import LOW_DTYPES
from halfstep.formats import FORMATS, format_of
from halfstep.record import Walk
from halfstep.record.recorder import floats, op_name


class HeldFormats:
    """Watches one forward pass: ``with HeldFormats(model) as held: ...``, then ``held.of(module, kind)``."""

    sees_views = False

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._walk = Walk(model, self)
        self._cast: dict[StorageWeakRef, str] = {}
        self._outputs: dict[str, dict[StorageWeakRef, str | None]] = {}
        self._handles: list[Any] = []

    def __enter__(self) -> Self:
        for name, module in self.model.named_modules():
            self._watch(name, module)
        self._walk.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._walk.__exit__(*exception)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _watch(self, name: str, module: nn.Module) -> None:
        outputs = self._outputs.setdefault(name, {})

        def after(module: nn.Module, args: Any, output: Any) -> None:
            for tensor in floats(output):
                outputs[_storage(tensor)] = _low(tensor)

        self._handles.append(module.register_forward_hook(after))

    def visit(self, site: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        if op_name(func) == "_to_copy" and (low := _low(result)) is not None:
            storage = _storage(args[0])
            self._cast[storage] = _narrower(low, self._cast.get(storage)) or low
        return result

    def of(self, module: str, kind: str) -> str | None:
        """bf16 or fp16, or None for values that meet neither.

        kind: as of a ModuleValue. The format of a weight's gradient is that in which the weight is used.
        """
        found: str | None = None
        if kind == "weight gradient":
            for parameter in self.model.get_submodule(module).parameters(recurse=False):
                found = _narrower(found, _low(parameter), self._cast.get(_storage(parameter)))
        else:
            for storage, low in self._outputs.get(module, {}).items():
                found = _narrower(found, low, self._cast.get(storage))
        return found


def _storage(tensor: torch.Tensor) -> StorageWeakRef:
    """Weak, so that a tensor's memory is not kept, and still no other gets its address meanwhile."""
    return StorageWeakRef(tensor.untyped_storage())


def _low(tensor: torch.Tensor) -> str | None:
    return format_of(tensor.dtype).name if tensor.dtype in LOW_DTYPES else None


def _narrower(*formats: str | None) -> str | None:
    """The one with the smallest range."""
    return min(filter(None, formats), key=lambda name: FORMATS[name].max, default=None)
