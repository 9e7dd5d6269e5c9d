"""Adversarial training: two steppers that take turns, gradient penalties, and several losses in one step."""

from __future__ import annotations

import copy
import itertools
import math

import pytest
import torch
from reference.loop import Gate, assert_same
from reference.nets import CPU
from reference.scaler import Scaler
from torch import nn

from halfstep.grad_scaler import GradScaler
from halfstep.gradients import gradients_of
from halfstep.region import Region
from halfstep.stepper import Stepper

pytestmark = pytest.mark.usefixtures("kernels_stay")

REAL = torch.linspace(-2, 2, 384).reshape(48, 8).sin() + 1
NOISE = torch.linspace(-3, 3, 192).reshape(48, 4).cos()
POLICIES = ["fp32", "bf16", "fp16 scale.init=1024", "fp16 on_overflow=skip scale.init=1024"]
softplus = nn.functional.softplus


class Pair:
    """A generator and a discriminator, each with an optimizer and a stepper of its own."""

    def __init__(self, policies, limits=(None, None), **kwargs):
        torch.default_generator.manual_seed(0)
        self.g = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), Gate(limits[0]), nn.Linear(16, 8))
        self.d = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Dropout(0.1), Gate(limits[1]), nn.Linear(16, 1))
        self.optimizers = [torch.optim.Adam(m.parameters(), lr=0.01, betas=(0.0, 0.9)) for m in (self.g, self.d)]
        policies = (policies, policies) if isinstance(policies, str) else policies
        self.steppers = [
            Stepper(model, optimizer, policy, hardware=CPU, **kwargs)
            for model, optimizer, policy in zip((self.g, self.d), self.optimizers, policies, strict=True)
        ]

    def d_loss(self, number, factor=1.0):
        real, noise = REAL.roll(number, 0)[:16], NOISE.roll(number, 0)[:16]
        fake = self.g(noise).detach()
        return (softplus(-self.d(real).float()).mean() + softplus(self.d(fake).float()).mean()) * factor

    def d_loss_of_real(self, number):
        """One that does not look at the generator, so that the order of the two does not matter."""
        return softplus(-self.d(REAL.roll(number, 0)[:16]).float()).mean()

    def g_loss(self, number, factor=1.0):
        return softplus(-self.d(self.g(NOISE.roll(number, 0)[:16])).float()).mean() * factor

    def step(self, number, g_factor=1.0, d_factor=1.0):
        d_report = self.steppers[1].step(lambda: self.d_loss(number, d_factor))
        return self.steppers[0].step(lambda: self.g_loss(number, g_factor)), d_report

    def state(self):
        models = [[t.detach().clone() for t in model.state_dict().values()] for model in (self.g, self.d)]
        return [models, [copy.deepcopy(optimizer.state_dict()["state"]) for optimizer in self.optimizers]]


def train(pair, factors, seed=3):
    torch.default_generator.manual_seed(seed)
    return [pair.step(number, *each) for number, each in enumerate(factors)]


def by_hand(pair, num_steps, policy, scale):
    """The two steps written out, on the models and optimizers of ``pair``: gradients are dropped before each."""
    regions = [Region(model, policy, CPU) for model in (pair.g, pair.d)]
    torch.default_generator.manual_seed(3)
    for number in range(num_steps):
        for which, loss_of in ((1, pair.d_loss), (0, pair.g_loss)):
            for p in itertools.chain(pair.g.parameters(), pair.d.parameters()):
                p.grad = None
            with regions[which]:
                loss = loss_of(number)
            with regions[which].backward():
                (loss * scale).backward()
            for group in pair.optimizers[which].param_groups:
                for p in group["params"]:
                    p.grad /= scale
            pair.optimizers[which].step()


# --- two steppers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_it_is_the_loop_written_by_hand(policy):
    """What the generator's backward pass leaves in the discriminator is dropped when its next window begins."""
    pair, twin = Pair(policy), Pair(policy)
    reports = train(pair, [(1.0, 1.0)] * 6)
    by_hand(twin, 6, policy, 1024.0 if "fp16" in policy else 1.0)
    assert_same(pair.state(), twin.state())
    assert all(report.applied for both in reports for report in both)
    assert any(p.grad is not None for p in pair.d.parameters())  # left there by the generator's, until then


