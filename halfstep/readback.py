"""Numbers on their way from the device: read late and together, so that no step waits for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Generic, Protocol, TypeVar

import torch

T = TypeVar("T")


class _Arrival(Protocol):
    """A CUDA event, behind the copy."""

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


class Readback(Generic[T]):
    """A queue of small tensors, each beside the item that it belongs to.

    :meth:`put` keeps, :meth:`send` starts one copy of all that were put, :meth:`take` gives what has arrived, in order.
    From CUDA the copy goes into pinned memory, behind the kernels that are queued already; whether it has arrived is
    asked, not waited for. From a CPU the numbers are there at once.
    """

    def __init__(self) -> None:
        self._num_sent = 0
        self._put: list[tuple[T, Sequence[torch.Tensor]]] = []
        self._sent: deque[tuple[list[tuple[T, Sequence[torch.Tensor]]], torch.Tensor, _Arrival | None]] = deque()

    def put(self, item: T, *tensors: torch.Tensor) -> None:
        """``tensors`` of ``item``: vectors and numbers on one device, which nobody changes any more."""
        self._put.append((item, tensors))

    def send(self) -> int:
        """Start to copy what was put; how often there was something to send."""
        if self._put:
            flat = torch.cat([t if t.dim() else t.reshape(1) for _, tensors in self._put for t in tensors])
            self._sent.append((self._put, *_start_copy(flat)))
            self._put = []
            self._num_sent += 1
        return self._num_sent

    def take(self, waits_for: int = 0) -> list[tuple[T, list[list[float]]]]:
        """What has arrived, as (item, its vectors), in order; waits for the first ``waits_for`` sends."""
        arrived: list[tuple[T, list[list[float]]]] = []
        while self._sent:
            items, flat, arrival = self._sent[0]
            if arrival is not None and not arrival.query():
                if self._num_sent - len(self._sent) >= waits_for:
                    break
                arrival.synchronize()
            self._sent.popleft()
            numbers = iter(flat.tolist())
            arrived += [(item, [list(islice(numbers, t.numel())) for t in tensors]) for item, tensors in items]
        return arrived


def _start_copy(flat: torch.Tensor) -> tuple[torch.Tensor, _Arrival | None]:
    """``flat`` on the host, and the event after which it is there; None where it is there already."""
    if flat.device.type != "cuda":
        return flat, None
    host = torch.empty(flat.shape, dtype=flat.dtype, device="cpu", pin_memory=True).copy_(flat, non_blocking=True)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(flat.device))
    return host, event
