"""Steps of training that are written down by hand or drawn, with slow plain twins of what follows from them."""

from __future__ import annotations

import functools
import random

from halfstep.plan.step_trace import BACKWARD, COMPONENTS, FORWARD, STEP, StepTrace, Storage

PHASES = ((FORWARD, 1), (BACKWARD, 100), (STEP, 200))


def block(nbytes, component, born, died, op=None, module=None, phase=None, file=None, line=None):
    """One storage; without a phase it is of the one of PHASES that it is born in."""
    if phase is None and born:
        phase = [name for name, start in PHASES if start <= born][-1]
    return Storage(nbytes, component, phase, op and f"aten.{op}.default", module, file, line, born, died)


def step(*blocks, phases=PHASES, num_events=299, batch_size=2, **more):
    """A step of these blocks, at times of the reader's choice: not each one has an event."""
    fields = {"num_samples": batch_size, "num_parameters": 100, "num_trained": 100, "policy": "bf16"} | more
    ordered = sorted(blocks, key=lambda s: s.born)
    return StepTrace(ordered, num_events, phases, batch_size, **fields)


def drawn_step(seed, num_storages=40, batch_size=2, max_growth=8):
    """A step of random blocks that grow with the batch, each birth and death an event of its own."""
    draw = random.Random(seed)
    times = list(range(1, 2 * num_storages + 1))
    draw.shuffle(times)
    blocks, growth = [], []
    for at in range(num_storages):
        born, died = sorted(times[2 * at : 2 * at + 2])
        if draw.random() < 0.2:
            born = 0
        if draw.random() < 0.2:
            died = None
        slope = draw.choice((0, 0, draw.randint(1, max_growth)))
        nbytes = draw.choice((0, draw.randint(1, 60))) + slope * batch_size
        blocks.append(Storage(nbytes, draw.choice(COMPONENTS), FORWARD, "aten.mm.default", "m", "f.py", 1, born, died))
        growth.append(float(slope))
    pairs = sorted(zip(blocks, growth, strict=True), key=lambda pair: pair[0].born)
    ends = sorted(draw.sample(range(2, 2 * num_storages), 2))
    phases = ((FORWARD, 1), (BACKWARD, ends[0]), (STEP, ends[1]))
    drawn = step(*(b for b, _ in pairs), phases=phases, num_events=2 * num_storages, batch_size=batch_size)
    return StepTrace(**(vars(drawn) | {"growth": [g for _, g in pairs]}))


def alive_bytes(trace, time):
    """Bytes by component at ``time``, storage by storage."""
    held = {}
    for s in trace.storages:
        if s.born <= time and (s.died is None or time < s.died):
            held[s.component] = held.get(s.component, 0) + s.nbytes
    return held


def plain_peak(trace):
    return max(sum(alive_bytes(trace, time).values()) for time in range(trace.num_events + 1))


@functools.cache
def fake(spec, policy="bf16", batch_size=None, finds_growth=False):
    """The true step of a workload, on fake tensors; run once however many tests ask."""
    from halfstep.plan.fake_step import fake_step
    from halfstep.plan.subject import Subject
    from halfstep.plan.target import target_of

    return fake_step(Subject(spec, batch_size), policy, target_of(), finds_growth=finds_growth)
