"""Optimizers that evaluate the loss themselves: LBFGS, and sharpness-aware ones with their two passes."""

from __future__ import annotations

import copy

import pytest
import torch
from reference.closure_net import OPTIMIZERS, Sam, X, Y, loss_of, make, net, state_of
from reference.loop import assert_same
from reference.nets import CPU

from halfstep.errors import HalfstepError
from halfstep.region import Region
from halfstep.stepper import Stepper

pytestmark = pytest.mark.usefixtures("kernels_stay")


# --- the same bits as the loop written by hand -----------------------------------------------------------------------


def by_hand(model, optimizer, policy, num_steps, max_norm=None, scale=1.0):
    """The loop written out: each evaluation has its scaled backward pass, is divided by the scale, and clipped.

    Clipping divides as the step does; torch multiplies with the reciprocal, which rounds once more.
    """
    region = Region(model, policy, CPU)
    losses, norms = [], []
    for step in range(num_steps):

        def closure(step=step):
            optimizer.zero_grad()
            with region:
                loss = loss_of(model, step)
            with region.backward():
                (loss * scale).backward()
            for p in model.parameters():
                p.grad /= scale
            norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
            if max_norm is not None:
                for p in model.parameters():
                    p.grad /= ((norm + 1e-6) / max_norm).clamp(min=1.0)
            losses.append(loss.item())
            norms.append(norm.item())
            return loss

        if isinstance(optimizer, Sam):
            closure()
        optimizer.step(closure)
    return losses, norms


