"""Master weights: the same steps as fp32, gradients, drawn roundings, and changes from outside."""

import copy
import math

import pytest
import torch
from reference.master_net import (
    NAMES,
    OPTIMIZERS,
    Net,
    assert_same,
    batches,
    build,
    exact,
    loss_of,
    train,
    watch_gradients,
)
from torch import nn

from halfstep import Stepper, chunks

pytestmark = pytest.mark.usefixtures("kernels_stay")


# The same steps as fp32.


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("layout", ["split16", "copy"])
def test_exact_layouts_take_200_steps_of_an_fp32_master_to_the_bit(layout, make):
    """The plain twin: fp32 weights, and torch's optimizer over the gradients that the 16-bit model made."""
    model, stepper = build(f"bf16 master={layout}", make)
    seen = watch_gradients(stepper)
    twin = Net()
    optimizer = make(twin.parameters())
    start = exact(stepper)
    for batch in batches(200):
        assert train(stepper, model, [batch])[0].applied
        for name, parameter in twin.named_parameters():
            parameter.grad = seen[name].clone()
        optimizer.step()
    masters = exact(stepper)
    assert_same(masters, {name: parameter.detach() for name, parameter in twin.named_parameters()})
    assert not torch.equal(masters["embed.weight"], start["embed.weight"])
    for (name, parameter), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert stepper.optimizer.state[parameter].keys() == optimizer.state[other].keys(), name
        for key, value in optimizer.state[other].items():
            mine = stepper.optimizer.state[parameter][key]
            assert torch.equal(mine, value) if isinstance(value, torch.Tensor) else mine == value, (name, key)


@pytest.mark.parametrize("make", [OPTIMIZERS["adamw"], OPTIMIZERS["adamw fused"]], ids=["host", "device"])
def test_split16_in_fp16_takes_the_steps_of_an_fp32_master_under_a_loss_scale(make):
    """The gradient is divided in fp32, not in fp16, where it would lose bits. Exact from 2^-17; smaller ones nearly."""
    model, stepper = build("fp16 master=split16 scale.init=1024 on_overflow=skip", make)
    seen = watch_gradients(stepper, lambda: 1024.0)
    twin = Net()
    optimizer = make(twin.parameters())
    for batch in batches(200):
        train(stepper, model, [batch])
        for name, parameter in twin.named_parameters():
            parameter.grad = seen[name].clone()
        optimizer.step()
    for name, weight in stepper.weights():
        other = dict(twin.named_parameters())[name].detach()
        # A weight that passes through |w| < 2^-17 is rounded there to 2^-40, once a step at most.
        assert (weight - other).abs().max() <= 200 * 2.0**-40, name
        assert (weight == other).double().mean() > 0.98, name


def test_copy_is_autocast_with_fp32_weights_to_the_bit_where_products_meet_all_weights():
    """Linear layers cast fp32 weights as the layout does, to nearest even; gradients are the same 16-bit numbers."""

    def net():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))

    results = []
    for master in ("fp32", "copy"):
        model, stepper = build(f"bf16 master={master}", model=net(), max_norm=0.5, accumulate=2)
        generator = torch.Generator().manual_seed(2)
        for _ in range(100):
            x = torch.randn(8, 16, generator=generator)
            stepper.step(lambda x=x, model=model: (model(x).float() - x).square().mean())
        results.append(exact(stepper))
    # With one micro-batch the gradients are equal; the sum of two is fp32 in both.
    assert_same(*results)


@pytest.mark.parametrize("layout", NAMES)
@pytest.mark.parametrize("format", ["bf16", "fp16"])
def test_every_layout_trains_as_well_as_fp32(layout, format):
    tokens = batches(1) * 120
    _, stepper = build(f"{format} master={layout}", max_norm=1.0)
    losses = [report.loss for report in train(stepper, stepper.model, tokens)]
    _, plain = build("fp32", max_norm=1.0)
    reference = [report.loss for report in train(plain, plain.model, tokens)]
    # From 3.7 to below 0.1; the paths differ by rounding alone, and end within a tenth of the way.
    assert losses[-1] < 0.1 * losses[0]
    assert abs(losses[-1] - reference[-1]) < 0.1 * losses[0]


