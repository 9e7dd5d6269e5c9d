"""A gradient that is not finite: it reaches nothing, it is told, and at the floor of the scale it is diagnosed."""

from __future__ import annotations

import copy
import math
import re

import pytest
import torch
from reference.loop import Gate
from torch import nn

from halfstep.errors import HalfstepError, ScaleExhausted
from halfstep.stepper import Stepper

X = torch.linspace(-2, 2, 96).reshape(12, 8).sin()
Y = X.mean(1, keepdim=True) + 0.5
SKIPPING = ["fp32", "bf16", "fp32 scale=static scale.init=256", "fp16 on_overflow=skip scale.init=1024"]
POLICIES = [*SKIPPING, "fp16 scale.init=1024"]
OPTIMIZERS = {
    "sgd": lambda p, lr=0.05: torch.optim.SGD(p, lr, momentum=0.9),
    "sgd fused": lambda p, lr=0.05: torch.optim.SGD(p, lr, momentum=0.9, fused=True),
    "adamw": lambda p, lr=0.01: torch.optim.AdamW(p, lr),
    "adamw fused": lambda p, lr=0.01: torch.optim.AdamW(p, lr, fused=True),
}


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), Gate(), nn.Linear(16, 1))


def loss_of(model, step=0, x=X):
    return (model(x.roll(step, 0)[:8]) - Y.roll(step, 0)[:8]).square().mean()


def snapshot(stepper):
    """Weights, running statistics and optimizer states, copied."""
    return copy.deepcopy([stepper.model.state_dict(), stepper.optimizer.state_dict()])


def assert_same(left, right, path=""):
    if isinstance(left, torch.Tensor):
        assert torch.equal(left, right), path
    elif isinstance(left, dict):
        assert left.keys() == right.keys(), path
        for key in left:
            assert_same(left[key], right[key], f"{path}/{key}")
    elif isinstance(left, list):
        for i, (a, b) in enumerate(zip(left, right, strict=True)):
            assert_same(a, b, f"{path}/{i}")
    else:
        assert left == right, path


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


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("max_norm", [None, 0.1])
@pytest.mark.parametrize("where", ["gradient", "weight", "output", "batch"])
@pytest.mark.parametrize("policy", SKIPPING)
def test_weights_states_and_statistics_stay_to_the_bit(policy, where, max_norm, optimizer):
    model = net()
    value = {"gradient": math.inf, "weight": -math.inf, "output": math.nan, "batch": math.nan}[where]
    stepper = Stepper(model, OPTIMIZERS[optimizer](model.parameters()), policy, accumulate=2, max_norm=max_norm)
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
    stepper = Stepper(model, OPTIMIZERS["sgd"](model.parameters()), policy, accumulate=2)
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


# --- the floor -------------------------------------------------------------------------------------------------------


class Hot(nn.Module):
    """``hot`` goes beyond fp16 whatever the scale, and is no trouble for fp32.

    where: ``weight``: the gradient of its weight; ``output``: its output; ``input``: the gradient of its input.
    """

    def __init__(self, where="weight"):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh())
        self.hot, self.head = nn.Linear(8, 8, bias=False), nn.Linear(8, 1)
        self.factors = {"weight": (2.0**13, 1.0), "output": (4.0, 2.0**-13), "input": (2.0**-13, 1.0)}[where]
        with torch.no_grad():
            self.hot.weight.fill_(2.0**-13 if where == "weight" else 2.0**13)
            self.head.weight.fill_(1.0)

    def forward(self, x):
        before, after = self.factors
        return self.head(self.hot(self.body(x) * before) * after)


def hot_loss(model, step=0):
    return (model(X.roll(step, 0)).float() - 10).square().sum()