@pytest.mark.parametrize("policy", ["bf16", "fp16 on_overflow=skip scale.init=1024"])
@pytest.mark.parametrize("bad", [0, 1])
def test_a_skip_on_one_side_does_not_move_it_nor_its_scale_the_other(bad, policy):
    """The other side steps on, at its own scale, which the bad one cannot drag to where its gradients vanish."""
    pair = Pair(policy)
    train(pair, [(1.0, 1.0)] * 2)
    scales = [stepper.scale.value.item() for stepper in pair.steppers]
    frozen = pair.state()
    factors = [1.0, 1.0]
    factors[bad] = math.inf
    for both in train(pair, [tuple(factors)] * 5):
        assert [report.applied for report in both] == [bad == 1, bad == 0]
    state = pair.state()
    for kind in (0, 1):
        assert_same(state[kind][bad], frozen[kind][bad])
    assert not torch.equal(state[0][1 - bad][0], frozen[0][1 - bad][0])
    assert pair.steppers[1 - bad].scale.value.item() == scales[1 - bad]
    if "fp16" in policy:
        assert pair.steppers[bad].scale.value.item() == scales[bad] / 2**5


@pytest.mark.parametrize("which", [0, 1])
def test_an_overflow_on_one_side_is_replayed_and_nothing_shows_but_its_scale(which):
    """As if that side alone had begun at the lower scale; dropout in the other's half draws the same masks."""
    factors = [[1.0, 1.0] for _ in range(5)]
    factors[2][which] = 2.0**14
    pair = Pair("fp16 scale.init=65536")
    reports = train(pair, factors)
    replays = [sum(both[side].num_replays for both in reports) for side in (0, 1)]
    assert replays[which] > 0 == replays[1 - which]
    scales = [stepper.scale.value.item() for stepper in pair.steppers]
    assert scales[1 - which] == 65536.0 > scales[which]
    twin = Pair([f"fp16 scale.init={scale:g}" for scale in scales])
    assert sum(report.num_replays for both in train(twin, factors) for report in both) == 0
    assert_same(pair.state(), twin.state())


@pytest.mark.parametrize("keep_casts", [True, False])
@pytest.mark.parametrize("policy", POLICIES)
def test_windows_of_both_may_overlap(policy, keep_casts):
    """Accumulation on both sides, micro-batches in turns: a window drops what others left only where it begins.

    The generator's backward pass runs through the discriminator, whose sums it must not enter.
    """
    with pytest.raises(AssertionError):  # so it does, as in any loop that leaves the other's weights trainable
        check_overlap(policy, keep_casts, freezes=False)
    check_overlap(policy, keep_casts, freezes=True)


def check_overlap(policy, keep_casts, freezes):
    states = []
    for overlap in (True, False):
        pair = Pair(policy, accumulate=2, keep_casts=keep_casts)
        pair.d[2].p = 0.0

        def g_step(number, pair=pair):
            pair.d.requires_grad_(not freezes)
            pair.steppers[0].step(lambda: pair.g_loss(number))
            pair.d.requires_grad_(True)

        # The generator's second micro-batch comes after the discriminator's step in both orders, its first one before.
        orders = {True: "gdgd", False: "ggdd"}
        for number in range(3):
            counts = {"g": 0, "d": 0}
            for side in orders[overlap]:
                part = 2 * number + counts[side]
                counts[side] += 1
                if side == "g":
                    g_step(part)
                else:
                    pair.steppers[1].step(lambda p=part, pair=pair: pair.d_loss_of_real(p))
        states.append(pair.state())
        for stepper in pair.steppers:
            stepper.flush()
    assert_same(*states)


def test_a_state_of_both_resumes_to_the_bit():
    policy = "fp16 scale.init=1024 scale.interval=2"
    pair, twin = Pair(policy), Pair(policy)
    train(pair, [(1.0, 1.0)] * 3)
    twin.g.load_state_dict(pair.g.state_dict())
    twin.d.load_state_dict(pair.d.state_dict())
    for mine, other in zip(twin.optimizers, pair.optimizers, strict=True):
        mine.load_state_dict(copy.deepcopy(other.state_dict()))
    for mine, other in zip(twin.steppers, pair.steppers, strict=True):
        mine.load_state_dict(other.state_dict())
    for each in (pair, twin):
        train(each, [(1.0, 1.0)] * 3, seed=9)
    assert_same(pair.state(), twin.state())


# --- one scale for two optimizers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("policies", [("fp16 scale.init=1024", "bf16"), ("fp32", "fp16 scale.init=1024")], ids=str)
def test_each_side_may_have_a_policy_of_its_own(policies):
    """A region's rules act where its own model is called: the other half computes in the format of the open region."""
    pair = Pair(policies)
    seen = []
    for model in (pair.g, pair.d):
        model[0].register_forward_hook(lambda m, a, out: seen.append(out.dtype))
    assert all(report.applied for both in train(pair, [(1.0, 1.0)] * 3) for report in both)
    low = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
    of_g, of_d = (low[policy.split()[0]] for policy in policies)
    assert seen[:5] == [of_d] * 3 + [of_g] * 2