def test_updates_under_half_an_ulp_survive_in_every_layout():
    """AdamW at lr 1e-4 from weights of 1.0: 100 updates of 1e-4, each 1/40 of the bf16 ulp below 1."""
    for layout in NAMES:
        model = nn.Linear(64, 64, bias=False)
        nn.init.ones_(model.weight)
        _, stepper = build(
            f"bf16 master={layout}", lambda ps: torch.optim.AdamW(ps, lr=1e-4, weight_decay=0), model=model
        )
        for _ in range(100):
            stepper.step(lambda model=model: model(torch.ones(1, 64)).float().sum())
        moved = 1 - dict(stepper.weights())["weight"].double().mean().item()
        # Drawn roundings: 4,096 weights of one ulp 2^-8 each, 100 draws with chance 1/39: a standard error of 1e-4.
        tolerance = {"stochastic": 5e-4, "split8": 7.7e-4, "kahan": 7.7e-4}.get(layout, 3e-6)
        assert abs(moved - 0.01) < tolerance, layout


# Gradients.


@pytest.mark.parametrize("accumulate", [1, 3])
def test_gradients_are_16_bit_and_their_sums_fp32(accumulate):
    model, stepper = build("bf16 master=split16", accumulate=accumulate)
    twin = Net()
    total = torch.zeros_like(twin.up.weight)
    dtypes = []
    up = model.up.weight
    stepper.optimizer.register_step_pre_hook(lambda *_: dtypes.append((up.grad.dtype, up.grad.clone())))
    for batch in batches(accumulate):
        other, lone = build("bf16 master=split16")
        got = []
        lone.optimizer.register_step_pre_hook(lambda *_, w=other.up.weight, got=got: got.append(w.grad.float()))
        train(lone, other, [batch])
        total += got[0]
        train(stepper, model, [batch])
    dtype, gradient = dtypes[0]
    assert dtype == (torch.bfloat16 if accumulate == 1 else torch.float32)
    assert torch.equal(gradient.float(), total)


def test_zero_grad_and_a_gradient_of_somebody_else():
    model, stepper = build("bf16 master=split16")
    with stepper.region:
        loss_of(model, batches(1)[0]).backward()
    assert model.up.weight.grad.dtype == torch.bfloat16
    stepper.optimizer.zero_grad()
    assert model.up.weight.grad is None
    with stepper.region:
        loss_of(model, batches(1)[0]).backward()
    other, clean = build("bf16 master=split16")
    train(stepper, model, batches(2))
    train(clean, other, batches(2))
    assert_same(exact(stepper), exact(clean))


@pytest.mark.parametrize("layout", NAMES)
@pytest.mark.parametrize("fused", [False, True])
def test_a_non_finite_gradient_moves_no_bit(layout, fused):
    model, stepper = build(
        f"bf16 master={layout}", lambda ps: torch.optim.AdamW(ps, lr=1e-2, fused=fused), max_norm=1.0
    )
    train(stepper, model, batches(3))
    before = copy.deepcopy((model.state_dict(), stepper.optimizer.state_dict(), exact(stepper)))
    report = stepper.step(lambda: loss_of(model, batches(1)[0]) * math.inf)
    assert not report.applied
    assert_same(dict(model.state_dict()), dict(before[0]))
    assert_same(exact(stepper), before[2])
    for number, state in stepper.optimizer.state_dict()["state"].items():
        for key, value in state.items():
            assert torch.equal(value, before[1]["state"][number][key]), key


