"""Train the built-in workload fragile with a log, in bf16, which can, and fp16, which cannot; halfstep watch runs."""

import halfstep
from halfstep.source import load
from halfstep.workload import stream

for policy in ("bf16", "fp16"):
    workload = load("fragile")(seed=0)
    optimizer = workload.optimizer(workload.model.parameters())
    batches = stream(workload)
    stepper = halfstep.Stepper(
        workload.model, optimizer, policy, max_norm=workload.max_norm, log=f"runs/fragile-{policy}"
    )
    try:
        for _ in range(200):
            batch = next(batches)
            report = stepper.step(lambda batch=batch: workload.loss(workload.model, batch))  # noqa: B023
        print(report)
    except halfstep.ScaleExhausted as error:
        print(error)
    stepper.close()
