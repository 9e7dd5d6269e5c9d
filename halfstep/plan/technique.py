"""What can be changed to save memory besides the policy, by name: each changes a workload, a policy, or both.

Names and prices are in ``halfstep.plan.prices``, which needs no torch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.optim import Optimizer

from halfstep.errors import HalfstepError
from halfstep.plan import checkpointing, lora, prices, quantized
from halfstep.policy import Policy
from halfstep.workload import Workload

Change = Callable[[Workload, Policy], tuple[Workload, Policy]]


@dataclass(frozen=True)
class Technique:
    """name: as a stack lists it. apply: (workload, policy) to the changed pair; the model may be changed in place."""

    name: str
    apply: Change


def technique_of(name: str) -> Technique:
    """The technique called ``name``; a HalfstepError that lists them all if there is none."""
    kind, number = prices.parse(name)
    return Technique(name, _MAKERS[kind.name](number))


def _accumulate(number: int) -> Change:
    """A window of ``number`` times as many micro-batches; whoever wants the same samples makes them smaller."""
    return lambda workload, policy: (replace(workload, accumulate=workload.accumulate * number), policy)


def _master(layout: str) -> Change:
    return lambda workload, policy: (workload, replace(policy, master=layout))


def _form(form: str) -> Change:
    """The user's own optimizer in another of torch's forms: ``foreach``, ``fused``, or ``loop``, which is neither."""

    def change(workload: Workload, policy: Policy) -> tuple[Workload, Policy]:
        make = workload.optimizer
        return replace(workload, optimizer=lambda parameters: in_form(make(parameters), form)), policy

    return change


def in_form(optimizer: Optimizer, form: str) -> Optimizer:
    """``optimizer`` built anew over the same groups in a form. HalfstepError if its class has no such form."""
    kind: Any = type(optimizer)
    options = inspect.signature(kind).parameters
    if form not in options and not (form == "loop" and "foreach" in options):
        known = [name for name in ("foreach", "fused") if name in options]
        raise HalfstepError(
            f"optimizer {kind.__name__} with {form}",
            f"it has no such form{f' (it has {known[0]})' if known else ', nor any other'}",
            "Use torch.optim.AdamW or SGD, or leave the optimizer as it is.",
        )
    settings = {name: name == form for name in ("foreach", "fused") if name in options}
    defaults = {name: value for name, value in optimizer.defaults.items() if name in options}
    groups = [group | settings for group in optimizer.param_groups]
    rebuilt: Optimizer = kind(groups, **defaults | settings)
    return rebuilt


def _uncached(workload: Workload, policy: Policy) -> tuple[Workload, Policy]:
    """Cast weights without autocast's cache, which pins every cast until the forward pass ends.

    Without checkpointing that is no loss, since the backward pass needs them. With it the cache is what pins them.
    """

    def loss(model: torch.nn.Module, batch: Any) -> Any:
        was_enabled = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)
        try:
            return workload.loss(model, batch)
        finally:
            torch.set_autocast_cache_enabled(was_enabled)

    return replace(workload, loss=loss), policy


def _eight_bit(workload: Workload, policy: Policy) -> tuple[Workload, Policy]:
    make = workload.optimizer

    def optimizer(parameters: Iterable[torch.nn.Parameter]) -> Optimizer:
        return quantized.in_8_bit(make(parameters))

    return replace(workload, optimizer=optimizer), policy


def _on_model(change: Callable[[torch.nn.Module, Policy], None]) -> Change:
    def apply(workload: Workload, policy: Policy) -> tuple[Workload, Policy]:
        change(workload.model, policy)
        return workload, policy

    return apply


_MAKERS: dict[str, Callable[[int], Change]] = {
    "fused": lambda _: _form("fused"),
    "foreach": lambda _: _form("foreach"),
    "loop": lambda _: _form("loop"),
    "accumulate=": _accumulate,
    "checkpointing": lambda _: _on_model(lambda model, policy: checkpointing.checkpoint_blocks(model)),
    "checkpointing=selective": lambda _: _on_model(lambda model, policy: checkpointing.checkpoint_blocks(model, True)),
    "uncached": lambda _: _uncached,
    "split16": lambda _: _master("split16"),
    "split8": lambda _: _master("split8"),
    "adamw8bit": lambda _: _eight_bit,
    "lora=": lambda rank: _on_model(lambda model, policy: lora.adapt(model, rank)),
    "16bit": lambda _: _on_model(quantized.hold_base_in_16_bit),
    "4bit": lambda _: _on_model(lambda model, policy: quantized.hold_base_in_4_bit(model)),
}
