"""Peak bytes of live tensors, for devices without an allocator that counts them, such as the CPU."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """While it is open, ``peak`` is the largest number of bytes that tensors held at one time.

    Every storage is counted once, from the operation that made it to the end of its last view. What was there before
    is given to :meth:`count`. A buffer inside a kernel is not a tensor and is not seen, so the figure is the same on
    every machine.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now: int = 0
        self.peak: int = 0
        self._sizes: dict[int, int] = {}

    def count(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count the storages of ``tensors``, each once. Those on the meta device have no memory."""
        for tensor in tensors:
            if tensor.device.type == "meta":
                continue
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in self._sizes:
                self._sizes[key] = storage.nbytes()
                self.now += storage.nbytes()
                weakref.finalize(storage, self._drop, key)
        self.peak = max(self.peak, self.now)

    def _drop(self, key: int) -> None:
        self.now -= self._sizes.pop(key)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.count(leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))
        return result
