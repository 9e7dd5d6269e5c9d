"""A micro-batch whose gradient is not finite: lower the scale, promote a module, or stop with a diagnosis."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from halfstep.diagnosis.exhaustion import can_promote, exhausted, makers_of_loss
from halfstep.events import Promotion
from halfstep.record import Producer
from halfstep.replay import Fault
from halfstep.window import Loss

if TYPE_CHECKING:
    from halfstep.stepper.step import Stepper


def mend(stepper: Stepper, closure: Callable[[], Loss], fault: Fault) -> float | None:
    """Lower the scale or promote a module, so that the micro-batch can run again; the scale's factor.

    None if nothing helps, or if it is not for one rank alone to decide.
    """
    is_finite, is_exhausted = math.isfinite(fault.loss), stepper.scale.is_exhausted()
    if stepper._explainer and (is_exhausted or not is_finite):
        stepper._tell(stepper._explainer.explain(stepper._capture(closure)))
    factor = 1.0
    # A batch that brought the scale all the way down may be the only one; a second in a row is not.
    may_stop = is_exhausted and (fault.lowered == 1.0 or stepper._had_hopeless)
    if fault.is_alone and (is_exhausted or not is_finite):
        # Here is seen who is at fault. What to do about it is for all ranks together, at the window's end.
        window = stepper._window
        window.is_exhausted |= is_exhausted
        if stepper.policy.on_exhausted == "promote" and not is_finite:
            window.makers += tuple(makers_of_loss(stepper._capture(closure)))
        elif stepper.policy.on_exhausted == "promote" or may_stop:
            window.makers += find_makers(stepper, closure)
        if is_exhausted:
            stepper.scale.undo(fault.lowered)
        return None
    if is_exhausted:
        makers = find_makers(stepper, closure) if stepper.policy.on_exhausted == "promote" or may_stop else ()
        if not promote_or_stop(stepper, closure, makers, fault.bad, stepper.num_steps + 1, may_stop):
            stepper._had_hopeless = True
            stepper.scale.undo(fault.lowered)
            return None
    elif is_finite:
        factor = stepper.scale.back_off() or 1.0
    elif not _promote_makers_of_loss(stepper, closure):
        # The fault is in the forward pass, which no scale mends. As above, what is not finite stays in the sums,
        # so that the window's end skips it and lowers the scale once.
        return None
    return factor


def find_makers(stepper: Stepper, closure: Callable[[], Loss] | None) -> tuple[Producer, ...]:
    """Who makes the first non-finite value of a micro-batch now; nobody where this rank cannot look by itstepper."""
    if closure is None or not stepper.ranks.looks_alone:
        return ()
    producer = stepper._capture(closure).find_producer()
    return () if producer is None else (producer,)


def promote_or_stop(
    stepper: Stepper,
    closure: Callable[[], Loss] | None,
    makers: Sequence[Producer],
    bad: Sequence[torch.Tensor],
    step: int,
    may_stop: bool,
) -> bool:
    """No scale mends the gradient of ``bad``: do what the policy says. All ranks do it together.

    True when modules were promoted to fp32 and the micro-batch can run again. Otherwise it raises, or says False
    where it may not stop. ``makers``: those that this rank knows of.
    """
    if stepper.policy.on_exhausted == "stop" and not may_stop:
        return False
    of_all = [producer for of_rank in stepper.ranks.gather(tuple(makers)) for producer in of_rank]
    if stepper.policy.on_exhausted == "promote" and _promote_each(stepper, of_all, step):
        return True
    if not may_stop:
        return False
    if stepper._can_replay and closure is not None:
        stepper._replay.start.restore()
    stepper._drop_window()
    error = exhausted(stepper.policy, step, names_of(stepper.ranks.module, bad), next(iter(of_all), None))
    if stepper._watcher:
        stepper._watcher.alert("scale-exhausted", step, error)
    raise error


def _promote_makers_of_loss(stepper: Stepper, closure: Callable[[], Loss]) -> bool:
    """The loss is not finite, which no scale mends: promote who made it at once, if the policy does and that helps.

    A batch that goes on like this is not lost, and the scale does not fall for what it has no part in.
    """
    if stepper.policy.on_exhausted == "stop":
        return False
    of_ranks = stepper.ranks.gather(makers_of_loss(stepper._capture(closure)))
    return _promote_each(stepper, [producer for makers in of_ranks for producer in makers], stepper.num_steps + 1)


def _promote_each(stepper: Stepper, makers: Sequence[Producer], step: int) -> bool:
    """Promote those that are modules in 16 bit; whether there was one."""
    num_promoted = len(stepper._promoted)
    for producer in makers:
        if can_promote(producer, stepper.policy):
            stepper.region.promote(producer.module)
            stepper.masters.settle(stepper.policy)
            stepper._promoted.append(producer.module)
            stepper._tell(Promotion(step, producer.module, str(stepper.policy), str(producer)))
    return len(stepper._promoted) > num_promoted


def names_of(model: nn.Module, parameters: Iterable[torch.Tensor]) -> list[str]:
    wanted = {id(parameter) for parameter in parameters}
    return [name for name, parameter in model.named_parameters() if id(parameter) in wanted]
