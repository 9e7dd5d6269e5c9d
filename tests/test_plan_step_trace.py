"""A trace of storages written by hand, and what follows from it."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from halfstep.plan.step_trace import BACKWARD, COMPONENTS, FORWARD, STEP, StepTrace, Storage


def storage(nbytes, born, died, component="activations", module=None):
    return Storage(nbytes, component, FORWARD if born else None, "aten.mm.default", module, "net.py", 1, born, died)


def trace(*storages, num_events=8, **more):
    fields = {
        "storages": storages,
        "num_events": num_events,
        "phases": ((FORWARD, 1), (BACKWARD, 4), (STEP, 7)),
        "batch_size": 2,
        "num_samples": 6,
        "num_parameters": 10,
        "num_trained": 8,
        "policy": "fp32",
    }
    return StepTrace(**fields | more)


WEIGHTS, HIDDEN, OUTPUT = storage(100, 0, None, "weights"), storage(30, 1, 6, module="a"), storage(50, 3, 5, module="b")
TRACE = trace(WEIGHTS, HIDDEN, OUTPUT)


def test_totals_add_what_is_alive_at_each_time():
    assert list(TRACE.totals()) == [
        (0, 100),
        (1, 130),
        (2, 130),
        (3, 180),
        (4, 180),
        (5, 130),
        (6, 100),
        (7, 100),
        (8, 100),
    ]


def test_the_peak_is_the_first_time_of_the_most_bytes_and_names_what_made_it():
    peak = TRACE.peak
    assert (peak.time, peak.nbytes) == (3, 180)
    assert dict(peak.components) == {"weights": 100, "activations": 80}
    assert list(peak.components) == [name for name in COMPONENTS if name in peak.components]
    assert TRACE.born_at(peak.time) is OUTPUT
    assert TRACE.phase_at(peak.time) == FORWARD


def test_a_peak_that_no_birth_of_the_step_made_has_no_maker():
    only = trace(WEIGHTS)
    assert (only.peak.time, only.born_at(only.peak.time)) == (0, None)


@pytest.mark.parametrize(("time", "phase"), [(1, FORWARD), (3, FORWARD), (4, BACKWARD), (6, BACKWARD), (7, STEP)])
def test_each_time_has_the_phase_that_began_before_it(time, phase):
    assert TRACE.phase_at(time) == phase


def test_a_storage_is_alive_from_its_birth_to_before_its_death():
    assert TRACE.alive(2) == [WEIGHTS, HIDDEN]
    assert TRACE.alive(5) == [WEIGHTS, HIDDEN]
    assert TRACE.alive(6) == [WEIGHTS]


def test_totals_and_moments_agree_with_counting_storage_by_storage():
    drawn = random.Random(0)
    times = list(range(1, 201))
    drawn.shuffle(times)
    pairs = [sorted(times[at : at + 2]) for at in range(0, 200, 2)]
    storages = [storage(drawn.randrange(1000), born, died, drawn.choice(COMPONENTS)) for born, died in pairs]
    many = trace(WEIGHTS, *storages, num_events=200)
    for time, total in many.totals():
        plain = sum(s.nbytes for s in many.storages if s.born <= time and (s.died is None or time < s.died))
        assert total == plain == many.at(time).nbytes
    assert many.peak.nbytes == max(total for _, total in many.totals())


# --- other batches -------------------------------------------------------------------------------------------------


def test_growth_is_bytes_a_sample():
    twice = [WEIGHTS, replace(HIDDEN, nbytes=50), replace(OUTPUT, nbytes=100)]
    growth = TRACE.growth_to(replace(TRACE, storages=twice, batch_size=4))
    assert growth == [0, 10, 25]
    larger = replace(TRACE, growth=growth).with_batch(12)
    assert [s.nbytes for s in larger.storages] == [100, 130, 300]
    assert (larger.batch_size, larger.num_samples) == (12, 36)
    assert larger.peak.nbytes == 530


def test_the_same_batch_gives_the_same_trace():
    same = replace(TRACE, growth=(0, 10.5, 25)).with_batch(2)
    assert tuple(same.storages) == TRACE.storages
    assert same.num_samples == TRACE.num_samples


@pytest.mark.parametrize("changed", [(HIDDEN,), (HIDDEN, replace(OUTPUT, died=4)), (HIDDEN, OUTPUT, OUTPUT)])
def test_a_step_that_runs_in_another_way_has_no_growth(changed):
    assert TRACE.growth_to(replace(TRACE, storages=[WEIGHTS, *changed], batch_size=4)) is None
