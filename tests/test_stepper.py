"""The step against torch's own loop, its two forms, its reports, and what it says of its policy."""

from __future__ import annotations

import gc
import math
import weakref

import pytest
import torch
from reference.plain_net import OPTIMIZERS, POLICIES, assert_same_bits, groups_of, loss_of, net, weights

from halfstep.region import Region
from halfstep.scale import make_scale
from halfstep.stepper import Stepper

pytestmark = pytest.mark.usefixtures("kernels_stay")


# --- order: unscale, clip, step, update ------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("max_norm", [None, 0.3])
@pytest.mark.parametrize("policy", ["fp32 scale=dynamic scale.init=512", "fp16 scale.init=512"])
def test_weights_scale_and_reports_are_those_of_torchs_loop(optimizer, max_norm, policy):
    """GradScaler, unscale_, clip_grad_norm_, step, update in one region of ours, against the stepper."""
    ours, theirs = net(), net()
    stepper = Stepper(
        ours,
        OPTIMIZERS[optimizer](groups_of(ours)),
        f"{policy} scale.interval=4 on_overflow=skip",
        max_norm=max_norm,
    )
    # The first step of torch's fused SGD must not be skipped in torch's own loop: see the test of that fault below.
    bad_steps = (3, 6) if optimizer == "sgd fused" else (0, 6)
    region, opt = Region(theirs, policy), OPTIMIZERS[optimizer](groups_of(theirs))
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0, growth_interval=4)
    for step in range(14):
        for model in (ours, theirs):
            model[2].where, model[2].value = "gradient" if step in bad_steps else "nowhere", math.inf
        report = stepper.step(lambda step=step: loss_of(ours, step))

        with region:
            loss = loss_of(theirs, step)
        with region.backward():
            scaler.scale(loss).backward()
        scaler.unscale_(opt)
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), max_norm or math.inf)
        scale = scaler.get_scale()
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()

        assert report.applied == (step not in bad_steps)
        assert (report.step, report.scale) == (step + 1, scale)
        assert report.loss == (loss.item() if max_norm is None else pytest.approx(loss.item(), rel=1e-2))
        if report.applied:
            assert report.grad_norm == pytest.approx(norm.item(), rel=1e-6 if max_norm is None else 1e-2)
        else:
            assert not math.isfinite(report.grad_norm)
    assert stepper.scale.value.item() == scaler.get_scale()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        if max_norm is None:
            assert torch.equal(a, b)  # every factor is a power of two
        else:
            # Dividing by one factor rounds otherwise than multiplying by two, by 2 ulp of fp32 (2.4e-7) in a step. In
            # fp16 such a weight may round to another of fp16's, whose ulp is 1e-3, in a few of 10 steps of 0.01.
            tolerance = 1e-5 if policy.startswith("fp32") else 1e-3
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("policy", ["fp32", "bf16", "fp16 on_overflow=skip", "fp32 scale=dynamic"])
def test_a_skipped_first_step_of_fused_sgd_leaves_no_garbage_for_momentum(policy):
    """torch's kernel skips and leaves the new momentum buffer uninitialised; a loop with GradScaler trains on it."""
    left, right = net(), net()
    for model, is_bad in ((left, False), (right, True)):
        optimizer = OPTIMIZERS["sgd fused"](model.parameters())
        stepper = Stepper(model, optimizer, policy, max_norm=1.0)
        if is_bad:
            model[2].where = "output"
            poison = [torch.full_like(p, math.nan) for p in model.parameters() for _ in range(8)]
            del poison  # what an allocation may find
            assert not stepper.step(lambda model=model: loss_of(model, 0)).applied
            assert not optimizer.state
            model[2].where = "nowhere"
            stepper.scale.load_state_dict(make_scale(stepper.policy.scale, torch.device("cpu")).state_dict())
        for step in range(3):
            assert stepper.step(lambda step=step, model=model: loss_of(model, step)).applied
    assert_same_bits(weights(left), weights(right))


def test_gradients_are_clipped_by_their_true_norm_and_not_the_scaled_one():
    moved = []
    for policy in ("fp32", "fp32 scale=static scale.init=65536"):
        model = net()
        before = weights(model)
        Stepper(model, torch.optim.SGD(model.parameters(), lr=1.0), policy, max_norm=0.5).step(
            lambda model=model: loss_of(model, 0)
        )
        steps = [a - b for a, b in zip(before, weights(model), strict=True)]
        moved.append(torch.linalg.vector_norm(torch.cat([s.flatten() for s in steps])).item())
    assert moved == pytest.approx([0.5, 0.5], rel=1e-5)


def test_a_gradient_below_max_norm_is_not_touched():
    left, right = net(), net()
    for model, max_norm in ((left, None), (right, 1e4)):
        Stepper(model, OPTIMIZERS["adamw"](model.parameters()), "fp32", max_norm=max_norm).step(
            lambda model=model: loss_of(model, 0)
        )
    assert_same_bits(weights(left), weights(right))


@pytest.mark.parametrize("policy", POLICIES)
def test_each_group_moves_by_its_own_learning_rate_and_a_scheduler_may_change_it(policy):
    model = net()
    optimizer = torch.optim.SGD(groups_of(model), lr=0.5)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda n: 0.5**n, lambda n: 1.0])
    stepper = Stepper(model, optimizer, policy, scheduler=schedule)
    for step in range(3):
        stepper.step(lambda step=step: loss_of(model, step))
    assert [group["lr"] for group in optimizer.param_groups] == [0.5 * 0.5**3, 0.02]


