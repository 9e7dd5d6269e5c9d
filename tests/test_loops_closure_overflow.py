"""Evaluations that are not finite: one that overflows runs again, and a step that no scale mends leaves no trace."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from reference.closure_net import OPTIMIZERS, loss_of, make, sgd, state_of
from reference.loop import Gate, assert_same
from reference.nets import CPU
from torch import nn

from halfstep.errors import ScaleExhausted
from halfstep.stepper import Stepper

pytestmark = pytest.mark.usefixtures("kernels_stay")


# --- overflow: the evaluation runs again -----------------------------------------------------------------------------


@pytest.mark.parametrize("where", range(4))
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_evaluation_that_overflows_runs_again_and_nothing_shows_but_the_scale(optimizer, where):
    """The gate lets no gradient above its limit pass in one evaluation, so that it takes two halvings."""

    def run(scale, limited):
        stepper = make(optimizer, f"fp16 scale.init={scale}", max_norm=0.3)
        gate, calls, reports = stepper.model[3], [], []

        def closure(step):
            # The masks of dropout count the evaluations: a replay draws the same one.
            loss = loss_of(stepper.model, step)
            calls.append(1)
            gate.limit = limit if limited and len(calls) - 1 in range(where, where + 3) else None
            return loss

        limit = 0.0
        if limited:
            probe = run(scale, False)[3]
            limit = probe[where] / 3
        torch.default_generator.manual_seed(5)
        largest = []
        gate.register_full_backward_hook(lambda *_: largest.append(gate.largest))
        for step in range(3):
            reports.append(stepper.step(lambda s=step: closure(s)))
        return stepper, reports, len(calls), largest

    stepper, reports, num_calls, _ = run(2**14, True)
    twin, expected, expected_calls, _ = run(2**12, False)
    assert sum(report.num_replays for report in reports) == num_calls - expected_calls == 2
    assert all(report.applied for report in reports)
    assert stepper.scale.value.item() == 2.0**12
    assert_same(state_of(stepper), state_of(twin))
    for report, other in zip(reports, expected, strict=True):
        assert (report.loss, report.grad_norm) == (other.loss, other.grad_norm)


def test_a_true_overflow_of_fp16_is_told_to_the_sinks():
    heard = []
    stepper = make("sam sgd", "fp16 scale.init=65536", sinks=[heard.append])
    report = stepper.step(lambda: loss_of(stepper.model, 0, 1000.0))
    assert report.applied
    assert report.num_replays == len(heard) - 1 > 0
    assert {(event.step, event.micro_batch) for event in heard[:-1]} == {(1, 0)}
    assert heard[-1] is report
    assert math.isfinite(report.loss)
    assert math.isfinite(report.grad_norm)


# --- an evaluation that no scale mends: the step leaves no trace -----------------------------------------------------


@pytest.mark.parametrize("policy", ["fp32", "bf16", "fp16 scale.init=1024", "fp16 on_overflow=skip scale.init=1024"])
@pytest.mark.parametrize("what", ["output", "gradient"])
@pytest.mark.parametrize("which", [0, 1, 3])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_step_with_an_evaluation_that_is_not_finite_is_undone(optimizer, which, what, policy):
    if optimizer.startswith("sam") and which == 3:
        pytest.skip("it has two evaluations")
    advanced = []
    stepper = make(optimizer, policy, scheduler=None, on_applied=advanced.append)
    gate = stepper.model[3]
    for step in range(2):
        stepper.step(lambda s=step: loss_of(stepper.model, s))
    before, scale = state_of(stepper), stepper.scale.value.item()
    seen = []

    def closure():
        if not seen or seen[-1] != "bad":  # a replay of the bad one is bad as well
            seen.append("bad" if len(seen) == which else "good")
        gate.where = what if seen[-1] == "bad" else "nowhere"
        return loss_of(stepper.model, 2)

    report = stepper.step(closure)
    gate.where = "nowhere"
    assert (report.applied, report.step) == (False, 3)
    assert report.nonfinite_share > 0
    assert ("no loss scale mends" in report.reason) == (what == "output")
    assert_same(state_of(stepper), before)
    assert len(advanced) == 2
    assert all(p.grad is None for p in stepper.model.parameters())
    assert stepper.scale.value.item() == (scale / 2 if "fp16" in policy else 1.0)
    # The next one is as if it had never been.
    twin = make(optimizer, policy)
    for step in range(2):
        twin.step(lambda s=step: loss_of(twin.model, s))
    for each in (stepper, twin):
        torch.default_generator.manual_seed(9)
        assert each.step(lambda each=each: loss_of(each.model, 3)).applied
    assert_same(state_of(stepper), state_of(twin))


@pytest.mark.parametrize("where", ["output", "gradient"])
@pytest.mark.parametrize("policy", ["bf16", "fp16 scale.init=1024"])
@pytest.mark.parametrize("raises", [KeyboardInterrupt, RuntimeError])
def test_an_exception_in_the_second_evaluation_undoes_the_step(raises, policy, where):
    """A sharpness-aware step that stops in between has its perturbation in the weights."""
    stepper, calls = make("sam sgd", policy), []
    stepper.step(lambda: loss_of(stepper.model))
    before = state_of(stepper)
    gate = stepper.model[3]

    def closure():
        calls.append(1)
        if len(calls) == 2:
            gate.where, gate.raises = where, raises
        return loss_of(stepper.model)

    with pytest.raises(raises):
        stepper.step(closure)
    gate.where, gate.raises = "nowhere", None
    assert_same(state_of(stepper), before)
    assert all(p.grad is None for p in stepper.model.parameters())
    assert stepper.step(lambda: loss_of(stepper.model)).applied


def test_running_statistics_count_each_evaluation_once_and_none_of_an_undone_step():
    torch.default_generator.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), Gate(), nn.Linear(8, 1))
    stepper = Stepper(model, sgd(model.parameters()), "fp16 scale.init=65536", hardware=CPU)
    report = stepper.step(lambda: loss_of(model, 0, 300.0))
    assert report.num_replays > 0
    assert model[1].num_batches_tracked.item() == 2
    before = copy.deepcopy(model[1].state_dict())
    calls = []

    def closure():
        calls.append(1)
        model[2].where = "output" if len(calls) == 2 else "nowhere"
        return loss_of(model)

    assert not stepper.step(closure).applied
    assert_same(model[1].state_dict(), before)


def test_a_scale_exhausted_in_the_second_evaluation_stops_with_the_weights_of_the_last_applied_step():
    """In a row: a step whose second evaluation is good at no scale, and one whose first is not either."""
    heard = []
    stepper = make("sam sgd", "fp16 scale.init=2", sinks=[heard.append])
    stepper.step(lambda: loss_of(stepper.model))
    before = state_of(stepper)
    gate = stepper.model[3]
    calls = []

    def closure():
        calls.append(1)
        gate.where = "gradient" if len(calls) > 1 else "nowhere"
        return loss_of(stepper.model)

    assert not stepper.step(closure).applied  # one may be a bad batch
    assert [event.step for event in heard] == [1, 2, 2]  # the replay of an evaluation belongs to its step
    with pytest.raises(
        ScaleExhausted, match=r"step 3: the gradient of 0\.weight, 0\.bias is still not finite; 3 makes"
    ):
        stepper.step(closure)
    assert_same(state_of(stepper), before)