@pytest.mark.parametrize("form", ["closure", "forward"])
@pytest.mark.parametrize("policy", ["fp16 scale.init=8", "fp16 on_overflow=skip scale.init=8"])
def test_at_the_floor_the_run_stops_with_a_diagnosis_and_whole_weights(policy, form):
    model = Hot()
    stepper = Stepper(model, OPTIMIZERS["adamw"](model.parameters(), 1e-5), policy)
    before = snapshot(stepper)
    with pytest.raises(ScaleExhausted) as caught:  # noqa: PT012
        for step in range(10):
            if form == "closure":
                stepper.step(lambda step=step: hot_loss(model, step))
            else:
                with stepper.forward():
                    loss = hot_loss(model, step)
                stepper.backward(loss)
    assert_same(snapshot(stepper), before)
    message = str(caught.value)
    num_skipped = 0 if policy == "fp16 scale.init=8" and form == "closure" else 3
    assert f"the loss scale at its floor of 1, step {num_skipped + 1}" in message
    assert "the gradient of hot.weight is still not finite" in message
    if form == "closure":
        assert "hot makes it (inf) in the backward pass" in message
        assert f"Keep that module in fp32 (policy '{policy} module:hot=fp32')" in message
    assert all(p.grad is None for p in model.parameters())
    assert stepper.scale.value.item() == 1.0


def test_the_advice_of_the_diagnosis_works():
    model = Hot()
    with pytest.raises(ScaleExhausted) as caught:
        Stepper(model, OPTIMIZERS["adamw"](model.parameters(), 1e-5), "fp16").step(lambda: hot_loss(model))
    policy = re.search(r"policy '(.*?)'", str(caught.value)).group(1)
    stepper = Stepper(model, OPTIMIZERS["adamw"](model.parameters(), 1e-5), policy)
    assert all(stepper.step(lambda step=step: hot_loss(model, step)).applied for step in range(5))


def test_a_run_goes_on_after_the_stop_if_the_caller_wants_it():
    model, twin = Hot(), Hot()
    stepper = Stepper(model, OPTIMIZERS["adamw"](model.parameters(), 1e-5), "fp16 scale.init=2", accumulate=2)
    stepper.step(lambda: hot_loss(model) * 1e-4)
    with pytest.raises(ScaleExhausted):
        stepper.step(lambda: hot_loss(model))
    other = Stepper(twin, OPTIMIZERS["adamw"](twin.parameters(), 1e-5), "fp16 scale.init=1", accumulate=2)
    for step in range(2):
        for each in (stepper, other):
            report = each.step(lambda step=step, each=each: hot_loss(each.model, step) * 1e-4)
    assert report.applied
    assert_same(snapshot(stepper), snapshot(other))


@pytest.mark.parametrize("where", ["weight", "output"])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("on_overflow", ["replay", "skip"])
def test_promotion_heals_the_module_at_fault_and_the_run_goes_on(on_overflow, optimizer, accumulate, where):
    model, twin = Hot(where), Hot(where)
    policy = "fp16" + (" on_overflow=skip" if on_overflow == "skip" else "") + " on_exhausted=promote scale.init=4"
    options = {"accumulate": accumulate, "max_norm": 1.0}
    stepper = Stepper(model, OPTIMIZERS[optimizer](model.parameters(), 1e-5), policy, **options)
    before = snapshot(stepper)
    random = torch.get_rng_state()
    reports = []
    while not reports or not reports[-1].applied:
        assert_same(snapshot(stepper), before)
        assert len(reports) < 5
        for step in range(accumulate):
            report = stepper.step(lambda step=step: hot_loss(model, step))
        reports.append(report)
    assert torch.equal(torch.get_rng_state(), random)
    assert model.body[1].num_batches_tracked == accumulate  # not those of replays and of the watched pass
    # Replay loses no batch. Where the forward pass is at fault, the scale has to go down step by step first.
    assert len(reports) == {"weight": {"replay": 1, "skip": 4}, "output": {"replay": 3, "skip": 4}}[where][on_overflow]
    assert stepper.info.requested == policy
    assert stepper.info.effective == str(stepper.policy) == policy.replace("fp16", "fp16 module:hot=fp32")
    assert "hot was promoted to fp32 during the run" in stepper.info.reason

    # What it did is what a run under the policy with the rule does; fp16 has three digits.
    rule = "fp16 module:hot=fp32 scale.init=1"
    other = Stepper(twin, OPTIMIZERS[optimizer](twin.parameters(), 1e-5), rule, **options)
    for step in range(accumulate):
        expected = other.step(lambda step=step: hot_loss(twin, step))
    assert report.loss == pytest.approx(expected.loss, rel=2e-3)
    assert report.grad_norm == pytest.approx(expected.grad_norm, rel=2e-3)
    twin.load_state_dict(model.state_dict())
    other.optimizer.load_state_dict(copy.deepcopy(stepper.optimizer.state_dict()))
    for step in range(2 * accumulate):
        report = stepper.step(lambda step=step: hot_loss(model, step))
        expected = other.step(lambda step=step: hot_loss(twin, step))
    assert_same(snapshot(stepper)[0], snapshot(other)[0])
    assert (report.applied, report.num_replays) == (True, 0)


