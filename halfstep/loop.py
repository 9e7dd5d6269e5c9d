"""The training loop over a Workload: its model on a device behind a Stepper, window after window."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.events import StepReport
from halfstep.hardware import Hardware
from halfstep.policy import Policy
from halfstep.stepper import Stepper
from halfstep.workload import Workload, num_samples, stream, to_device


def make_stepper(workload: Workload, policy: str | Policy, device: str, hardware: Hardware | None = None) -> Stepper:
    """The workload's model on the device, in training mode, with its optimizer and scheduler behind a Stepper.

    hardware: what the device computes, None for what it says of itself.
    """
    model = workload.model.to(device).train()
    optimizer = workload.optimizer([p for p in model.parameters() if p.requires_grad])
    return Stepper(
        model,
        optimizer,
        policy,
        accumulate=workload.accumulate,
        max_norm=workload.max_norm,
        scheduler=workload.scheduler(optimizer) if workload.scheduler else None,
        watch=False,  # a tool judges the run itself
        hardware=hardware,
    )


def windows(workload: Workload, stepper: Stepper, steps: int) -> Iterator[tuple[StepReport, int]]:
    """Train ``steps`` windows; yields each StepReport with the number of samples that its window held."""
    batches = stream(workload)
    for _ in range(steps):
        samples, report = 0, None
        while report is None:
            batch = to_device(next(batches), stepper.region.device)
            samples += num_samples(batch)
            report = stepper.step(lambda batch=batch: workload.loss(stepper.model, batch))  # type: ignore[misc]
        yield report, samples
