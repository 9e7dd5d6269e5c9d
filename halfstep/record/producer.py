"""Who made the first non-finite value, told from who only carried it on, and from masks of -inf, which are meant.

It is read off a record of operations, in order of execution. An operation whose inputs are finite and whose output is
not made it. One whose input is not finite, though no operation before made anything of the kind, was given it: by a
weight, or by the batch. What comes after the first one and has both is a carrier.

An infinity in an attention mask is meant. See docs/trace.md for the rule and for why each part of it is there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from halfstep.formats import SIXTEEN_BIT
from halfstep.record.mask import Makers, is_mask, is_meant, is_pole, is_written, kind_of, outputs_of
from halfstep.record.recorder import Operation, OperationRecorder, Record
from halfstep.record.values import Values

LOSS = "the loss function"
BATCH = "the batch"
_MOVES = {"_to_copy", "clone", "copy", "copy_", "cat", "stack", "index", "index_select", "gather"}


@dataclass(frozen=True)
class Producer:
    """What made the first non-finite value.

    module: qualified name, ``""`` for the model's own forward, or LOSS or BATCH.
    phase:  ``forward``, ``backward``, or ``update`` for an optimizer that made a weight non-finite.
    kind:   ``inf`` or ``nan``.
    op, function: the aten operation, and the torch function that the user called; of a weight or a batch that held it
            already, the one that met it first. file, line: where the user called it.
    holds:  name of the parameter or buffer that held it already.
    """

    module: str
    phase: str
    kind: str
    op: str | None = None
    function: str | None = None
    file: str | None = None
    line: int | None = None
    holds: str | None = None

    @property
    def is_module(self) -> bool:
        """Whether it can be named in a policy; a batch, a loss function and a model's own forward cannot."""
        return self.module not in ("", LOSS, BATCH)

    def __str__(self) -> str:
        return f"{self.module or 'the outermost module'} makes it ({self.kind}) in the {self.phase} pass"


@dataclass(frozen=True)
class Fault:
    """The producer in its record.

    index:    of its operation among those of the record, ``operation``.
    carriers: the operations after it that only pass on what is not finite.
    origin:   the operation that wrote the infinity that this one was handed and made NaN or more of: a mask, or, for a
              fault of the backward pass, something that the forward pass did not mind.
    """

    producer: Producer
    index: int
    operation: Operation
    carriers: tuple[Operation, ...]
    origin: Operation | None = None


def find_producer(
    model: nn.Module, forward: Callable[[], torch.Tensor], backward: Callable[[torch.Tensor], None]
) -> Producer | None:
    """Run ``loss = forward()`` and ``backward(loss)`` once and name what made the first non-finite value.

    None when every value was finite this time. The gradients that the pass leaves in ``.grad`` are the caller's to
    drop.
    """
    recorder = OperationRecorder(model)
    with recorder:
        loss = forward()
        is_finite = bool(torch.isfinite(loss))
        if is_finite:
            backward(loss)
    fault = fault_of(recorder.read(), is_finite, trained(model))
    return fault.producer if fault else None


def trained(model: nn.Module) -> frozenset[str]:
    """The names of the parameters that an optimizer moves: what is not finite in them is never a mask."""
    return frozenset(name for name, parameter in model.named_parameters() if parameter.requires_grad)


def fault_of(record: Record, loss_is_finite: bool, weights: Collection[str] = ()) -> Fault | None:
    """Who made the first non-finite value of a pass whose loss or gradient is not finite.

    While the loss is finite, an infinity on the way was meant, and the fault is one of the backward pass.
    weights: names of the parameters that are trained.
    """
    operations = record.operations
    makers = _makers(operations)
    doubtful: Fault | None = None
    last_mask: int | None = None
    for index in _searched(operations, loss_is_finite):
        operation = operations[index]
        if kind_of(operation) is None:
            continue
        handed = [value for value in operation.inputs if value.kind]
        if is_meant(operation, handed, makers, weights):
            last_mask = index if not handed or last_mask is None else last_mask
        elif not loss_is_finite and (given := _given(handed, weights)):
            doubtful = doubtful or _fault(operations, index, makers, given)
        elif not handed and (is_written(operation, makers) or (not loss_is_finite and is_pole(operation))):
            doubtful = doubtful or _fault(operations, index, makers)
        elif handed and (doubtful is not None or (loss_is_finite and _only_moves(operation))):
            continue  # a carrier, or a copy of what the forward pass left
        else:
            return _fault(operations, index, makers)
    if doubtful is None and last_mask is not None and not loss_is_finite:
        return _fault(operations, last_mask, makers)  # the mask itself reached the loss
    return doubtful


