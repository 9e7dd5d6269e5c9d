"""Several models and optimizers of one Accelerator: they share region and loss scale, and each ends its own windows."""

import pytest
import torch
import torch.nn.functional as F
from accelerated import accelerator_for, fresh_state, weights
from torch import nn

import halfstep
from halfstep import HalfstepError


@pytest.fixture(autouse=True)
def _state():
    with fresh_state():
        yield


def nets():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8)), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def batches(num):
    torch.manual_seed(1)
    return [(torch.randn(16, 8), torch.randn(16, 4)) for _ in range(num)]


def loss_of_d(g, d, real, noise):
    return F.softplus(-d(real)).mean() + F.softplus(d(g(noise).detach())).mean()


def loss_of_g(g, d, noise):
    return F.softplus(-d(g(noise))).mean()


def by_hand(policy, num, scale, clip=None):
    """Plain torch, each call in a region of its own: each optimizer by the gradient of its own loss."""
    g, d = nets()
    region = halfstep.Region(nn.ModuleList([d, g]), policy)

    def called(model):
        def call(x):
            with region:
                return model(x).float()

        return call

    for real, noise in batches(num):
        for loss_fn, model, optimizer in (
            (lambda real=real, noise=noise: loss_of_d(called(g), called(d), real, noise), d, sgd(d)),
            (lambda noise=noise: loss_of_g(called(g), called(d), noise), g, sgd(g)),
        ):
            loss = loss_fn()
            parameters = list(model.parameters())
            with region.backward():
                gradients = torch.autograd.grad(loss * scale, parameters)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient / scale
            if clip:
                nn.utils.clip_grad_norm_(parameters, clip)
            optimizer.step()
    return g, d


@pytest.mark.parametrize("together", [True, False], ids=["one prepare", "two"])
@pytest.mark.parametrize("policy", ["fp32", "bf16", "fp16 scale.init=1024 on_overflow=skip"])
def test_a_gan(policy, together):
    g, d = nets()
    accelerator = accelerator_for(policy)
    if together:
        d, d_optimizer, g, g_optimizer = accelerator.prepare(d, sgd(d), g, sgd(g))
    else:
        d, d_optimizer = accelerator.prepare(d, sgd(d))
        g, g_optimizer = accelerator.prepare(g, sgd(g))
    for real, noise in batches(3):
        loss = loss_of_d(g, d, real, noise)
        d_optimizer.zero_grad()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(d.parameters(), 0.3)
        d_optimizer.step()
        assert d_optimizer.report.loss == loss.item()
        loss = loss_of_g(g, d, noise)
        g_optimizer.zero_grad()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(g.parameters(), 0.3)
        g_optimizer.step()
        assert g_optimizer.report.loss == loss.item()
    their_g, their_d = by_hand(policy, 3, 1024.0 if "fp16" in policy else 1.0, 0.3)
    torch.testing.assert_close(weights(g), weights(their_g), rtol=1e-6, atol=1e-7)  # fp32, another order of factors
    torch.testing.assert_close(weights(d), weights(their_d), rtol=1e-6, atol=1e-7)


def test_an_overflow_of_one_lowers_the_scale_of_both_and_skips_one():
    g, d = nets()
    accelerator = accelerator_for("fp16 scale.init=65536")
    d, d_optimizer, g, g_optimizer = accelerator.prepare(d, sgd(d), g, sgd(g))
    real, noise = batches(1)[0]
    before = weights(d)
    accelerator.backward(1e3 * loss_of_d(g, d, real, noise))
    d_optimizer.step()
    assert torch.equal(weights(d), before)
    before = weights(g)
    accelerator.backward(loss_of_g(g, d, noise))
    g_optimizer.step()
    assert not torch.equal(weights(g), before)
    assert (d_optimizer.step_was_skipped, g_optimizer.step_was_skipped) == (True, False)
    assert accelerator.optimizer_step_was_skipped
    assert g_optimizer.report.scale == 32768


@pytest.mark.parametrize("policy", ["bf16", "fp16 scale.init=1024 on_overflow=skip"])
def test_two_optimizers_of_one_loss_are_clipped_together(policy):
    """As one for matrices and another for the rest: the norm is that of all, as torch has it."""
    theirs, model = nets()[0], nets()[0]

    def halves(net):
        return torch.optim.SGD(net[0].parameters(), lr=0.1), torch.optim.SGD(net[2].parameters(), lr=0.2)

    scale = 1024.0 if "fp16" in policy else 1.0
    region = halfstep.Region(theirs, policy)
    accelerator = accelerator_for(policy)
    optimizers = halves(theirs)
    model, *prepared = accelerator.prepare(model, *halves(model))
    for _, noise in batches(3):
        with region:
            loss = theirs(noise).float().square().mean()
        with region.backward():
            gradients = torch.autograd.grad(loss * scale, list(theirs.parameters()))
        for parameter, gradient in zip(theirs.parameters(), gradients, strict=True):
            parameter.grad = gradient / scale
        expected = nn.utils.clip_grad_norm_(theirs.parameters(), 0.05)
        accelerator.backward(model(noise).square().mean())
        norm = accelerator.clip_grad_norm_(model.parameters(), 0.05)
        torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)
        for optimizer in (*optimizers, *prepared):
            optimizer.step()
            optimizer.zero_grad()
        assert prepared[1].report.loss == loss.item()
    torch.testing.assert_close(weights(model), weights(theirs), rtol=1e-6, atol=1e-7)


def test_windows_of_two_optimizers_over_one_loss():
    """accumulate() takes both models; the short window at the end weighs what it holds."""
    g, d = nets()
    their_g, their_d = nets()
    both = nn.ModuleList([their_g, their_d])
    stepper = halfstep.Stepper(both, torch.optim.SGD(both.parameters(), lr=0.1), "fp32", accumulate=2)
    accelerator = accelerator_for("fp32", 2)
    data = torch.utils.data.DataLoader(batches(3), batch_size=None)
    g, g_optimizer, d, d_optimizer, data = accelerator.prepare(g, sgd(g), d, sgd(d), data)
    expected = []
    for _, noise in data:
        with accelerator.accumulate(g, d):
            accelerator.backward(loss_of_g(g, d, noise))
            for optimizer in (g_optimizer, d_optimizer):
                optimizer.step()
                optimizer.zero_grad()
        expected.append(stepper.step(lambda noise=noise: loss_of_g(their_g, their_d, noise)))
    expected.append(stepper.flush())
    assert expected[-1].loss == g_optimizer.report.loss == d_optimizer.report.loss
    assert torch.equal(weights(nn.ModuleList([g, d])), weights(both))


def test_a_frozen_teacher_takes_no_place_in_the_names_of_rules():
    teacher, model = nets()
    seen = []
    teacher[0].register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    model[1].register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    accelerator = accelerator_for("bf16 module:1=fp32")
    teacher, model, _ = accelerator.prepare(teacher.requires_grad_(False), model, sgd(model))
    with torch.no_grad():
        features = teacher(torch.randn(2, 4))
    model(features)
    assert seen == [torch.bfloat16, torch.float32]


def test_a_rule_that_matches_no_module_of_several():
    g, d = nets()
    accelerator = accelerator_for("bf16 module:head=fp32")
    g, *_ = accelerator.prepare(g, sgd(g), d, sgd(d))
    with pytest.raises(HalfstepError, match="head"):
        g(torch.randn(2, 4))