@pytest.mark.parametrize("max_norm", [None, 0.05])
@pytest.mark.parametrize("policy", ["fp32", "bf16", "fp16 scale.init=1024", "fp16 on_overflow=skip scale.init=1024"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_it_is_the_loop_written_by_hand(optimizer, policy, max_norm):
    """Dropout draws a new mask in each evaluation, in both; a scale of a power of two rounds nothing."""
    stepper = make(optimizer, policy, max_norm=max_norm)
    torch.default_generator.manual_seed(5)
    reports = [stepper.step(lambda s=step: loss_of(stepper.model, s)) for step in range(4)]
    model = net()
    twin = OPTIMIZERS[optimizer](model.parameters())
    torch.default_generator.manual_seed(5)
    scale = 1024.0 if "fp16" in policy else 1.0
    losses, norms = by_hand(model, twin, policy, 4, max_norm, scale)
    for p, other in zip(stepper.model.parameters(), model.parameters(), strict=True):
        assert torch.equal(p, other)
    assert_same(stepper.optimizer.state_dict()["state"], twin.state_dict()["state"])
    assert all(report.applied and report.num_replays == 0 and report.nonfinite_share == 0 for report in reports)
    assert (reports[0].loss, reports[0].scale) == (losses[0], scale)
    # torch's norm of norms and ours add the squares alike; the twin divides before it, which a power of two allows.
    assert reports[0].grad_norm == norms[0]
    if optimizer != "plain":  # without a line search, LBFGS takes the noise of dropout for curvature
        assert reports[-1].loss < reports[0].loss


def test_lbfgs_under_fp32_is_the_loop_of_torchs_manual():
    """Nothing of ours in the twin: zero_grad, loss, backward."""
    stepper = make("wolfe", "fp32")
    model = net()
    twin = OPTIMIZERS["wolfe"](model.parameters())
    for each in (stepper.model, model):
        each[2].p = 0.0
    for step in range(6):

        def closure(step=step):
            twin.zero_grad()
            loss = loss_of(model, step)
            loss.backward()
            return loss

        twin.step(closure)
        stepper.step(lambda s=step: loss_of(stepper.model, s))
    for p, other in zip(stepper.model.parameters(), model.parameters(), strict=True):
        assert torch.equal(p, other)
    assert stepper.optimizer.state_dict()["state"][0]["func_evals"] == twin.state_dict()["state"][0]["func_evals"] > 20


def test_lbfgs_sees_a_loss_in_fp64_with_all_its_digits():
    results = []
    for ours in (True, False):
        model = net().double()
        model[2].p = 0.0
        optimizer = torch.optim.LBFGS(model.parameters(), line_search_fn="strong_wolfe")
        seen = []

        def loss(model=model):
            return (model(X.double()) - Y.double()).square().mean()

        def closure(optimizer=optimizer, loss=loss, seen=seen):
            optimizer.zero_grad()
            value = loss()
            value.backward()
            seen.append(value.item())
            return value

        if ours:
            stepper = Stepper(model, optimizer, "fp32", hardware=CPU)
            for _ in range(5):
                report = stepper.step(loss)
        else:
            for _ in range(5):
                seen.clear()
                optimizer.step(closure)
            assert report.loss == seen[0]
        results.append([p.detach().clone() for p in model.parameters()])
    assert_same(*results)


def test_a_sum_and_its_count_are_the_mean():
    steppers = [make("wolfe", "fp16 scale.init=1024") for _ in range(2)]
    for stepper in steppers:
        stepper.model[2].p = 0.0
    for step in range(4):
        mean = steppers[0].step(lambda s=step: loss_of(steppers[0].model, s))
        total = steppers[1].step(lambda s=step: (loss_of(steppers[1].model, s, 16.0), torch.tensor(16)))
        assert mean.loss == total.loss
        assert mean.grad_norm == total.grad_norm
    assert_same(state_of(steppers[0]), state_of(steppers[1]))


def test_an_evaluation_that_the_optimizer_begins_with_is_not_run_twice():
    stepper, calls = make("plain", "bf16"), []
    stepper.step(lambda: calls.append(1) or loss_of(stepper.model))
    assert len(calls) == stepper.optimizer.state_dict()["state"][0]["func_evals"] == 4
    stepper, calls = make("sam sgd", "bf16"), []
    stepper.step(lambda: calls.append(1) or loss_of(stepper.model))
    assert len(calls) == 2


def test_the_state_in_between_resumes_to_the_bit():
    steppers = [make("wolfe", "fp16 scale.init=1024 scale.interval=2") for _ in range(2)]
    for stepper in steppers:
        stepper.model[2].p = 0.0
    for step in range(3):
        steppers[0].step(lambda s=step: loss_of(steppers[0].model, s))
    steppers[1].model.load_state_dict(steppers[0].model.state_dict())
    steppers[1].optimizer.load_state_dict(copy.deepcopy(steppers[0].optimizer.state_dict()))
    steppers[1].load_state_dict(steppers[0].state_dict())
    for stepper in steppers:
        report = stepper.step(lambda s=stepper: loss_of(s.model, 7))
    assert report.step == 4
    assert_same(state_of(steppers[0]), state_of(steppers[1]))


# --- which optimizers, and what is refused ---------------------------------------------------------------------------


def test_an_optimizer_that_hides_its_need_is_told_to_get_one():
    class Quiet(torch.optim.SGD):
        def step(self, closure=None):
            assert closure is not None
            loss = closure()
            super().step()
            return loss

    model, calls = net(), []
    optimizer = Quiet(model.parameters(), lr=0.1)
    stepper = Stepper(model, optimizer, "bf16", passes_closure=True, hardware=CPU)
    assert stepper.step(lambda: calls.append(1) or loss_of(model)).applied
    assert len(calls) == 1  # the one that was there already


def test_an_ordinary_optimizer_may_be_passed_one_and_steps_the_same():
    results = []
    for passes in (True, None):
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        stepper = Stepper(model, optimizer, "fp16 scale.init=1024", passes_closure=passes, max_norm=0.1, hardware=CPU)
        for step in range(3):
            stepper.step(lambda s=step, m=model: loss_of(m, s))
        results.append(state_of(stepper))
    assert_same(*results)


def test_what_is_refused():
    with pytest.raises(HalfstepError, match=r"accumulate=2 with LBFGS: .* Use accumulate=1"):
        make("plain", "fp32", accumulate=2)
    with pytest.raises(HalfstepError, match=r"master=split16 with LBFGS: .* Leave master out"):
        make("plain", "bf16 master=split16")
    stepper = make("plain", "fp32")
    with pytest.raises(HalfstepError, match=r"without a closure and with LBFGS: .* Use stepper.step"):
        stepper.forward()
    assert stepper.flush() is None
