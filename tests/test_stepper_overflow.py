"""A gradient that is not finite: it reaches nothing, it is told, and only applied steps count."""

from __future__ import annotations

import math

import pytest
import torch
from reference.loop import Gate, assert_same
from reference.norm_net import OPTIMIZERS, X, loss_of, net, snapshot
from torch import nn

from halfstep.stepper import Stepper

pytestmark = pytest.mark.usefixtures("kernels_stay")

SKIPPING = ["fp32", "bf16", "fp32 scale=static scale.init=256", "fp16 on_overflow=skip scale.init=1024"]
POLICIES = [*SKIPPING, "fp16 scale.init=1024"]


def plant(model, where, value):
    """One bad value in the gradient or the output of a layer, in the gradient of one weight, or in the batch."""
    model[3].where, model[3].value = where if where in ("output", "gradient") else "nowhere", value
    if where == "weight":
        handle = model[4].weight.register_hook(lambda g: g.index_fill(1, torch.tensor([5]), value))
        return X, handle.remove
    if where == "batch":
        x = X.clone()
        x[2, 3] = value
        return x, lambda: None
    return X, lambda: setattr(model[3], "where", "nowhere")


# --- it reaches nothing ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("optimizer", "max_norm"), [("sgd", None), ("sgd fused", 0.1), ("adamw", 0.1), ("adamw fused", None)]
)
@pytest.mark.parametrize("where", ["gradient", "weight", "output", "batch"])
@pytest.mark.parametrize("policy", SKIPPING)
def test_weights_states_and_statistics_stay_to_the_bit(policy, where, max_norm, optimizer):
    model = net()
    value = {"gradient": math.inf, "weight": -math.inf, "output": math.nan, "batch": math.nan}[where]
    stepper = Stepper(
        model, OPTIMIZERS[optimizer](model.parameters()), policy, accumulate=2, max_norm=max_norm, keep_casts=True
    )
    for step in range(4):
        stepper.step(lambda step=step: loss_of(model, step))
    before = snapshot(stepper)
    stepper.step(lambda: loss_of(model, 4))
    x, remove = plant(model, where, value)
    report = stepper.step(lambda: loss_of(model, 5, x))
    remove()
    assert_same(snapshot(stepper), before)
    assert not report.applied
    assert report.nonfinite_share > 0
    cause = "the loss is nan: a fault of the forward pass" if where in ("output", "batch") else "the gradient norm is"
    assert cause in report.reason
    assert all(p.grad is None for p in model.parameters())
    stepper.step(lambda: loss_of(model, 6))
    assert stepper.step(lambda: loss_of(model, 7)).applied
    assert all(torch.isfinite(t).all() for t in model.state_dict().values())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("policy", POLICIES)
def test_the_very_first_step_may_be_bad(policy, optimizer):
    left, right = net(), net()
    stepper = Stepper(left, OPTIMIZERS[optimizer](left.parameters()), policy)
    _, remove = plant(left, "output", math.nan)
    assert not stepper.step(lambda: loss_of(left)).applied
    remove()
    # A power of two lower changes no bit; the twin never saw the bad batch.
    twin = Stepper(right, OPTIMIZERS[optimizer](right.parameters()), policy)
    for step in range(3):
        for each in (stepper, twin):
            assert each.step(lambda step=step, each=each: loss_of(each.model, step)).applied
    assert_same(snapshot(stepper), snapshot(twin))


def test_a_skipped_step_of_a_fused_optimizer_counts_no_step():
    model = net()
    stepper = Stepper(model, OPTIMIZERS["adamw fused"](model.parameters()), "fp32")
    stepper.step(lambda: loss_of(model))
    plant(model, "gradient", math.inf)
    stepper.step(lambda: loss_of(model))
    assert {state["step"].item() for state in stepper.optimizer.state.values()} == {1.0}


@pytest.mark.parametrize("policy", POLICIES)
def test_statistics_of_a_clean_window_are_kept_and_counted_once(policy):
    model = net()
    stepper = Stepper(model, OPTIMIZERS["sgd"](model.parameters()), policy, accumulate=2, keep_casts=True)
    for step in range(4):
        stepper.step(lambda step=step: loss_of(model, step))
    assert model[1].num_batches_tracked == 4
    assert not torch.equal(model[1].running_mean, torch.zeros(16))


