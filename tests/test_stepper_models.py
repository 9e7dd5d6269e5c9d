"""The step on unusual models and beside other steps: tied, frozen, late, sparse, 16-bit losses, two at once."""

from __future__ import annotations

import copy
import gc
import math

import pytest
import torch
from reference.plain_net import OPTIMIZERS, POLICIES, X, Y, assert_same_bits, loss_of, net, weights
from torch import nn

from halfstep.region import Region
from halfstep.stepper import Stepper

pytestmark = pytest.mark.usefixtures("kernels_stay")


# --- unusual models --------------------------------------------------------------------------------------------------


class Odd(nn.Module):
    """Tied weights, a frozen layer, a layer that only some batches use and one that none does."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(12, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.sometimes, self.never = nn.Linear(8, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids, use):
        h = self.frozen(self.table(ids)).tanh()
        return self.head(self.sometimes(h) if use else h)


def odd_loss(model, step):
    ids = (torch.arange(10) * 7 + step) % 12
    return nn.functional.cross_entropy(model(ids, step % 3 == 1).float(), ids.roll(1))


@pytest.mark.parametrize("optimizer", ["adamw", "adamw fused", "sgd momentum"])
@pytest.mark.parametrize("policy", ["fp32", "fp32 scale=dynamic", "fp16 scale.init=1024"])
def test_frozen_unused_and_tied_parameters_train_as_with_torch(policy, optimizer):
    torch.default_generator.manual_seed(0)
    ours = Odd()
    theirs = copy.deepcopy(ours)
    before = copy.deepcopy(ours)
    stepper = Stepper(ours, OPTIMIZERS[optimizer](ours.parameters()), policy, accumulate=2, keep_casts=True)
    region, opt = Region(theirs, policy), OPTIMIZERS[optimizer](theirs.parameters())
    scale = stepper.scale.value.item()
    for step in range(12):
        report = stepper.step(lambda step=step: odd_loss(ours, step))
        with region:
            loss = odd_loss(theirs, step)
        with region.backward():
            (loss * scale).backward()
        if step % 2:
            for p in theirs.parameters():
                if p.grad is not None:
                    p.grad /= 2 * scale
            opt.step()
            opt.zero_grad()
            assert report.applied
    assert_same_bits(weights(ours), weights(theirs))
    assert ours.head.weight is ours.table.weight
    assert not torch.equal(ours.table.weight, before.table.weight)
    assert not torch.equal(ours.sometimes.weight, before.sometimes.weight)
    assert torch.equal(ours.frozen.weight, before.frozen.weight)
    assert torch.equal(ours.never.weight, before.never.weight)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_layer_thawed_and_a_group_added_in_mid_run_train_from_then_on(policy):
    model = net()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model[3].parameters(), lr=0.1)
    stepper = Stepper(model, optimizer, policy, accumulate=2, keep_casts=True)
    first = model[0].weight.detach().clone()
    stepper.step(lambda: loss_of(model, 0))
    assert stepper.step(lambda: loss_of(model, 1)).applied
    assert torch.equal(model[0].weight, first)
    stepper.step(lambda: loss_of(model, 2))
    model[0].requires_grad_(True)
    optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.5})
    assert stepper.step(lambda: loss_of(model, 3)).applied
    assert not torch.equal(model[0].weight, first)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("keep_casts", [True, False])
def test_inference_in_the_middle_of_a_window_leaves_training_unchanged(policy, keep_casts):
    left, right = net(), net()
    for model, looks in ((left, False), (right, True)):
        stepper = Stepper(model, OPTIMIZERS["adamw"](model.parameters()), policy, accumulate=3, keep_casts=keep_casts)
        for step in range(6):
            if looks:
                with stepper.inference():
                    assert not model(X).requires_grad
            stepper.step(lambda step=step, model=model: loss_of(model, step))
            if looks:
                with torch.no_grad(), stepper.region:
                    model(X)
    assert_same_bits(weights(left), weights(right))


@pytest.mark.parametrize("policy", POLICIES)
def test_keeping_the_casts_changes_no_bit(policy):
    left, right = net(), net()
    for model, keep_casts in ((left, True), (right, False)):
        stepper = Stepper(model, OPTIMIZERS["adamw"](model.parameters()), policy, accumulate=3, keep_casts=keep_casts)
        for step in range(7):
            stepper.step(lambda step=step, model=model: loss_of(model, step))
        stepper.flush()
    assert_same_bits(weights(left), weights(right))


def test_a_weight_in_double_trains_in_double():
    model = net().double()
    report = Stepper(model, OPTIMIZERS["sgd"](model.parameters()), "fp32", max_norm=0.1).step(
        lambda: (model(X.double()) - Y).square().mean()
    )
    assert report.applied
    assert all(p.dtype == torch.float64 for p in model.parameters())


@pytest.mark.parametrize("policy", ["fp32", "fp16 scale.init=1024", "fp16 on_overflow=skip scale.init=1024"])
def test_the_default_dtype_of_torch_is_not_that_of_the_scale(policy):
    left, right = net(), net()
    reports = []
    for model, dtype in ((left, torch.float32), (right, torch.float64)):
        torch.set_default_dtype(dtype)
        try:
            stepper = Stepper(model, OPTIMIZERS["adamw fused"](model.parameters()), policy, max_norm=0.1)
            reports.append([stepper.step(lambda s=step, m=model: loss_of(m, s)).to_dict() for step in range(3)])
        finally:
            torch.set_default_dtype(torch.float32)
    assert reports[0] == reports[1]
    assert_same_bits(weights(left), weights(right))


@pytest.mark.parametrize("make", [lambda p: torch.optim.SparseAdam(list(p), lr=0.1), OPTIMIZERS["sgd"]])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_sparse_gradients_follow_dense_ones(accumulate, make):
    """An index that comes twice has two entries in a sparse gradient, and its norm is that of their sum."""
    norms, tables = [], []
    for policy in ("fp32 scale=dynamic scale.init=1024", "fp32"):
        torch.default_generator.manual_seed(0)
        table = nn.Embedding(10, 4, sparse="scale" in policy)
        dense = torch.optim.Adam(table.parameters(), lr=0.1) if make is not OPTIMIZERS["sgd"] else None
        stepper = Stepper(
            nn.Sequential(table),
            make(table.parameters()) if table.sparse or dense is None else dense,
            policy,
            accumulate=accumulate,
            max_norm=0.5,
        )
        for _ in range(accumulate):  # one step: later ones of a dense Adam move every row
            report = stepper.step(lambda table=table: table(torch.tensor([1, 2, 2, 7])).square().sum())
        norms.append(report.grad_norm)
        before = table.weight.detach().clone()
        for _ in range(accumulate):
            report = stepper.step(lambda table=table: table(torch.tensor([3])).sum() * math.inf)
        assert not report.applied
        assert torch.equal(table.weight, before)
        tables.append(before)
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)
    torch.testing.assert_close(tables[0], tables[1], rtol=1e-5, atol=1e-6)


# --- 16-bit losses ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 2.0**12, 2.0**15])
def test_a_loss_in_16_bit_is_scaled_in_fp32(dtype, scale):
    left, right = net(), net()
    for model, kind in ((left, dtype), (right, torch.float32)):
        policy = f"fp32 scale=static scale.init={scale:g}"
        report = Stepper(model, OPTIMIZERS["sgd"](model.parameters()), policy).step(
            lambda model=model, kind=kind: loss_of(model, 0).to(kind)
        )
        assert report.applied
        assert report.loss == loss_of(net(), 0).to(kind).item()
    assert_same_bits(weights(left), weights(right))


def test_a_scale_that_a_16_bit_loss_cannot_take_is_replayed_lower():
    """2^16 is beyond fp16, so the gradient of an fp16 loss is inf at the first default scale."""
    model = net()
    stepper = Stepper(model, OPTIMIZERS["sgd"](model.parameters()), "fp16")
    report = stepper.step(lambda: loss_of(model, 0).half())
    assert (report.applied, report.num_replays, report.scale) == (True, 1, 2.0**15)


# --- several steppers ------------------------------------------------------------------------------------------------


def gan(policy, keep_casts, accumulate):
    """Two halves that take turns within each other's windows; returns their weights."""
    torch.default_generator.manual_seed(0)
    maker = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 8))
    judge = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
    noise = torch.linspace(-1, 1, 32).reshape(8, 4).cos()
    options = {"accumulate": accumulate, "keep_casts": keep_casts}
    makes = Stepper(maker, torch.optim.AdamW(maker.parameters(), lr=0.01), policy, **options)
    judges = Stepper(judge, torch.optim.AdamW(judge.parameters(), lr=0.02), policy, **options)
    bce = nn.functional.binary_cross_entropy_with_logits
    ones = torch.ones(8, 1)
    for turn in range(8):
        z = noise.roll(turn, 0)
        fake = maker(z).detach()
        judges.step(lambda fake=fake: bce(judge(X[:8]), ones) + bce(judge(fake), 0 * ones))
        for p in judge.parameters():
            p.requires_grad_(False)
        makes.step(lambda z=z: bce(judge(maker(z)), ones))
        for p in judge.parameters():
            p.requires_grad_(True)
    return weights(maker) + weights(judge)


