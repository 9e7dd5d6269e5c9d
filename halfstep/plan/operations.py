"""Counts what one training step computes and moves: every kernel of a window on a device that is not here.

It is a pass of its own, since who counts operations may hold tensors for longer than the step would. A kernel is what
eager torch launches for one operation; attention, a norm, a foreach update and a fused optimizer are one each.

What is counted is what a kernel cannot do without, so that the time for it is a least time: the operations of products,
and the bytes of inputs and outputs (``halfstep.plan.cost``). The memory bounds every kernel that multiplies nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from halfstep.alignment import align
from halfstep.plan.cost import Call
from halfstep.plan.fake_step import FakeRun, start
from halfstep.plan.roofline import Kernel, OffSize, Operations
from halfstep.plan.step_trace import BACKWARD, FORWARD, STEP
from halfstep.plan.subject import Subject
from halfstep.plan.target import Target
from halfstep.policy import Policy
from halfstep.record import Site, Walk
from halfstep.window import Loss


def count_operations(
    subject: Subject, policy: str | Policy, target: Target, techniques: Sequence[str] = ()
) -> Operations:
    """The operations of one step of ``subject`` under ``policy`` on ``target``, with ``techniques`` by their names.

    A second window, of twice the batch, tells how each kernel grows with it.
    """
    run = start(subject, policy, target, techniques)
    model, policy = run.stepper.model, run.stepper.policy
    counter = _Counter(model, policy.uses_tf32 and "tf32" in target.hardware.native, target.is_cuda)
    first = counter.window(run)
    batch_size = run.batch_size or 0
    run.batch_size = 2 * batch_size
    double = counter.window(run)
    if not _are_alike(first, double):  # the first window of a run may do what no later one does
        run.batch_size = batch_size
        first = counter.window(run)
    growths, why = _growths(first, double, batch_size)
    kernels = Counter(zip(first, growths, strict=True))
    return Operations(
        kernels=tuple(Kernel(*one[:4], num, *one[4:], growth) for (one, growth), num in kernels.items()),
        batch_size=batch_size,
        num_samples=batch_size * run.workload.accumulate,
        policy=str(policy),
        techniques=tuple(techniques),
        uncounted=tuple(sorted(counter.uncounted)),
        off_sizes=tuple(
            OffSize(layer.name, layer.kind, size.dimension, size.size, layer.multiple)
            for layer in align(model, policy).layers
            if layer.is_off
            for size in layer.sizes
            if size.padded != size.size
        ),
        notes=(*counter.notes, *([why] if why else [])),
    )


class _Counted(NamedTuple):
    """One kernel; fields as of ``Kernel``."""

    op: str
    module: str | None
    phase: str
    format: str | None
    flops: int
    bytes_read: int
    bytes_written: int


def _are_alike(one: Sequence[_Counted], other: Sequence[_Counted]) -> bool:
    """Whether two windows ran the same kernels, of whatever size."""
    return [kernel[:4] for kernel in one] == [kernel[:4] for kernel in other]


def _growths(
    one: Sequence[_Counted], double: Sequence[_Counted], batch_size: int
) -> tuple[list[tuple[float, float, float] | None], str]:
    """What each kernel grows by with a sample; where that is not known all are None, and a sentence says why."""
    if not _are_alike(one, double):
        return [None] * len(one), "Twice the batch runs other kernels, so that other batch sizes are not known."
    growths: list[tuple[float, float, float] | None] = []
    for small, large in zip(one, double, strict=True):
        if any(b > 2 * a for a, b in zip(small[4:], large[4:], strict=True)):
            where = f"{small.op} in {small.module or 'the model'}"
            return [None] * len(one), f"{where} grows faster than the batch, so that other batch sizes are not known."
        flops, read, written = ((b - a) / batch_size for a, b in zip(small[4:], large[4:], strict=True))
        growths.append((flops, read, written))
    return growths, ""


class _Counter:
    """A visitor of a walk that counts kernels."""

    sees_views = False

    def __init__(self, model: nn.Module, uses_tf32: bool, is_cuda: bool) -> None:
        self.uncounted: set[str] = set()
        self._uses_tf32 = uses_tf32
        self._model = model
        self._recurrent = {n for n, module in model.named_modules() if is_cuda and isinstance(module, nn.RNNBase)}
        self._in_forward = False
        self._kernels: list[_Counted] = []
        self._remarks: dict[str, None] = {}

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(self._remarks)

    def window(self, run: FakeRun) -> list[_Counted]:
        """The kernels of the next window of ``run``, in their order."""
        self._kernels = []
        run.window(lambda: Walk(self._model, self), self._forward)
        return self._kernels

    def _forward(self, loss: Callable[[], Loss]) -> Loss:
        self._in_forward = True
        try:
            return loss()
        finally:
            self._in_forward = False

    def visit(self, site: Site, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        call = Call(func, args, kwargs, result)
        read, written = call.nbytes()
        if not written:
            return result
        flops = call.flops()
        is_known = func.namespace in ("aten", "prims")
        if flops is None and (not is_known or call.has_products()):
            self.uncounted.add(str(func))
        self._remark(call)
        if not is_known:  # what it reads and writes of its tensors, only its author knows
            read = written = 0
        if site.module in self._recurrent and call.name not in _RECURRENT:
            # On a CPU this layer runs as a loop of small operations, on CUDA as a kernel of cuDNN's.
            self._remarks[_RECURRENT_NOTE] = None
            read = written = 0
        if flops or read or written:
            phase = BACKWARD if torch._C._current_graph_task_id() != -1 else FORWARD if self._in_forward else STEP
            format = call.format(self._uses_tf32) if flops else None
            self._kernels.append(_Counted(str(func), site.module, phase, format, flops or 0, read, written))
        return result

    def _remark(self, call: Call) -> None:
        """Note what makes this call cost less than was counted."""
        if call.name in ("nonzero", "masked_select") or call.has_mask():
            self._remarks[_MASK_NOTE] = None
        if call.name == "convolution" and call.tensor("weight").shape[2:] == (3, 3) and set(call["stride"]) == {1}:
            self._remarks[_WINOGRAD_NOTE] = None


_MASK_NOTE = "A mask is taken to select everything; where it selects less, a step may be faster than the bound."
_RECURRENT_NOTE = "Of recurrent layers only the products are counted, since cuDNN runs the rest in kernels of its own."
_WINOGRAD_NOTE = (
    "Convolutions are counted as direct ones; Winograd's algorithm, which cuDNN may choose for 3x3 of stride 1, "
    "multiplies up to 4 times less."
)

_RECURRENT = {"mkldnn_rnn_layer", "mkldnn_rnn_layer_backward", "_cudnn_rnn", "_cudnn_rnn_backward"}
"""Kernels that run a whole recurrent layer, as CUDA does."""