def test_one_scale_for_both_is_that_of_a_scaler():
    """Either's overflow lowers it once, each steps by its own gradient; a dynamic scale by hand is the twin."""
    torch.default_generator.manual_seed(0)
    models = [nn.Linear(8, 1) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in models]
    scaler = GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    twin = Scaler(scale=2.0**10, interval=2)
    for bad in [(0, 0), (1, 0), (0, 0), (0, 1), (1, 1), (0, 0), (0, 0), (0, 0)]:
        before = [model.weight.detach().clone() for model in models]
        for model, optimizer, is_bad in zip(models, optimizers, bad, strict=True):
            optimizer.zero_grad()
            loss = model(REAL).square().mean() * (math.inf if is_bad else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
        scaler.update()
        twin.update(any(bad))
        assert scaler.get_scale() == twin.scale
        moved = [not torch.equal(model.weight, old) for model, old in zip(models, before, strict=True)]
        assert moved == [not is_bad for is_bad in bad]


# --- gradient penalties ----------------------------------------------------------------------------------------------


class Critic(nn.Module):
    def __init__(self, kind):
        super().__init__()
        torch.default_generator.manual_seed(0)
        if kind == "conv":
            self.body = nn.Sequential(nn.Unflatten(1, (1, 8)), nn.Conv1d(1, 4, 3), nn.Tanh(), nn.Flatten())
            width = 24
        elif kind == "norm":
            self.body = nn.Sequential(nn.Linear(8, 24), nn.LayerNorm(24), nn.Softplus())
            width = 24
        elif kind == "attention":
            self.body = Attention()
            width = 8
        else:
            self.body = nn.Sequential(nn.Linear(8, 24), nn.LeakyReLU(0.2), nn.Linear(24, 24), nn.Softplus())
            width = 24
        self.head = nn.Linear(width, 1)

    def forward(self, x):
        return self.head(self.body(x))


class Attention(nn.Module):
    """Written out, since torch's fused attention has no second derivative on any device."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(2, 6)

    def forward(self, x):
        q, k, v = self.qkv(x.reshape(-1, 4, 2)).chunk(3, -1)
        return (torch.softmax(q @ k.transpose(1, 2), -1) @ v).reshape(-1, 8)


def penalty(critic, x):
    """(|gradient| - 1)^2 at ``x``, of the true gradient (Gulrajani et al. 2017, algorithm 1)."""
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(critic(x).float().sum(), x, create_graph=True)
    return (gradient.float().norm(dim=1) - 1).square().mean()


KINDS = ["linear", "conv", "norm", "attention"]


@pytest.mark.parametrize("policy", ["bf16", "fp16 scale.init=1024", "bf16 module:head=fp32", "bf16 module:body=fp32"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_second_derivative_in_16_bit_is_as_good_as_the_format(kind, policy):
    gradients = []
    for dtype, each in ((torch.float32, policy), (torch.float64, "fp32")):
        critic = Critic(kind).to(dtype)
        stepper = Stepper(critic, torch.optim.SGD(critic.parameters(), lr=0.0), each, hardware=CPU)
        taken = []
        stepper.optimizer.register_step_pre_hook(
            lambda opt, a, k, taken=taken: taken.extend(g.clone() for g in gradients_of(opt).values())
        )
        x = REAL[:16].to(dtype)
        report = stepper.step(lambda c=critic, x=x: c(x).float().mean() + 10 * penalty(c, x))
        assert report.applied
        gradients.append([*taken, torch.tensor(report.loss)])
    eps = torch.finfo(torch.float16 if "fp16" in policy else torch.bfloat16).eps
    for value, exact in zip(*gradients, strict=True):
        # About ten roundings on the way there and back, each of half an eps; parts of the gradient cancel.
        assert (value.double() - exact).norm() <= 8 * eps * exact.norm() + 1e-6
        assert value.dtype == torch.float32


@pytest.mark.parametrize("kind", KINDS)
def test_formats_of_both_backward_passes_are_16_bit(kind):
    """The inner backward pass computes where forward did, and products of the outer one as well."""
    critic = Critic(kind)
    region = Region(critic, "bf16", CPU)
    x = REAL[:16].clone().requires_grad_()
    with region:
        (gradient,) = torch.autograd.grad(critic(x).float().sum(), x, create_graph=True)
        loss = gradient.square().sum()
    with region.backward():
        loss.backward()
    assert gradient.dtype == torch.float32  # that of the input
    assert torch.equal(gradient, gradient.bfloat16().float())
    assert {p.grad.dtype for p in critic.parameters() if p.grad is not None} == {torch.float32}


@pytest.mark.parametrize("policy", POLICIES[2:])
def test_a_penalty_is_on_true_gradients_whatever_the_scale(policy):
    """The scale is applied where backward starts, after the penalty was taken."""
    losses = []
    for scale in ("1024", "4096"):
        critic = Critic("linear")
        stepper = Stepper(critic, torch.optim.SGD(critic.parameters(), lr=0.0), policy.replace("1024", scale))
        losses.append(stepper.step(lambda c=critic: penalty(c, REAL[:16])).loss)
    assert losses[0] == losses[1]


def test_a_small_inner_gradient_vanishes_in_fp16_and_a_factor_taken_out_again_brings_it_back():
    """A critic whose gradient is near 1e-7: unscaled it rounds to nothing or one step of 6e-8, scaled it is right."""
    norms = {}
    for how in ("unscaled", "scaled", "exact"):
        critic = Critic("linear")
        with torch.no_grad():
            for layer in (critic.body[0], critic.body[2], critic.head):
                layer.weight.mul_(1e-2)  # each still a normal number of fp16
        stepper = Stepper(critic, torch.optim.SGD(critic.parameters(), lr=0.0), "fp16 scale.init=65536", hardware=CPU)
        x = REAL[:16].clone().requires_grad_()

        def closure(how=how, critic=critic, x=x):
            if how == "scaled":
                # A power of two, so that taking it out rounds nothing. That of the stepper is no help: backward starts
                # from 1 here, and 2^16 is beyond fp16.
                score = critic(x).float().sum() * 2.0**12
                (gradient,) = torch.autograd.grad(score, x, create_graph=True)
                gradient = gradient / 2.0**12
            else:
                (gradient,) = torch.autograd.grad(critic(x).float().sum(), x, create_graph=True)
            closure.norm = gradient.norm().item()
            return gradient.square().sum() + critic(x).float().mean()

        if how == "exact":
            critic.double()
            x = REAL[:16].double().requires_grad_()
            score = critic(x).sum()
            norms[how] = torch.autograd.grad(score, x)[0].norm().item()
        else:
            stepper.step(closure)
            norms[how] = closure.norm
    assert norms["scaled"] == pytest.approx(norms["exact"], rel=2**-8)  # a few roundings of 2^-11
    assert norms["unscaled"] != pytest.approx(norms["exact"], rel=0.1)


def test_a_penalty_is_replayed_with_the_rest():
    """The mixing weights of the penalty are drawn again alike."""

    def closure(critic):
        mix = torch.rand(16, 1)
        x = mix * REAL[:16] + (1 - mix) * REAL[16:32]
        return (critic(x).float().mean() + 10 * penalty(critic, x)) * 2.0**6

    results = []
    for scale in (2**16, None):
        scale = scale or results[0][1].scale
        critic = Critic("linear")
        stepper = Stepper(critic, torch.optim.SGD(critic.parameters(), lr=0.01), f"fp16 scale.init={scale:g}")
        torch.default_generator.manual_seed(4)
        report = stepper.step(lambda c=critic: closure(c))
        results.append(([p.detach() for p in critic.parameters()], report))
    assert results[0][1].num_replays > 0 == results[1][1].num_replays
    assert_same(results[0][0], results[1][0])


# --- several losses --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_several_losses_are_summed_in_one_closure(policy):
    """Two backward passes by hand through one graph give the sum of their gradients; so does one through the sum."""

    def losses(model):
        shared = model[1](model[0](REAL[:16]))
        return shared.float().square().mean(), 0.5 * model[2](shared).float().square().mean()

    def make():
        torch.default_generator.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))

    model, twin = make(), make()
    optimizer, other = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, twin))
    stepper = Stepper(model, optimizer, policy, hardware=CPU)
    report = stepper.step(lambda: sum(losses(model)))
    region, scale = Region(twin, policy, CPU), stepper.scale.value.item()
    with region:
        first, second = losses(twin)
    with region.backward():
        (first * scale).backward(retain_graph=True)
        (second * scale).backward()
    for p in twin.parameters():
        p.grad /= scale
    other.step()
    assert report.loss == pytest.approx((first + second).item())
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        # The two gradients meet before the 16-bit products in one pass and after them in two.
        eps = {"b": 2**-7, "f": 2**-10}[policy[0]] if policy != "fp32" else 2**-20
        torch.testing.assert_close(p, q, rtol=0, atol=0.1 * 4 * eps)


def test_two_calls_of_backward_are_two_micro_batches():
    """So that they count as a mean of two, which is why the sum belongs into one."""
    model, twin = Critic("linear"), Critic("linear")
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32", accumulate=2)
    with stepper.forward():
        first, second = model(REAL).square().mean(), model(REAL).abs().mean()
    assert stepper.backward(first) is None
    report = stepper.backward(second)
    other = Stepper(twin, torch.optim.SGD(twin.parameters(), lr=0.1), "fp32")
    expected = other.step(lambda: (twin(REAL).square().mean() + twin(REAL).abs().mean()) / 2)
    assert report.loss == expected.loss
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)  # two sums in another order