# --- the two forms ---------------------------------------------------------------------------------------------------


def train(model, policy, form, optimizer="adamw", steps=7, accumulate=2, **kwargs):
    stepper = Stepper(model, OPTIMIZERS[optimizer](model.parameters()), policy, accumulate=accumulate, **kwargs)
    reports = []
    for step in range(steps):
        if form == "closure":
            reports.append(stepper.step(lambda step=step: loss_of(model, step)))
        else:
            with stepper.forward():
                loss = loss_of(model, step)
            reports.append(stepper.backward(loss))
    reports.append(stepper.flush())
    return [report.to_dict() for report in reports if report]


@pytest.mark.parametrize("optimizer", ["adamw", "adamw fused", "sgd momentum"])
@pytest.mark.parametrize("policy", POLICIES)
def test_the_form_without_a_closure_gives_the_same_bits(policy, optimizer):
    left, right = net(), net()
    reports = [train(left, policy, "closure", optimizer), train(right, policy, "forward", optimizer)]
    assert reports[0] == reports[1]
    assert len(reports[0]) == 4
    assert_same_bits(weights(left), weights(right))


@pytest.mark.parametrize("policy", POLICIES)
def test_both_forms_mix_in_one_window(policy):
    left, right = net(), net()
    train(left, policy, "closure", steps=2)
    stepper = Stepper(right, OPTIMIZERS["adamw"](right.parameters()), policy, accumulate=2)
    assert stepper.step(lambda: loss_of(right, 0)) is None
    with stepper.forward():
        loss = loss_of(right, 1)
    mixed = stepper.backward(loss)
    left_norm = train(net(), policy, "closure", steps=2)[0]["grad_norm"]
    assert mixed.grad_norm == left_norm
    assert_same_bits(weights(left), weights(right))


@pytest.mark.parametrize("policy", POLICIES)
def test_the_gradient_is_the_users_until_flush(policy):
    """A gradient changed between the last micro-batch and flush is the one that is checked, reported and applied."""
    model = net()
    stepper = Stepper(model, OPTIMIZERS["sgd"](model.parameters()), policy, accumulate=2)
    stepper.step(lambda: loss_of(model, 0))
    before = weights(model)
    model[0].weight.grad[0, 0] = math.nan
    report = stepper.flush()
    assert not report.applied
    assert_same_bits(weights(model), before)


# --- reports ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["adamw", "adamw fused"])
@pytest.mark.parametrize("policy", POLICIES)
def test_reports_kept_for_many_steps_tell_their_own_step(policy, optimizer):
    now, later = [], []
    for read in (True, False):
        model = net()
        stepper = Stepper(model, OPTIMIZERS[optimizer](model.parameters()), f"{policy} scale.interval=2", max_norm=1.0)
        for step in range(9):
            model[2].where = "gradient" if step == 4 and policy != POLICIES[3] else "nowhere"
            report = stepper.step(lambda step=step, model=model: loss_of(model, step))
            later.append(report)
            if read:
                now.append(report.to_dict())
    # NaN is not equal to itself, its text is.
    assert str(now) == str([report.to_dict() | {"nonfinite_share": now[i]["nonfinite_share"]}
                            for i, report in enumerate(later[9:])])  # fmt: skip
    assert str(now) == str([report.to_dict() for report in later[:9]])
    assert [report.step for report in later[:9]] == list(range(1, 10))
    assert len({report.loss for report in later[:9]}) == 9


def test_the_loss_is_the_true_one_and_the_norm_is_before_clipping():
    model = net()
    loss = loss_of(model, 0)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    norm = math.sqrt(sum(float((g.double() ** 2).sum()) for g in gradients))
    report = Stepper(
        model, OPTIMIZERS["sgd"](model.parameters()), "fp32 scale=static scale.init=4096", max_norm=norm / 100
    ).step(lambda: loss_of(model, 0))
    assert report.loss == loss.item()
    assert report.grad_norm == pytest.approx(norm, rel=1e-6)
    assert report.scale == 4096.0


def test_sinks_get_every_report_in_order():
    first, second, model = [], [], net()
    stepper = Stepper(model, OPTIMIZERS["sgd"](model.parameters()), "fp32", sinks=[first.append, second.append])
    reports = [stepper.step(lambda step=step: loss_of(model, step)) for step in range(3)]
    assert first == second == reports


def test_a_report_that_is_kept_does_not_keep_the_model():
    model = net()
    stepper = Stepper(model, OPTIMIZERS["sgd"](model.parameters()), "fp16", max_norm=1.0)
    model[2].where = "output"
    report = stepper.step(lambda: loss_of(model, 0))
    seen = weakref.ref(model)
    model = stepper = None
    gc.collect()
    assert seen() is None
    assert "the loss is nan" in report.reason


# --- requested and effective -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["fp32", "bf16 module:0=fp32", "fp16 scale.init=256"])
def test_info_tells_what_was_asked_for_and_what_is_in_effect(policy):
    model = net()
    stepper = Stepper(model, OPTIMIZERS["sgd"](model.parameters()), policy)
    assert (stepper.info.requested, stepper.info.effective) == (policy, policy)
    assert str(stepper.policy) == policy
    assert stepper.info.device


def test_auto_tells_what_it_chose_and_why():
    model = net()
    info = Stepper(model, OPTIMIZERS["sgd"](model.parameters())).info
    assert info.requested == "auto"
    assert info.effective in ("fp32", "bf16", "fp16")
    assert info.device in info.reason
