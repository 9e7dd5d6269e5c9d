"""Numbers on their way from the device: read late and together, so that no step waits for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Generic, TypeVar

import torch

T = TypeVar("T")


class Readback(Generic[T]):
    """A queue of tensors on ``device``, each beside what it belongs to.

    :meth:`put` keeps, :meth:`send` starts one copy of all that were put, :meth:`take` gives those that have arrived, in
    order. On CUDA the copy goes into pinned memory behind the kernels that are queued already, and whether it has
    arrived is asked, not waited for. Elsewhere the numbers are there at once.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_late = device.type == "cuda"
        self._put: list[tuple[T, Sequence[torch.Tensor]]] = []
        self._sent: deque[tuple[list[tuple[T, Sequence[torch.Tensor]]], torch.Tensor, torch.cuda.Event | None]] = (
            deque()
        )

    def __len__(self) -> int:
        """How many were put and not sent."""
        return len(self._put)

    def put(self, item: T, *tensors: torch.Tensor) -> None:
        """``tensors`` of ``item``: numbers of one dimension or none. They must not change any more."""
        self._put.append((item, tensors))

    def send(self) -> None:
        """Start to copy what was put."""
        if not self._put:
            return
        flat = torch.cat([tensor.reshape(-1) for _, tensors in self._put for tensor in tensors])
        event = None
        if self._is_late:
            host = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
            flat = host.copy_(flat, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        self._sent.append((self._put, flat, event))
        self._put = []

    def take(self, waits: bool = False) -> list[tuple[T, list[torch.Tensor]]]:
        """What has arrived, as (item, its tensors on the host), in order; all that was sent, if it ``waits``."""
        arrived = []
        while self._sent:
            items, flat, event = self._sent[0]
            if event is not None and not event.query():
                if not waits:
                    break
                event.synchronize()
            self._sent.popleft()
            parts = iter(flat.split([t.numel() for _, tensors in items for t in tensors]))
            arrived += [(item, [next(parts) for _ in tensors]) for item, tensors in items]
        return arrived