def test_a_gradient_that_fp16_cannot_carry_on_is_not_healed_by_promoting_its_maker():
    """In fp32 it is finite inside the module, and inf again where the layer before takes it in fp16."""
    model = Hot("input")
    stepper = Stepper(model, OPTIMIZERS["adamw"](model.parameters(), 1e-5), "fp16 on_exhausted=promote scale.init=1")
    before = snapshot(stepper)
    advice = "hot is in fp32 already: keep what it gets its input from in fp32 too, or use bf16"
    with pytest.raises(ScaleExhausted, match=f"hot makes it .inf. in the backward pass. {advice}"):
        stepper.step(lambda: hot_loss(model))
    assert_same(snapshot(stepper), before)
    healed = Stepper(model, OPTIMIZERS["adamw"](model.parameters(), 1e-5), "fp16 module:body*=fp32 module:hot=fp32")
    assert healed.step(lambda: hot_loss(model)).applied


def test_promotion_stops_where_no_module_is_at_fault():
    model = net()
    stepper = Stepper(model, OPTIMIZERS["adamw"](model.parameters(), 1e-5), "fp16 scale.init=1 on_exhausted=promote")
    before = snapshot(stepper)
    x = X.clone()
    x[0, 0] = math.nan
    with pytest.raises(ScaleExhausted, match="the batch makes it"):
        stepper.step(lambda: loss_of(model, 0, x))
    with pytest.raises(ScaleExhausted, match="the loss function makes it"):
        stepper.step(lambda: loss_of(model) * 1e9)
    assert_same(snapshot(stepper), before)
    assert stepper.step(lambda: loss_of(model)).applied


def test_a_module_that_fp32_does_not_heal_is_promoted_once_and_then_it_stops():
    model = net()
    stepper = Stepper(model, OPTIMIZERS["adamw"](model.parameters(), 1e-5), "fp16 scale.init=1 on_exhausted=promote")
    plant(model, "gradient", math.inf)
    with pytest.raises(ScaleExhausted, match=r"3 makes it \(inf\) in the backward pass"):
        stepper.step(lambda: loss_of(model))
    assert stepper.policy.modules == (("3", "fp32"),)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_fused_optimizer_notices_the_floor_within_64_windows(accumulate):
    """Its verdicts stay on the device; the look every 64 windows is the price of never waiting."""
    model = nn.Sequential(nn.Linear(8, 1), Gate())
    stepper = Stepper(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1, fused=True),
        "fp32 scale=dynamic scale.init=1 on_overflow=skip",
        accumulate=accumulate,
    )
    before = snapshot(stepper)[0]
    model[1].where, model[1].value = "gradient", math.inf
    for _ in range(64 * accumulate - 1):
        stepper.step(lambda: model(X).mean())
    with pytest.raises(ScaleExhausted, match=r"floor of 1, step 64: the gradient of 0.weight, 0.bias"):
        stepper.step(lambda: model(X).mean())
    assert_same(snapshot(stepper)[0], before)


def test_a_model_without_parts_gets_advice_that_can_be_followed():
    model = nn.Linear(8, 1)
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp16 scale.init=1")
    with pytest.raises(ScaleExhausted, match="Use bf16 where the device has it") as caught:
        stepper.step(lambda: (model(X) * 1e9).float().square().mean())
    assert "module:" not in str(caught.value)


@pytest.mark.parametrize("num_params", [1, 2, 3, 4, 9])
def test_the_diagnosis_names_at_most_three_parameters(num_params):
    model = nn.Sequential(*[nn.Linear(2, 2, bias=False) for _ in range(num_params)])
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp16 scale.init=1")
    with pytest.raises(HalfstepError) as caught:
        stepper.step(lambda: (model(torch.ones(1, 2)).float() * math.inf).sum())
    names = re.search("the gradient of (.*?) is still", str(caught.value)).group(1)
    expected = ", ".join(f"{i}.weight" for i in range(min(3, num_params)))
    assert names == expected + (f" and {num_params - 3} more" if num_params > 3 else "")
