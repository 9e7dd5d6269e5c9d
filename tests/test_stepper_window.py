"""A window's loss and gradient are sums over its micro-batches divided by the true count, against a float64 twin."""

from __future__ import annotations

import functools
import itertools
import math
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from reference.loop import PlainLoop
from torch import nn

import halfstep.stepper
from halfstep.stepper import Stepper

pytestmark = pytest.mark.usefixtures("kernels_stay")

OPTIMIZERS = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.02, momentum=0.9, weight_decay=0.01),
    "sgd fused": lambda groups: torch.optim.SGD(groups, lr=0.02, momentum=0.9, weight_decay=0.01, fused=True),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1),
    "adamw loop": lambda groups: torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1, foreach=False),
    "adamw fused": lambda groups: torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1, fused=True),
}
SCALED = ["fp32", "fp32 scale=static scale.init=4096", "fp32 scale=dynamic on_overflow=skip", "fp32 scale=dynamic"]
FEW = ["fp32", "fp32 scale=dynamic"]
ROUNDING = 2e-5  # 20 steps of a few hundred fp32 operations, each within 6e-8


def net():
    torch.default_generator.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


@functools.cache
def sample(i):
    draw = torch.Generator().manual_seed(i)
    return torch.randn(6, generator=draw), torch.randn(3, generator=draw)


def loss_sum(model, indices):
    """Sum of the losses of some samples, in the precision of the model; 0 with a graph for none of them."""
    dtype = next(model.parameters()).dtype
    if not indices:
        return model(torch.zeros(1, 6, dtype=dtype)).sum() * 0
    x, y = (torch.stack(both).to(dtype) for both in zip(*map(sample, indices), strict=True))
    return (model(x) - y).square().sum()


def settings_of(optimizer, model):
    """The groups of ``model`` for torch, and the same ones by name for the twin."""
    lr, decay = (0.02, 0.01) if optimizer.startswith("sgd") else (0.01, 0.1)
    momentum = {"momentum": 0.9} if optimizer.startswith("sgd") else {}
    groups = [{"params": [*model[0].parameters()]}, {"params": [*model[2].parameters()], "lr": lr / 4}]
    names = [
        {"names": ["0.weight", "0.bias"], "lr": lr, "weight_decay": decay, **momentum},
        {"names": ["2.weight", "2.bias"], "lr": lr / 4, "weight_decay": decay, **momentum},
    ]
    return groups, names


# --- against the twin ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("max_norm", [None, 0.7])
@pytest.mark.parametrize("policy", SCALED)
def test_ragged_windows_and_a_short_last_one_follow_the_float64_twin(policy, max_norm, optimizer):
    model = net()
    groups, names = settings_of(optimizer, model)
    twin = PlainLoop(model, optimizer.split()[0], names, max_norm)
    stepper = Stepper(model, OPTIMIZERS[optimizer](groups), policy, accumulate=3, max_norm=max_norm, keep_casts=True)
    draw = random.Random(4)
    batches = [[draw.randrange(40) for _ in range(draw.choice([1, 2, 5, 9]))] for _ in range(3 * 6 + 2)]
    reports = [stepper.step(lambda b=b: (loss_sum(model, b), len(b))) for b in batches] + [stepper.flush()]
    reports = [report for report in reports if report]
    windows = [batches[i : i + 3] for i in range(0, len(batches), 3)]
    assert len(reports) == len(windows) == 7
    for report, window in zip(reports, windows, strict=True):
        loss, norm, applied = twin.window([lambda m, b=b: (loss_sum(m, b), len(b)) for b in window])
        assert report.loss == pytest.approx(loss, rel=ROUNDING)
        assert report.grad_norm == pytest.approx(norm, rel=ROUNDING)
        assert report.applied == applied
    assert twin.largest_gap(model) < ROUNDING


@pytest.mark.parametrize("policy", ["bf16", "fp16 scale.init=4096", "fp16 on_overflow=skip scale.init=4096"])
def test_ragged_windows_in_16_bit_follow_it_as_far_as_16_bit_goes(policy):
    model = net()
    groups, names = settings_of("sgd", model)
    twin = PlainLoop(model, "sgd", names)
    stepper = Stepper(model, OPTIMIZERS["sgd"](groups), policy, accumulate=2, keep_casts=True)
    eps = 2.0**-7 if policy == "bf16" else 2.0**-10
    for window in ([[1, 2, 3], [4]], [[5], [6, 7, 8, 9]], [[10, 11], [12]]):
        for batch in window:
            report = stepper.step(lambda b=batch: (loss_sum(model, b), len(b)))
        loss, norm, _ = twin.window([lambda m, b=b: (loss_sum(m, b), len(b)) for b in window])
        assert report.loss == pytest.approx(loss, rel=4 * eps)
        assert report.grad_norm == pytest.approx(norm, rel=4 * eps)


