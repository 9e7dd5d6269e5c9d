"""What a Stepper has to hold as the other ranks do, for the precision contract."""

from __future__ import annotations

from typing import TYPE_CHECKING

from halfstep.ranks.facts import (
    Fact,
    facts_of_machine,
    facts_of_model,
    facts_of_optimizer,
    facts_of_progress,
    facts_of_rounding,
    facts_of_run,
    facts_of_weights,
)

if TYPE_CHECKING:
    from halfstep.stepper.step import Stepper


def facts_of(stepper: Stepper) -> list[Fact]:
    """What other ranks have to hold too, from the moment on when the stepper is built."""
    module, optimizer = stepper.ranks.module, stepper.optimizer
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    facts = facts_of_run(
        stepper.policy,
        stepper.info.requested,
        accumulate=stepper.accumulate,
        max_norm=stepper.max_norm,
        scheduler=stepper.scheduler,
        passes_closure=stepper._passes_closure,
        contract=(stepper._comparison.contract.every, *stepper._comparison.contract.allow),
    )
    return [
        *facts,
        *facts_of_machine(stepper.region.hardware),
        *facts_of_model(stepper.ranks),
        *facts_of_optimizer(optimizer, names),
    ]


def compare(stepper: Stepper) -> None:
    """Compare with the other ranks before a window begins; a difference ends the run on each of them."""
    names = {id(parameter): name for name, parameter in stepper.ranks.module.named_parameters()}
    formats = {names[key]: dtype for key, dtype in stepper._comparison.gradients.items()}
    num_micro_batches = stepper._window.num_micro_batches
    stepper._comparison.check(
        [
            *facts_of(stepper),
            *facts_of_rounding(stepper.masters.seeds(), stepper.optimizer, stepper.ranks),
            *facts_of_progress(stepper.num_steps, num_micro_batches, stepper._unit, stepper.scale, formats),
            *facts_of_weights(stepper.ranks, stepper.masters.named_rests()),
        ]
    )
    stepper._comparison.is_due = False
