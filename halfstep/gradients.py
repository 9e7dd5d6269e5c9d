"""What the step does with gradients as a whole: norms, sums, and which of them are not finite."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch

from halfstep.dtypes import LOW_DTYPES

Gradients = dict[torch.Tensor, torch.Tensor]
"""Parameter to its gradient."""


def gradients_of(optimizer: torch.optim.Optimizer) -> Gradients:
    """The gradients of an optimizer's parameters, of those that have one."""
    return {p: p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None}


def take_gradients(optimizer: torch.optim.Optimizer) -> Gradients:
    """Move every gradient of an optimizer's parameters out of ``.grad``."""
    taken = gradients_of(optimizer)
    for parameter in taken:
        parameter.grad = None
    return taken


def clear_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Drop every gradient of an optimizer's parameters."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def add_gradients(sums: Gradients, gradients: Gradients) -> None:
    """Add each gradient to the sum of its parameter, in place; a parameter's first one becomes the sum."""
    both = [p for p in gradients if p in sums]
    if both:
        torch._foreach_add_([local_of(sums[p]) for p in both], [local_of(gradients[p]) for p in both])
    sums.update({p: g for p, g in gradients.items() if p not in sums})


@contextmanager
def dropping_gradients(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """A backward pass that keeps no gradient of ``parameters``: each is dropped when it is made."""

    def drop(parameter: torch.Tensor) -> None:
        parameter.grad = None

    handles = [parameter.register_post_accumulate_grad_hook(drop) for parameter in parameters]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def divide(gradients: Iterable[torch.Tensor], divisor: torch.Tensor | float) -> None:
    """Divide each gradient, in place."""
    if not is_one(divisor):
        torch._foreach_div_([local_of(gradient) for gradient in gradients], divisor)


def multiply(gradients: Iterable[torch.Tensor], factor: float) -> None:
    """Multiply each gradient, in place."""
    if values := [local_of(gradient) for gradient in gradients]:
        torch._foreach_mul_(values, factor)


def is_one(divisor: torch.Tensor | float) -> bool:
    """Whether dividing by it is known to change nothing; a tensor's value is not looked at."""
    return isinstance(divisor, float) and divisor == 1.0


def put_gradients(gradients: Mapping[torch.Tensor, torch.Tensor]) -> None:
    """Move gradients into ``.grad``. A 16-bit weight takes any; one that became fp32 meanwhile takes fp32 alone."""
    for parameter, gradient in gradients.items():
        parameter.grad = gradient if parameter.dtype in LOW_DTYPES else gradient.to(parameter.dtype)


def norms_of(gradients: Iterable[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The 2-norm of each gradient, as one vector, and of all together, in fp32 on the device."""
    values = [values_of(gradient) for gradient in gradients]
    if low := [value for value in values if value.dtype in LOW_DTYPES]:
        # The norm of an fp16 gradient may be beyond fp16. Two lists, since torch's fast path takes one dtype at a time.
        rest = [value for value in values if value.dtype not in LOW_DTYPES]
        of_low = iter(torch._foreach_norm(low, dtype=torch.float32))
        of_rest = iter(torch._foreach_norm(rest) if rest else ())
        each = tuple(next(of_low if value.dtype in LOW_DTYPES else of_rest) for value in values)
    else:
        each = torch._foreach_norm(values)
    norms = torch.stack(each)
    return norms, torch.linalg.vector_norm(norms)


def nonfinite(parameters: Collection[torch.Tensor], norms: torch.Tensor) -> list[torch.Tensor]:
    """The parameters whose gradient has a norm that is not finite; all, where only the sum of their squares is not."""
    bad = [p for p, norm in zip(parameters, norms.tolist(), strict=True) if not math.isfinite(norm)]
    return bad or list(parameters)


def nonfinite_share(gradients: Iterable[torch.Tensor], finite: Iterable[torch.Tensor] = ()) -> float:
    """The share of elements that are inf or NaN, with others that are known to be ``finite``. Reads from the device."""
    gradients = list(gradients)
    num_bad = sum(int((~torch.isfinite(values_of(gradient))).sum()) for gradient in gradients)
    return num_bad / max(1, sum(local_of(gradient).numel() for gradient in (*gradients, *finite)))


def is_not_finite(number: torch.Tensor) -> torch.Tensor:
    """1.0 for inf and NaN, else 0.0, on the device: x - x is 0 for a number, and NaN for inf and NaN."""
    return (number - number).ne_(0).float()


def values_of(gradient: torch.Tensor) -> torch.Tensor:
    """The elements of a gradient that live here; those that a sparse one stores."""
    return gradient.coalesce().values() if gradient.is_sparse else local_of(gradient)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a DTensor that lives here, and any other tensor itself. It has the same memory."""
    if type(tensor) is torch.Tensor:  # most are, and looking for what is not there takes longest
        return tensor
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return local
