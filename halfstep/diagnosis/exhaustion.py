"""What can be done where no loss scale mends a step: which modules to promote to fp32, or what to tell the user."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeGuard

from halfstep.diagnosis.capture import Capture
from halfstep.errors import ScaleExhausted, and_more
from halfstep.policy import Policy, pattern_of
from halfstep.record import Producer


def can_promote(producer: Producer | None, policy: Policy) -> TypeGuard[Producer]:
    """Whether it is a module, and not in fp32 already."""
    return producer is not None and producer.is_module and policy.format_of(producer.module) != "fp32"


def makers_of_loss(capture: Capture) -> list[Producer]:
    """The modules that, kept in fp32, give a captured micro-batch a finite loss; empty if no modules do.

    Where the first one is in fp32 the next one may show, so that each takes one more watched run.
    """
    policy, makers = capture.policy, list[Producer]()
    while (producer := capture.find_producer(policy)) is not None and producer.phase == "forward":
        if not can_promote(producer, policy):
            return []
        makers.append(producer)
        policy = policy.in_fp32([producer.module])
    return makers


def exhausted(policy: Policy, step: int, parameters: Sequence[str], producer: Producer | None) -> ScaleExhausted:
    """The error that ends a run: gradients of ``parameters`` overflow at the floor, and ``producer`` made the first."""
    who = f"; {producer}" if producer else ""
    module = producer.module if producer else "".join(parameters[:1]).rpartition(".")[0]
    if producer and not producer.is_module:
        cure = "Mend it there, or use"
    elif module and policy.rule_of(module) == "fp32":
        cure = f"{module} is in fp32 already: keep what it gets its input from in fp32 too, or use"
    elif module:
        cure = f"Keep that module in fp32 (policy '{policy} module:{pattern_of(module)}=fp32'), or use"
    else:
        cure = "Use"
    return ScaleExhausted(
        f"the loss scale at its floor of {policy.scale.floor:g}, step {step}",
        f"the gradient of {and_more(parameters)} is still not finite{who}",
        f"{cure} bf16 where the device has it. The weights are those of the last applied step.",
    )
