"""Makes a workload of a bare model, and says what had to be assumed for it.

A model alone has no batch, no loss and no optimizer. Its batch is what it says it takes, its loss its own where it has
one, and its optimizer AdamW. Each of these is an assumption that a plan states.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from halfstep.errors import HalfstepError
from halfstep.plan.subject import Input, Subject, parse_inputs
from halfstep.workload import Workload, binds, seed_everything, signature_of

DEFAULT_BATCH_SIZE = 8
"""Samples of a micro-batch where nobody says: the default of Transformers' Trainer."""

_DTYPES = {"float": numpy.float32, "int": numpy.int64, "bool": numpy.bool_}
_WRITE = "Write a function workload(seed) around the model, and plan that."


def class_workload(subject: Subject, kind: type[nn.Module]) -> tuple[Workload, list[str]]:
    """A workload of a class of the user's, constructed without arguments."""
    signature = signature_of(kind)
    if signature is not None and not binds(signature):
        raise HalfstepError(
            subject.spec, f"its constructor takes {signature}, and a plan calls it without arguments",
            f"Give its arguments defaults. Or: {_WRITE[0].lower()}{_WRITE[1:]}",
        )  # fmt: skip
    seed_everything(0)
    model, size = kind(), batch_size_of(subject)
    example = getattr(model, "example_batch", None)
    if subject.inputs is not None:
        batch, what = given_batch(subject), f"The batch is {size} x {subject.inputs}, as given."
    elif callable(example):
        batch, what = example(size), f"The batch is the model's own, example_batch({size})."
    else:
        raise HalfstepError(
            subject.spec,
            "nothing says what the model takes",
            "Give the inputs of one sample (3x224x224, int:1024), or the class a method example_batch(batch_size).",
        )
    return workload_of(subject, model, batch, output_loss, [what, OUTPUT_LOSS])


def workload_of(
    subject: Subject, model: nn.Module, batch: Any, loss: Callable[[nn.Module, Any], Tensor], notes: list[str]
) -> tuple[Workload, list[str]]:
    """The workload, and all that was assumed."""
    if subject.batch_size is None:
        notes = [f"A micro-batch of {batch_size_of(subject)} samples is assumed, since none was given.", *notes]
    workload = Workload(model=model, batches=[batch], loss=loss, optimizer=torch.optim.AdamW)
    return workload, [*notes, "The optimizer is torch.optim.AdamW in its default form."]


def batch_size_of(subject: Subject) -> int:
    return DEFAULT_BATCH_SIZE if subject.batch_size is None else subject.batch_size


def given_batch(subject: Subject) -> tuple[Tensor, ...]:
    """The batch that ``subject.inputs`` describes."""
    assert subject.inputs is not None
    return tuple(zeros(batch_size_of(subject), each) for each in parse_inputs(subject.inputs))


def zeros(batch_size: int, input: Input) -> Tensor:
    """A tensor of that shape. NumPy's zeros take memory only where they are read, so a plan's batch takes none."""
    return torch.from_numpy(numpy.zeros((batch_size, *input.shape), _DTYPES[input.kind]))


# --- losses --------------------------------------------------------------------------------------------------------

OUTPUT_LOSS = (
    "The loss is what the model returns as loss, or else a number that it returns, or else the mean square of its "
    "first output in fp32."
)


def output_loss(model: nn.Module, batch: Any) -> Tensor:
    """The loss that the model's own output holds, or the mean square of its first tensor in fp32."""
    output = call(model, batch)
    own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(own, Tensor):
        return own
    tensors = [tensor for tensor in _flat(output) if tensor.is_floating_point()]
    if not tensors:
        raise HalfstepError(
            f"the output of {type(model).__name__} ({type(output).__name__})",
            "it holds no tensor of floats to make a loss of",
            _WRITE,
        )
    scalars = [tensor for tensor in tensors if tensor.dim() == 0]
    return scalars[0] if scalars else tensors[0].float().square().mean()


def call(model: nn.Module, batch: Any) -> Any:
    """A dictionary gives arguments by name, a tuple or a list by position, anything else is the one argument."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


def _flat(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    parts = output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple | list) else ()
    return [tensor for part in parts for tensor in _flat(part)]
