"""An overflow at the floor of the scale: a diagnosis that can be followed, or a module that goes on in fp32."""

from __future__ import annotations

import copy
import math
import re

import pytest
import torch
from reference.loop import Gate, assert_same
from reference.norm_net import OPTIMIZERS, X, loss_of, net, snapshot
from torch import nn

from halfstep.errors import HalfstepError, ScaleExhausted
from halfstep.stepper import Stepper

pytestmark = pytest.mark.usefixtures("kernels_stay")


class Hot(nn.Module):
    """``hot`` goes beyond fp16 whatever the scale, and is no trouble for fp32.

    where: ``weight``: the gradient of its weight; ``output``: its output; ``input``: the gradient of its input.
    """

    def __init__(self, where="weight"):
        super().__init__()
        torch.default_generator.manual_seed(0)
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
    # With replay the first batch brings the scale down at once and is skipped, since it may be the only one.
    num_skipped = 1 if policy == "fp16 scale.init=8" and form == "closure" else 3
    assert f"the loss scale at its floor of 1, step {num_skipped + 1}" in message
    assert "the gradient of hot.weight is still not finite" in message
    if form == "closure":
        assert "hot makes it (inf) in the backward pass" in message
        assert f"Keep that module in fp32 (policy '{policy} module:hot=fp32')" in message
    assert all(p.grad is None for p in model.parameters())
    assert stepper.scale.value.item() == 1.0


def test_the_advice_of_the_diagnosis_works():
    model = Hot()
    failing = Stepper(model, OPTIMIZERS["adamw"](model.parameters(), 1e-5), "fp16")
    assert not failing.step(lambda: hot_loss(model)).applied
    with pytest.raises(ScaleExhausted) as caught:
        failing.step(lambda: hot_loss(model))
    policy = re.search(r"policy '(.*?)'", str(caught.value)).group(1)
    stepper = Stepper(model, OPTIMIZERS["adamw"](model.parameters(), 1e-5), policy)
    assert all(stepper.step(lambda step=step: hot_loss(model, step)).applied for step in range(5))


def test_a_run_goes_on_after_the_stop_if_the_caller_wants_it():
    model, twin = Hot(), Hot()
    stepper = Stepper(model, OPTIMIZERS["adamw"](model.parameters(), 1e-5), "fp16 scale.init=1", accumulate=2)
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
    # Replay loses no batch. Skipping notices at the floor, to where the scale has to go down step by step first.
    assert len(reports) == {"replay": 1, "skip": 4}[on_overflow]
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


class Masked(nn.Module):
    """``hot`` overflows in the forward pass, and ``gain`` gets a gradient that is finite all the same, and wrong: 0."""

    def __init__(self):
        super().__init__()
        self.hot, self.gain = nn.Linear(8, 1, bias=False), nn.Parameter(torch.ones(()))
        with torch.no_grad():
            self.hot.weight.fill_(2.0**15)

    def forward(self, x):
        h = self.hot(x).float() * 2.0**-17
        return self.gain * (-h).exp() + h.square()


def test_after_a_broken_forward_pass_no_gradient_is_kept():
    model, twin = Masked(), Masked()
    steppers = [
        Stepper(m, torch.optim.SGD(m.parameters(), lr=0.125), policy)
        for m, policy in (
            (model, "fp16 on_exhausted=promote scale.init=1"),
            (twin, "fp16 module:hot=fp32 scale.init=1"),
        )
    ]
    reports = [s.step(lambda m=s.model: m(torch.ones(2, 8)).mean()) for s in steppers]
    assert reports[0].num_replays == 1
    assert reports[0].loss == reports[1].loss
    assert model.gain.item() == twin.gain.item() < 1.0
    assert torch.equal(model.hot.weight, twin.hot.weight)


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
    model[3].where, model[3].value = "gradient", math.inf
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
    with pytest.raises(ScaleExhausted, match="Mend it there, or use bf16 where the device has it") as caught:
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
