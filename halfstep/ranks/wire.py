"""How gradients travel between ranks: as fp32, or as bf16 that is summed in fp32.

An all-reduce in bf16 adds in bf16, so that its error grows with the number of ranks. Here every rank sends each other
one its part of the gradient in bf16; who has the parts of all adds them in fp32, and sends the mean back in bf16. That
is the same number of bytes, half of what fp32 needs, and two roundings for each element, however many ranks there are.
See docs/communication.md.
"""

# No postponed annotations: DDP looks at those of a hook.
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import distributed
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

from halfstep.errors import HalfstepError

WIRES = ("fp32", "bf16")
"""Formats that gradients travel in. They are always summed in fp32."""

BUCKET_NUMEL = 25 * 2**20 // 4
"""Elements that are brought together at once: in fp32 the 25 MiB that DDP's buckets have."""

# torch 2.13 gave it this name, and warns of the older one.
_all_gather: Callable[..., Any] = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor


def check_wire(wire: str) -> None:
    """Raises HalfstepError for a format that gradients cannot travel in."""
    if wire in WIRES:
        return
    if wire == "fp16":
        raise HalfstepError(
            "wire='fp16'",
            "a gradient is summed over a batch, and beyond 65504 it would become inf on the way, where fp32 holds it",
            "Use wire='bf16', which has the range of fp32, or 'fp32'.",
        )
    raise HalfstepError(f"wire={wire!r}", f"gradients travel in one of: {', '.join(WIRES)}", "Leave it out for fp32.")


class Mean(Protocol):
    """The mean over the ranks of some tensors, in place, on its way. Every rank goes through its moments in order."""

    def turn(self) -> None:
        """What was sent has come: send what becomes of it."""

    def finish(self) -> None:
        """Put the mean into the tensors."""


class Fp32Mean:
    """In fp32, or fp64 where a tensor is: one all-reduce."""

    def __init__(self, values: Sequence[torch.Tensor], group: distributed.ProcessGroup) -> None:
        self._values, self._num = values, group.size()
        format = torch.float64 if any(value.dtype == torch.float64 for value in values) else torch.float32
        self._flat = _pack(values, format)
        self._work = distributed.all_reduce(self._flat, group=group, async_op=True)

    def turn(self) -> None:
        """It comes back by itself."""

    def finish(self) -> None:
        self._work.wait()
        _unpack(self._flat.div_(self._num), self._values)


class Bf16Mean:
    """In bf16, summed in fp32: rounded when it is sent and when the mean is sent back, and in between not at all.

    What is not finite travels as it is, and what is beyond 3.39e38 becomes inf. The bits are the same on every rank.
    """

    def __init__(self, values: Sequence[torch.Tensor], group: distributed.ProcessGroup) -> None:
        self._values, self._group = values, group
        self._flat = _pack(values, torch.bfloat16, multiple=group.size())
        self._parts = torch.empty_like(self._flat)
        self._work = distributed.all_to_all_single(_bytes(self._parts), _bytes(self._flat), group=group, async_op=True)

    def turn(self) -> None:
        self._work.wait()
        num = self._group.size()
        self._mean = _sum_of_parts(self._parts, num).div_(num).bfloat16()
        self._work = _all_gather(_bytes(self._flat), _bytes(self._mean), group=self._group, async_op=True)

    def finish(self) -> None:
        self._work.wait()
        _unpack(self._flat, self._values)


MEANS: dict[str, Callable[[Sequence[torch.Tensor], distributed.ProcessGroup], Mean]] = {
    "fp32": Fp32Mean,
    "bf16": Bf16Mean,
}


class Lane:
    """Means on their way, one behind the other, so that what one waits for is the others' time to travel.

    Collectives begin in the same order on every rank, whichever is faster, since no other thread begins any.
    """

    def __init__(self) -> None:
        self._sent: list[tuple[Mean, Callable[[], object] | None]] = []
        self._turned: list[tuple[Mean, Callable[[], object] | None]] = []

    def push(self, mean: Mean, then: Callable[[], object] | None = None) -> None:
        """``mean`` has begun; ``then`` is called when it is there. Those before it go one moment on."""
        self._advance()
        self._sent.append((mean, then))

    def drain(self) -> None:
        """Until all are there."""
        while self._sent or self._turned:
            self._advance()

    def clear(self) -> None:
        """Forget what a backward pass that failed has left."""
        self._sent, self._turned = [], []

    def _advance(self) -> None:
        turned, self._turned, self._sent = self._turned, self._sent, []
        for mean, _ in self._turned:
            mean.turn()
        for mean, then in turned:
            mean.finish()
            if then is not None:
                then()