def test_the_share_of_bad_elements_is_that_of_the_gradient():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), Gate())
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32")
    model[0].weight.register_hook(lambda g: torch.tensor([[math.inf, math.nan, 1.0, 1.0]] + [[0.0] * 4] * 3))
    assert stepper.step(lambda: model(torch.ones(1, 4)).sum()).nonfinite_share == 2 / 16


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_clipping_does_not_spread_a_bad_value(value):
    """One inf would turn every other clipped gradient to 0, one NaN to NaN."""
    model = net()
    stepper = Stepper(model, OPTIMIZERS["adamw"](model.parameters()), "fp32", max_norm=1e-3)
    before = snapshot(stepper)
    plant(model, "gradient", value)
    report = stepper.step(lambda: loss_of(model))
    assert not report.applied
    assert not math.isfinite(report.grad_norm)
    assert_same(snapshot(stepper), before)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_gradients_whose_norm_fp32_cannot_hold_are_skipped(optimizer):
    """Each element is finite; their sum of squares is not, and the weights would leave the range of fp32."""
    model = nn.Sequential(nn.Linear(2, 1, bias=False))
    stepper = Stepper(model, OPTIMIZERS[optimizer](model.parameters()), "fp32", max_norm=1.0)
    before = snapshot(stepper)[0]
    assert not stepper.step(lambda: model(torch.full((1, 2), 1.5e19)).sum() * 2).applied
    assert_same(snapshot(stepper)[0], before)


# --- who advances ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("policy", POLICIES)
def test_scheduler_and_hook_advance_on_applied_steps_alone(policy, optimizer):
    model, told = net(), []
    opt = OPTIMIZERS[optimizer](model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(opt, 1, gamma=0.5)
    stepper = Stepper(model, opt, policy, scheduler=schedule, on_applied=told.append)
    applied = []
    for step in range(9):
        # A growing scale, which changes on clean steps too, must not be taken for a skip.
        _, remove = plant(model, "output" if step in (0, 3, 4) else "nowhere", math.nan)
        applied.append(stepper.step(lambda step=step: loss_of(model, step)))
        remove()
    assert [report.applied for report in applied] == [step not in (0, 3, 4) for step in range(9)]
    assert schedule.last_epoch == 6
    assert told == [report for report in applied if report.applied]
    assert opt.param_groups[0]["lr"] == pytest.approx((0.05 if "sgd" in optimizer else 0.01) * 0.5**6)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_growing_scale_is_no_skip(optimizer):
    model, told = net(), []
    stepper = Stepper(
        model,
        OPTIMIZERS[optimizer](model.parameters()),
        "fp32 scale=dynamic scale.init=2 scale.interval=1",
        on_applied=told.append,
    )
    reports = [stepper.step(lambda step=step: loss_of(model, step)) for step in range(5)]
    assert [report.scale for report in reports] == [2.0, 4.0, 8.0, 16.0, 32.0]
    assert told == reports


def test_an_ema_in_the_hook_sees_the_weights_of_the_step():
    model, seen = net(), []
    stepper = Stepper(
        model,
        OPTIMIZERS["sgd"](model.parameters()),
        "fp32",
        on_applied=lambda report: seen.append(model[0].weight.detach().clone()),
    )
    for step in range(3):
        stepper.step(lambda step=step: loss_of(model, step))
        assert torch.equal(seen[-1], model[0].weight)


# --- the scale in a run ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["adamw", "adamw fused"])
def test_hysteresis_tolerates_isolated_overflows(optimizer):
    model = net()
    policy = "fp32 scale=dynamic scale.init=64 scale.hysteresis=2 on_overflow=skip"
    stepper = Stepper(model, OPTIMIZERS[optimizer](model.parameters()), policy)
    scales = []
    for step in range(10):
        _, remove = plant(model, "gradient" if step in (1, 3, 6, 7, 8) else "nowhere", math.inf)
        scales.append(stepper.step(lambda step=step: loss_of(model, step)).scale)
        remove()
    # The report shows the scale that its step ran with: step 7 lowers it for 8, and 8 once more for 9.
    assert scales == [64.0] * 8 + [32.0, 16.0]


@pytest.mark.parametrize("optimizer", ["adamw", "adamw fused"])
def test_a_static_scale_never_moves_and_never_stops_the_run(optimizer):
    model = net()
    stepper = Stepper(model, OPTIMIZERS[optimizer](model.parameters()), "fp32 scale=static scale.init=64")
    plant(model, "gradient", math.inf)
    reports = [stepper.step(lambda step=step: loss_of(model, step)) for step in range(70)]
    assert {(report.scale, report.applied) for report in reports} == {(64.0, False)}


@pytest.mark.parametrize("policy", ["fp32", "bf16"])
def test_without_a_scale_bad_steps_are_skipped_for_as_long_as_they_come(policy):
    model = net()
    stepper = Stepper(model, OPTIMIZERS["adamw fused"](model.parameters()), policy)
    before = snapshot(stepper)[0]
    plant(model, "gradient", math.nan)
    assert not any(stepper.step(lambda step=step: loss_of(model, step)).applied for step in range(70))
    assert_same(snapshot(stepper)[0], before)
