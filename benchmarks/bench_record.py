"""A recorded step of the built-in workloads against a plain one: at the level of modules, of operations, and after.

A step is a Stepper's: forward, backward and optimizer, on one thread. The recorded one includes attaching the recorder,
taking it off and reading what it has. To reach: modules 1.5, operations 10, a step after detaching 1.

What bounds it is counting: each value is read from memory, turned into a byte, and adds one to a histogram, about 2 ns
on a CPU, whatever a step does with it. Each case prints how many values that is, and their bytes in fp32. The bytes are
not the bound: a histogram has no vector instruction.
"""

from __future__ import annotations

import statistics
import sys

import torch
from interleave import Contender, measure, report

from halfstep.loop import make_stepper
from halfstep.policy import Policy
from halfstep.record import ModuleRecorder, OperationRecorder, Record
from halfstep.source import load
from halfstep.workload import stream

CASES = [
    (name, policy)
    for name in ("charlm", "digits", "mlp", "fragile")
    for policy in ("fp32", "bf16", "fp16 scale.init=1024")
    if (name, policy[:4]) != ("fragile", "fp16")  # it cannot be trained so: that is what it is for
]
ROUNDS = {"charlm": 9, "digits": 15, "mlp": 20, "fragile": 15}
CALLS = {"charlm": 1, "digits": 3, "mlp": 10, "fragile": 3}


def compare(name: str, policy: str) -> list[float]:
    workload = load(name)(0)
    stepper = make_stepper(workload, Policy.parse(policy), "cpu")
    plain = make_stepper(load(name)(0), Policy.parse(policy), "cpu")  # its model never had a recorder
    batch = next(stream(workload))

    def step() -> None:
        stepper.step(lambda: workload.loss(stepper.model, batch))

    def recorded(kind: type[ModuleRecorder] | type[OperationRecorder]) -> Record:
        with kind(stepper.model) as recorder:
            step()
        return recorder.read()

    runs = {
        "plain": lambda: plain.step(lambda: workload.loss(plain.model, batch)),
        "modules": lambda: recorded(ModuleRecorder),
        "operations": lambda: recorded(OperationRecorder),
        "after": step,
    }
    times = measure({run: Contender(runs[run], calls=CALLS[name]) for run in runs}, ROUNDS[name])
    modules = {id(v.values.row): v.values.size for v in recorded(ModuleRecorder).modules}
    operations = recorded(OperationRecorder).operations
    values = {id(v.row): v.size for o in operations for v in (*o.inputs, *o.outputs)}
    print(
        f"{name} {policy.split()[0]}: {counted(modules)} at modules, {counted(values)} at {len(operations)} operations"
    )
    goals = {"modules": "1.5", "operations": "10", "after": "1"}
    return [report(times, contender, "plain", f"to reach {goal}") for contender, goal in goals.items()]


def counted(sizes: dict[int, int]) -> str:
    total = sum(sizes.values())
    return f"{total / 1e6:.2f} million values ({4 * total / 2**20:.1f} MiB)"


if __name__ == "__main__":
    print(__doc__.splitlines()[0])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    chosen = [case for case in CASES if not sys.argv[1:] or case[0] in sys.argv[1:]]
    ratios = [compare(*case) for case in chosen]
    for number, level in enumerate(("modules", "operations", "after")):
        column = [row[number] for row in ratios]
        print(f"{level}: worst {max(column):.2f}, median {statistics.median(column):.2f} over {len(column)} cases")