def test_the_twin_itself_agrees_with_torch_in_float64():
    for rule in ("sgd", "adamw"):
        model = net().double()
        groups, names = settings_of(rule, model)
        twin = PlainLoop(model, rule, names, max_norm=1.0)
        optimizer = OPTIMIZERS[rule](groups)
        for step in range(5):
            (loss_sum(model, [step, step + 1]) / 2).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            twin.window([lambda m, s=step: (loss_sum(m, [s, s + 1]), 2)])
        assert twin.largest_gap(model) < 1e-12


# --- a window is one big batch ---------------------------------------------------------------------------------------


def train(cuts, count=len, policy="fp32", optimizer="sgd", indices=range(24), accumulate=100):
    """Weights after one window over ``indices`` cut at ``cuts``."""
    model = net()
    stepper = Stepper(
        model, OPTIMIZERS[optimizer](settings_of(optimizer, model)[0]), policy, accumulate=accumulate, keep_casts=True
    )
    bounds = [0, *cuts, len(indices)]
    for low, high in itertools.pairwise(bounds):
        batch = list(indices)[low:high]
        assert stepper.step(lambda b=batch: (loss_sum(model, b), count(b))) is None
    report = stepper.flush()
    return [p.detach() for p in model.parameters()], report


@pytest.mark.parametrize("optimizer", ["sgd", "adamw fused"])
@pytest.mark.parametrize("policy", SCALED)
@pytest.mark.parametrize("cuts", [[8, 16], [1], [23], [1, 2, 3, 20], list(range(1, 24))])
def test_however_it_is_cut_a_window_equals_one_big_batch(cuts, policy, optimizer):
    weights, report = train(cuts, policy=policy, optimizer=optimizer)
    expected, other = train([], policy=policy, optimizer=optimizer)
    assert report.loss == pytest.approx(other.loss, rel=1e-6)
    assert report.grad_norm == pytest.approx(other.grad_norm, rel=1e-5)
    for a, b in zip(weights, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


COUNTS = {
    "int": len,
    "float": lambda b: float(len(b)),
    "bool and int": lambda b: True if len(b) == 1 else len(b),
    "numpy int": lambda b: np.int64(len(b)),
    "numpy float": lambda b: np.float32(len(b)),
    "int64 tensor": lambda b: torch.tensor(len(b)),
    "int32 tensor of one element": lambda b: torch.tensor([len(b)], dtype=torch.int32),
    "float tensor": lambda b: torch.tensor(float(len(b))),
    "double tensor": lambda b: torch.tensor(len(b), dtype=torch.float64),
    "half tensor": lambda b: torch.tensor(len(b), dtype=torch.float16),
    "bf16 tensor": lambda b: torch.tensor(len(b), dtype=torch.bfloat16),
    "a sum of a mask": lambda b: torch.ones(len(b), dtype=torch.bool).sum(),
    "with a graph": lambda b: torch.tensor(float(len(b)), requires_grad=True),
    "mixed": lambda b: len(b) if len(b) % 2 else torch.tensor(len(b)),
}


@pytest.mark.parametrize("optimizer", ["sgd", "adamw fused"])
@pytest.mark.parametrize("policy", FEW)
@pytest.mark.parametrize("kind", COUNTS)
def test_a_count_may_be_any_kind_of_number(kind, policy, optimizer):
    weights, report = train([3, 4, 11], COUNTS[kind], policy, optimizer)
    expected, other = train([3, 4, 11], len, policy, optimizer)
    assert report.to_dict() == other.to_dict()
    for a, b in zip(weights, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_counts_in_16_bit_add_up_exactly(dtype):
    """256 + 1 is 256 in bf16, and 2048 + 1 is 2048 in fp16."""
    model = nn.Linear(1, 1, bias=False)
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32", accumulate=64)
    for _ in range(64):
        report = stepper.step(lambda: (model(torch.ones(1, 1)).sum(), torch.tensor(129.0, dtype=dtype)))
    assert report.grad_norm == pytest.approx(64 / (64 * torch.tensor(129.0, dtype=dtype).item()), rel=1e-6)


@pytest.mark.parametrize("policy", SCALED)
def test_a_mean_counts_each_micro_batch_alike(policy):
    """What the mean form is: not the mean over samples, unless the micro-batches are equal."""
    model, twin = net(), net()
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), policy, accumulate=2, keep_casts=True)
    stepper.step(lambda: loss_sum(model, [1]))
    report = stepper.step(lambda: loss_sum(model, [2, 3, 4]) / 3)
    loss = (loss_sum(twin, [1]) + loss_sum(twin, [2, 3, 4]) / 3) / 2
    assert report.loss == pytest.approx(loss.item(), rel=1e-6)
    for p, gradient in zip(twin.parameters(), torch.autograd.grad(loss, list(twin.parameters())), strict=True):
        p.data -= 0.1 * gradient
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_the_weighting_of_means_is_documented():
    text = " ".join(Path(halfstep.window.__file__).read_text().split())
    assert "a mean (each micro-batch counts alike), or (sum, count) of tokens or samples" in text


