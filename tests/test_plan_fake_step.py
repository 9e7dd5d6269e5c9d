"""A step on fake tensors: closed forms of its memory, its places, and an independent count."""

from __future__ import annotations

import contextlib
import gc
from collections import Counter

import pytest
import torch
from reference.plan_workloads import DEPTH, WIDTH, spec
from torch.distributed._tools.mem_tracker import MemTracker

from halfstep.errors import HalfstepError
from halfstep.plan.fake_step import fake_step, start
from halfstep.plan.step_trace import BACKWARD, FORWARD, STEP
from halfstep.plan.subject import Subject
from halfstep.plan.target import target_of

pytestmark = pytest.mark.usefixtures("kernels_stay")
CUDA, CPU = target_of(), target_of("cpu")
NUM_PARAMETERS = DEPTH * (WIDTH * WIDTH + WIDTH) + 4 * WIDTH + 4
NUM_TENSORS = 2 * (DEPTH + 1)
LARGEST = WIDTH * WIDTH
SCALARS = 16 * NUM_TENSORS + 256
"""Bytes that a step's norms, verdict and divisors may take: a few numbers, and one a tensor."""


@pytest.fixture(scope="module", autouse=True)
def _collects_fast():
    """Each window begins with a garbage collection, which would go through all that torch has imported."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def traced(name, policy="fp32", target=CUDA, **more):
    return fake_step(Subject(spec(name), **more), policy, target)


def lives(trace):
    return [(s.nbytes, s.component, s.op, s.module, s.born, s.died) for s in trace.storages]


def fullest(trace, phase):
    """The moment of ``phase`` with most bytes."""
    return trace.at(max((total, -time) for time, total in trace.totals() if trace.phase_at(time) == phase)[1] * -1)


# --- closed forms --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("optimizer", "num_states", "temporaries"),
    [
        ("adamw_fused", 2, 0),
        ("adamw_foreach", 2, 4 * NUM_PARAMETERS),  # the list of denominators
        ("adamw_loop", 2, 2 * 4 * LARGEST),  # a root and its quotient, of one tensor at a time
        ("amsgrad", 3, 4 * NUM_PARAMETERS),  # a card's default is foreach
        ("momentum", 1, 0),
        ("sgd", 0, 0),
    ],
)
def test_an_optimizer_step_holds_weights_gradients_states_and_its_temporaries(optimizer, num_states, temporaries):
    trace = traced(optimizer)
    held = fullest(trace, STEP).components
    assert trace.num_parameters == NUM_PARAMETERS
    assert held["weights"] == held["gradients"] == 4 * NUM_PARAMETERS
    counters = 4 * NUM_TENSORS if num_states > 1 else 0  # Adam counts the steps of each tensor
    assert held.get("optimizer states", 0) == num_states * 4 * NUM_PARAMETERS + counters
    # Decay of SGD is a list of the size of the gradients.
    temporaries += 4 * NUM_PARAMETERS if optimizer == "momentum" else 0
    assert 0 <= held["step temporaries"] - temporaries < SCALARS


@pytest.mark.parametrize(
    ("policy", "weight_bytes", "rest_bytes"),
    [("bf16", 4, 0), ("bf16 master=split16", 2, 2), ("bf16 master=split8", 2, 1), ("bf16 master=stochastic", 2, 0)],
)
def test_weights_and_rests_have_the_bytes_of_their_layout(policy, weight_bytes, rest_bytes):
    num_matrix = DEPTH * WIDTH * WIDTH + 4 * WIDTH
    held = traced("adamw_fused", policy).at(0).components
    assert held["weights"] == weight_bytes * num_matrix + 4 * (NUM_PARAMETERS - num_matrix)
    assert held.get("master weights", 0) == rest_bytes * num_matrix


def test_16_bit_weights_are_two_bytes_for_each_weight_that_meets_a_product():
    trace = traced("adamw_fused", "bf16")
    casts = [s for s in trace.storages if s.component == "16-bit weights"]
    assert sum(s.nbytes for s in casts) == 2 * NUM_PARAMETERS
    assert {s.phase for s in casts} == {FORWARD}


def test_inputs_are_the_batch():
    assert traced("sgd", batch_size=7).peak.components["inputs"] == 7 * (4 * WIDTH + 8)


# --- phases and places ---------------------------------------------------------------------------------------------


def test_a_window_has_its_phases_in_order():
    for name, num_micro_batches in (("sgd", 1), ("accumulated", 3)):
        phases = [phase for phase, _ in traced(name).phases]
        # A batch arrives between two steps.
        assert phases == [STEP, FORWARD, BACKWARD] * num_micro_batches + [STEP]


def test_the_peak_names_the_module_that_makes_a_huge_tensor():
    trace = traced("large")
    huge = max(trace.alive(trace.peak.time), key=lambda s: s.nbytes)
    assert huge.module == "large"
    assert huge.nbytes == 500 * 6 * WIDTH * 4
    assert huge.file.endswith("plan_workloads.py")


def test_checkpointing_keeps_fewer_activations_and_recomputes_within_backward():
    trace = traced("checkpointed")
    again = [s for s in trace.storages if s.phase == BACKWARD and s.op == "aten.gelu.default"]
    assert {s.module for s in again} == {f"blocks.{at}.1" for at in range(DEPTH)}
    assert not any(s.op == "aten.gelu.default" and s.component == "activations" for s in trace.storages)


def test_a_parameter_that_gets_no_gradient_has_no_states():
    trace = traced("unused", target=CPU)
    states = Counter(s.nbytes for s in trace.storages if s.component == "optimizer states")
    assert 4 * 5 * WIDTH * WIDTH not in states
    assert states[4 * WIDTH * WIDTH] == 2 * DEPTH


# --- the same trace ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "policy"), [("language", "bf16"), ("conv", "fp16")])
def test_two_traces_are_equal(name, policy):
    assert traced(name, policy) == traced(name, policy)


@pytest.mark.parametrize(
    ("workload", "policy"),
    [
        ("charlm", "bf16"),
        ("mlp", "fp32"),
        (spec("accumulated"), "bf16 master=split16"),
        (spec("checkpointed"), "fp16"),
        (spec("conv"), "bf16"),
    ],
)
def test_the_trace_of_another_batch_follows_from_two(workload, policy):
    """All but that of a single sample, of which torch takes some copies for views."""
    grown = fake_step(Subject(workload), policy, CUDA, finds_growth=True)
    real = fake_step(Subject(workload, 21), policy, CUDA)
    assert grown.with_batch(21).peak == real.peak
    assert lives(grown.with_batch(21)) == lives(real)
    assert grown.with_batch(grown.batch_size).peak == grown.peak


# --- an independent count ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "policy"), [("adamw_fused", "bf16"), ("language", "fp32"), ("clipped", "bf16")])
def test_torchs_own_tracker_counts_the_same(name, policy):
    """MemTracker follows the same run by hooks of its own; what a Stepper holds it is told."""
    run = start(Subject(spec(name)), policy, CPU)
    run.window(contextlib.nullcontext)
    tracker = MemTracker()
    tracker.track_external(run.stepper.model, run.stepper.optimizer, run.stepper.scale.value)
    run.window(lambda: tracker, held=lambda batch: tracker.track_external(*batch))
    snapshot = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
    assert snapshot["Total"] == traced(name, policy, CPU).peak.nbytes


# --- what cannot be planned ----------------------------------------------------------------------------------------


def test_a_model_that_keeps_more_with_every_step_is_refused():
    with pytest.raises(HalfstepError, match="left something new in memory"):
        traced("hoarding")


def test_lbfgs_is_refused():
    with pytest.raises(HalfstepError, match="depends on values, which a plan does not have"):
        fake_step(Subject(spec("lbfgs")), "fp32", CPU)