def _searched(operations: Sequence[Operation], loss_is_finite: bool) -> list[int]:
    """The operations that can be at fault: of the backward pass, or those up to the loss.

    A loss that is made of a gradient has some of a backward pass before it.
    """
    numbers = range(len(operations))
    if loss_is_finite:
        return [i for i in numbers if operations[i].site.phase == "backward"]
    end = max((i for i in numbers if operations[i].site.phase == "forward"), default=-1)
    return list(range(end + 1))


def overflows(record: Record) -> list[int]:
    """The operations of a pass that ended well whose 16-bit output is not finite, although their inputs are.

    Without those that were written on purpose, of either sign: with a finite loss, they did no harm.
    """
    makers = _makers(record.operations)
    return [
        index
        for index, operation in enumerate(record.operations)
        if kind_of(operation)
        and operation.outputs[0].format in SIXTEEN_BIT
        and not any(value.kind for value in operation.inputs)
        and not is_written(operation, makers)
    ]


def fault_at(record: Record, index: int) -> Fault:
    """The operation of this number as the one at fault."""
    return _fault(record.operations, index, _makers(record.operations))


def _makers(operations: Sequence[Operation]) -> Makers:
    return {id(value): operation for operation in operations for value in operation.outputs}


def _only_moves(operation: Operation) -> bool:
    """Whether an operation copies what is not finite from its inputs and makes none of it."""
    outputs, inputs = outputs_of(operation), operation.inputs
    has_nan, had_nan = any(value.num_nan for value in outputs), any(value.num_nan for value in inputs)
    has_inf, had_inf = any(value.num_inf for value in outputs), any(value.num_inf for value in inputs)
    return operation.op in _MOVES and has_nan <= had_nan and has_inf <= had_inf


def _given(handed: Sequence[Values], weights: Collection[str]) -> Values | None:
    """The input that was not finite before any operation made it so, the worst one first.

    Before the first fault everything computed is finite but for masks.
    """
    bad = [value for value in handed if not is_mask(value) or value.name in weights]
    return max(bad, key=lambda value: value.kind or "", default=None)


def _fault(operations: Sequence[Operation], index: int, makers: Makers, given: Values | None = None) -> Fault:
    operation = operations[index]
    site = operation.site
    module = LOSS if site.module is None else site.module
    kind, holds = kind_of(operation) or "", None
    # A single number is a constant of the user's code, which the operation writes.
    if given is not None and (given.name is not None or given.shape):
        kind, holds = given.kind or "", given.name
        module = given.name.rpartition(".")[0] if given.name is not None else BATCH
    producer = Producer(module, site.phase, kind, operation.op, site.function, site.file, site.line, holds)
    carriers = tuple(later for later in operations[index + 1 :] if _carries(later))
    return Fault(producer, index, operation, carriers, None if given else _origin(operations, index, makers))


def _carries(operation: Operation) -> bool:
    was_handed = any(value.kind for value in operation.inputs)
    return was_handed and bool(kind_of(operation)) and not all(map(is_mask, (*operation.inputs, *operation.outputs)))


def _origin(operations: Sequence[Operation], index: int, makers: Makers) -> Operation | None:
    """The operation that first wrote what this one was handed, back along the tensors that were handed on.

    A view is a tensor of its own; from there it is the last operation before that wrote something of the kind.
    """
    handed = next((value for value in operations[index].inputs if value.kind), None)
    found: Operation | None = None
    while handed is not None:
        maker = makers.get(id(handed))
        if maker is None:
            if handed.name is not None:
                return found  # a mask in a buffer
            break
        found = maker
        handed = next((value for value in maker.inputs if value.kind), None)
    else:
        return found
    wrote = [o for o in operations[:index] if kind_of(o) and not any(value.kind for value in o.inputs)]
    return wrote[-1] if wrote else found