class Bf16Hook:
    """What ``DistributedDataParallel.register_comm_hook`` takes as state beside :func:`in_bf16`.

    Buckets travel while backward runs, as DDP's own do; on CUDA in a stream of their own.
    """

    def __init__(self, group: distributed.ProcessGroup) -> None:
        self.group = group
        self._lane = Lane()
        self._stream: torch.cuda.Stream | None = None

    def send(self, buffer: torch.Tensor, is_first: bool, is_last: bool) -> Future[torch.Tensor]:
        """The mean of a bucket over the ranks, in place, when it is there."""
        future: Future[torch.Tensor] = Future(devices=[buffer.device] if buffer.is_cuda else None)
        if is_first:
            self._lane.clear()
        with self._aside(buffer):
            if buffer.numel():
                self._lane.push(Bf16Mean([buffer], self.group), lambda: future.set_result(buffer))
            else:
                future.set_result(buffer)
            if is_last:
                self._lane.drain()
        return future

    def _aside(self, buffer: torch.Tensor) -> AbstractContextManager[object]:
        if not buffer.is_cuda:
            return nullcontext()
        if self._stream is None:
            self._stream = torch.cuda.Stream(buffer.device)
        self._stream.wait_stream(torch.cuda.current_stream(buffer.device))
        return torch.cuda.stream(self._stream)


def in_bf16(state: Bf16Hook, bucket: GradBucket) -> Future[torch.Tensor]:
    """DDP's hook for gradients that travel in bf16 and are summed in fp32; ``state`` is a :class:`Bf16Hook`."""
    return state.send(bucket.buffer(), bucket.index() == 0, bucket.is_last())


class Bf16ReduceScatter:
    """For ``FSDPModule.set_custom_reduce_scatter``: gradients travel in bf16, and are summed and kept in fp32.

    Each rank keeps its own part, so that nothing is sent back, and each element is rounded once.
    """

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: distributed.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        assert not async_op, "fully_shard runs it in a stream of its own"
        if op not in (distributed.ReduceOp.AVG, distributed.ReduceOp.SUM):
            raise HalfstepError(
                "wire='bf16' with set_gradient_divide_factor()",
                "torch hands the factor to a reduction of its own",
                "Leave the factor out, or use wire='fp32'.",
            )
        sent = input_tensor.bfloat16()
        parts = torch.empty_like(sent)
        distributed.all_to_all_single(_bytes(parts), _bytes(sent), group=group)
        total = _sum_of_parts(parts, group.size())
        output_tensor.copy_(total.div_(group.size()) if op == distributed.ReduceOp.AVG else total)


def _pack(values: Sequence[torch.Tensor], format: torch.dtype, multiple: int = 1) -> torch.Tensor:
    """All elements in one row, in ``format``, which ends at a ``multiple``; what fills it up is nobody's."""
    num = sum(value.numel() for value in values)
    flat = torch.empty(-(-num // multiple) * multiple, dtype=format, device=values[0].device)
    torch._foreach_copy_(_places(flat, values), list(values))
    return flat


def _unpack(flat: torch.Tensor, values: Sequence[torch.Tensor]) -> None:
    torch._foreach_copy_(list(values), _places(flat, values))


def _places(flat: torch.Tensor, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Where each of ``values`` is in the row, in its shape."""
    sizes = [value.numel() for value in values]
    rows = flat[: sum(sizes)].split(sizes)
    return [row.view(value.shape) for row, value in zip(rows, values, strict=True)]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory. Every backend sends bytes, not every one bf16."""
    return tensor.view(torch.uint8)


def _sum_of_parts(parts: torch.Tensor, num: int) -> torch.Tensor:
    """The sum of ``num`` parts of one length that stand in a row, in fp32 and in an order that is always the same."""
    return parts.view(num, -1).sum(0, dtype=torch.float32)