@pytest.mark.parametrize("policy", SCALED)
@pytest.mark.parametrize("num", [1, 2, 3])
def test_a_short_last_window_weighs_what_it_holds(policy, num):
    """Divided by 4, the gradient of a last window of fewer micro-batches would be too small by num/4."""
    model, whole = net(), net()
    short = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), policy, accumulate=4, keep_casts=True)
    exact = Stepper(whole, torch.optim.SGD(whole.parameters(), lr=0.1), policy, accumulate=num)
    for i in range(num):
        assert short.step(lambda i=i: loss_sum(model, [i])) is None
        expected = exact.step(lambda i=i: loss_sum(whole, [i]))
    assert short.flush().to_dict() == expected.to_dict()
    for a, b in zip(model.parameters(), whole.parameters(), strict=True):
        assert torch.equal(a, b)


def test_flush_of_nothing_is_none():
    model = net()
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32", accumulate=2)
    assert stepper.flush() is None
    stepper.step(lambda: loss_sum(model, [1]))
    assert stepper.flush().step == 1
    assert stepper.flush() is None
    stepper.step(lambda: loss_sum(model, [1]))
    assert stepper.step(lambda: loss_sum(model, [2])).step == 2
    assert stepper.flush() is None
    assert stepper.num_steps == 2


# --- nothing to count ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["adamw", "adamw fused"])
@pytest.mark.parametrize("policy", SCALED)
@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("empty", [0, 1, 2])
def test_a_micro_batch_without_a_token_changes_nothing(empty, as_tensor, policy, optimizer):
    """Also the first one of a run, by whose count the sums are scaled."""
    count = (lambda b: torch.tensor(len(b))) if as_tensor else len
    cuts = {0: [0, 5], 1: [5, 5], 2: [5, 24]}[empty]
    weights, report = train(cuts, count, policy, optimizer)
    expected, other = train([5], count, policy, optimizer)
    assert report.applied
    assert report.loss == pytest.approx(other.loss, rel=1e-6)
    for a, b in zip(weights, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("optimizer", ["adamw", "adamw fused"])
@pytest.mark.parametrize("policy", [*SCALED, "fp16", "fp16 on_overflow=skip", "fp16 on_overflow=skip scale.init=1"])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_a_window_without_a_token_is_skipped_and_says_nothing_about_the_scale(as_tensor, policy, optimizer):
    model = net()
    stepper = Stepper(
        model, OPTIMIZERS[optimizer](settings_of(optimizer, model)[0]), policy, accumulate=2, keep_casts=True
    )
    scale = stepper.scale.value.item()
    before = [p.detach().clone() for p in model.parameters()]
    for _ in range(2):
        report = stepper.step(lambda: (loss_sum(model, []), torch.tensor(0) if as_tensor else 0))
    assert not report.applied
    assert report.reason == "the count is 0: there is nothing to take the mean of"
    assert stepper.scale.value.item() == scale
    for a, b in zip(model.parameters(), before, strict=True):
        assert torch.equal(a, b)
    for i in range(2):
        report = stepper.step(lambda i=i: (loss_sum(model, [i]) / 64, 1))
    assert report.applied
    assert math.isfinite(report.loss)


# --- how sums are scaled ---------------------------------------------------------------------------------------------


def test_a_sum_over_thousands_of_tokens_does_not_overflow_at_the_scale_of_a_mean():
    """4096 x 2^16 would leave fp16 at once."""
    model = nn.Linear(4, 1)
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp16")
    x = torch.linspace(-1, 1, 4 * 4096).reshape(4096, 4)
    report = stepper.step(lambda: ((model(x).float() - 0.1).abs().sum() / 8, 4096))
    assert (report.num_replays, report.scale) == (0, 2.0**16)


@pytest.mark.parametrize("first", [1, 2, 3, 1000, 0.5])
def test_the_first_count_of_a_run_changes_no_bit_of_later_ones(first):
    results = []
    for count in (first, 64):
        model = net()
        policy = "fp32 scale=static scale.init=1024"
        stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), policy)
        stepper.step(lambda c=count, m=model: (loss_sum(m, [1]) * 0, c))
        for i in range(3):
            stepper.step(lambda i=i, m=model: (loss_sum(m, [i, i + 1]), 2))
        results.append([p.detach() for p in model.parameters()])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