@pytest.mark.parametrize("layout", NAMES)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_replay_mends_an_overflow(layout, accumulate):
    """A first scale that overflows: replayed until it fits, no sample lost, the same in every layout."""
    model, stepper = build(f"fp16 master={layout} scale.init=16777216", accumulate=accumulate)
    reports = train(stepper, model, batches(4))
    assert all(report.applied for report in reports)
    assert reports[0].num_replays > 0
    other, gentle = build(f"fp16 master={layout} scale.init={int(stepper.scale.value)}", accumulate=accumulate)
    train(gentle, other, batches(4))
    for name, weight in exact(stepper).items():
        # Gradients that were finite at a higher scale keep bits that are subnormal at the lower one.
        assert torch.allclose(weight, exact(gentle)[name], atol=2e-3), name


# Drawn roundings.


def test_replicas_round_alike_whatever_else_draws():
    weights = []
    for noise in range(2):
        model, stepper = build("bf16 master=stochastic")
        for batch in batches(5):
            torch.rand(noise + 1)
            train(stepper, model, [batch])
        weights.append(exact(stepper))
    assert_same(*weights)


def test_roundings_are_drawn_anew_for_every_step_matrix_and_slice(monkeypatch):
    """100 updates of 1/39 ulp: with the same draws in each step a weight would move always or never."""
    monkeypatch.setattr(chunks, "_SMALLEST_BYTES", 0)  # two slices each
    model = nn.Sequential(nn.Linear(64, 128, bias=False), nn.Linear(64, 128, bias=False))
    for layer in model:
        nn.init.ones_(layer.weight)
    _, stepper = build("bf16 master=stochastic", lambda ps: torch.optim.AdamW(ps, lr=1e-4, weight_decay=0), model=model)
    for _ in range(100):
        stepper.step(lambda: sum(layer(torch.ones(1, 64)).float().sum() for layer in model))
    first, second = (weight for _, weight in stepper.weights())
    assert len(first.unique()) > 4
    assert not torch.equal(first, second)
    assert not torch.equal(first[:64], first[64:])


# Changes from outside.


@pytest.mark.parametrize("layout", NAMES)
def test_a_weight_that_is_set_between_steps_is_the_new_weight(layout):
    model, stepper = build(f"bf16 master={layout}")
    train(stepper, model, batches(2))
    with torch.no_grad():
        model.up.weight.fill_(0.5)
    assert (dict(stepper.weights())["up.weight"] == 0.5).all()
    seen = watch_gradients(stepper)
    train(stepper, model, batches(1))
    assert "up.weight" in seen
    # One AdamW step from 0.5 moves at most a few lr; a stale master would be anywhere.
    assert (dict(stepper.weights())["up.weight"] - 0.5).abs().max() < 0.05


def test_hooks_of_the_optimizer_fire_once_a_step():
    model, stepper = build("bf16 master=split16")
    calls = []
    stepper.optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    stepper.optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    train(stepper, model, batches(2))
    assert calls == ["pre", "post"] * 2


def test_a_scheduler_works_as_ever():
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    stepper = Stepper(model, optimizer, "bf16 master=split16", scheduler=scheduler)
    train(stepper, model, batches(3))
    assert optimizer.param_groups[0]["lr"] == 1e-2 / 8


def test_an_optimizer_that_fails_leaves_the_model_whole():
    model, stepper = build("bf16 master=split16")
    train(stepper, model, batches(1))
    before = exact(stepper)

    def fail():
        raise RuntimeError("no")

    stepper.optimizer.step, step = fail, stepper.optimizer.step
    with pytest.raises(RuntimeError, match="no"):
        train(stepper, model, batches(1))
    stepper.optimizer.step = step
    assert model.up.weight.dtype == torch.bfloat16
    assert_same(exact(stepper), before)
    train(stepper, model, batches(1))


def test_the_step_of_a_fused_optimizer_counts_as_a_change():
    """torch's own fused kernels do not count it, and a graph from before would go through the new weights unseen."""
    model, stepper = build("bf16 master=split16", OPTIMIZERS["adamw fused"])
    version = model.up.weight._version
    train(stepper, model, batches(1))
    assert model.up.weight._version > version