@pytest.mark.parametrize("policy", ["fp32", "bf16", "fp16 scale.init=256"])
@pytest.mark.parametrize("accumulate", [1, 4])
def test_two_steppers_that_take_turns_do_not_see_each_others_casts(policy, accumulate):
    assert_same_bits(gan(policy, True, accumulate), gan(policy, False, accumulate))


@pytest.mark.parametrize("optimizer", ["sgd", "adamw fused"])
@pytest.mark.parametrize("keep_casts", [True, False])
def test_a_plain_autocast_loop_beside_an_open_window_trains_on_its_own_weights(keep_casts, optimizer):
    """Casts that are held between micro-batches are in the one cache that every autocast region shares."""
    ours, theirs, alone = net(), net(1), net(1)
    stepper = Stepper(ours, OPTIMIZERS["sgd"](ours.parameters()), "bf16", accumulate=9, keep_casts=keep_casts)
    for model in (theirs, alone):
        opt = OPTIMIZERS[optimizer](model.parameters())
        for step in range(4):
            if model is theirs:
                stepper.step(lambda step=step: loss_of(ours, step))
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(model, step)
            loss.backward()
            opt.step()
            opt.zero_grad()
    assert_same_bits(weights(theirs), weights(alone))


@pytest.mark.parametrize("policy", ["fp32", "fp16 scale.init=256"])
def test_what_another_backward_pass_left_does_not_enter_a_window(policy):
    """A GAN's maker differentiates through the judge and leaves gradients there."""
    left, right = net(), net()
    for model, is_dirty in ((left, False), (right, True)):
        stepper = Stepper(model, OPTIMIZERS["sgd"](model.parameters()), policy, accumulate=2, keep_casts=True)
        for step in range(4):
            if is_dirty and step % 2 == 0:
                (loss_of(model, 9) * 1e3).backward()
            stepper.step(lambda step=step, model=model: loss_of(model, step))
    assert_same_bits(weights(left), weights(right))


def nesting():
    depth = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return depth - 1


@pytest.mark.parametrize("policy", ["bf16", "fp16", "fp16 on_overflow=skip"])
def test_a_stepper_dropped_in_mid_window_leaves_no_autocast_behind(policy):
    model = net()
    stepper = Stepper(model, OPTIMIZERS["sgd"](model.parameters()), policy, accumulate=4, keep_casts=True)
    stepper.step(lambda: loss_of(model, 0))
    assert nesting() == 1
    del stepper
    gc.collect()
    assert nesting() == 0
    assert not torch.is_autocast_enabled("cpu")
    assert model(X).dtype == torch.float32


@pytest.mark.parametrize("policy", POLICIES)
def test_no_gradient_and_no_cast_is_left_after_a_window(policy):
    model = net()
    stepper = Stepper(model, OPTIMIZERS["sgd"](model.parameters()), policy, accumulate=2, keep_casts=True)
    stepper.step(lambda: loss_of(model, 0))
    stepper.step(lambda: loss_of(model, 1))
    assert all(p.grad is None for p in model.parameters())
    assert nesting() == 0
