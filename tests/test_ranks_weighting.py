"""Token-true weighting over ranks: a step is the sum of all losses over the sum of all counts, whoever held them.

Against the closed form of it, in fp64.
"""

from __future__ import annotations

import pytest
import torch
from reference.planted_ranks import PlantedNet, batches, engine_over, whole
from torch import distributed

from halfstep.stepper import Stepper

LR = 0.5
EPS = torch.finfo(torch.float32).eps

COUNTS = {
    "int": lambda x: len(x),
    "float": lambda x: float(len(x)),
    "device": lambda x: torch.tensor(len(x)),
    "device float": lambda x: torch.tensor(float(len(x))),
    "as it comes": lambda x: [len(x), float(len(x)), torch.tensor(len(x))][len(x) % 3],
}


def steps(engine, policy, kind, parts_of_windows, accumulate, flushes=False):
    """Weights after each window of (x, y) by micro-batch and rank, and what was reported. ``kind``: of the count.

    None instead of (x, y): the rank has no micro-batch there; an x without a row: one that counts 0.
    """
    rank = distributed.get_rank()
    net = PlantedNet()
    model = engine_over(net, engine)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    stepper = Stepper(model, optimizer, policy, accumulate=accumulate, watch=False)
    history = []
    for parts in parts_of_windows:
        report = None
        for of_ranks in parts:
            if of_ranks[rank] is not None:
                x, y = of_ranks[rank]
                report = stepper.step(lambda x=x, y=y: loss_of(model, x, y, kind))
        if flushes:
            report = stepper.flush() or report
        numbers = report.loss, report.grad_norm, report.applied, report.reason
        history.append((numbers, [whole(p) for p in stepper.ranks.module.parameters()]))
    return history


def loss_of(model, x, y, kind):
    """Sum and count; the mean alone for ``mean``."""
    loss = (model(x) - y).square()
    return loss.mean() if kind == "mean" else (loss.sum(), COUNTS[kind](x))


def closed_form(weights, parts, kind):
    """Loss and new weights of one step: sum of the losses / sum of the counts, with the derivative by hand."""
    weight_a, bias_a, weight_b, bias_b = (w.double() for w in weights)
    loss = count = 0.0
    sums = [torch.zeros_like(w) for w in (weight_a, bias_a)]
    for x, y in (sample for of_ranks in parts for sample in of_ranks if sample is not None):
        x, y = x.double(), y.double()
        miss = x @ (weight_a + weight_b).T + bias_a + bias_b - y
        share = 1.0 / len(x) if kind == "mean" else 1.0
        loss += float(miss.square().sum()) * share
        count += 1 if kind == "mean" else len(x)
        sums[0] += 2 * share * miss.T @ x
        sums[1] += 2 * share * miss.sum(0)
    gradients = [s / count for s in (*sums, *sums)]
    norm = float(torch.stack([g.square().sum() for g in gradients]).sum().sqrt())
    return loss / count, norm, [w.double() - LR * g for w, g in zip(weights, gradients, strict=True)]


def check(histories, windows, kind):
    before = [p.detach() for p in PlantedNet().parameters()]
    for step, parts in enumerate(windows):
        got = [history[step] for history in histories]
        assert repr(got[0][0]) == repr(got[1][0]), step
        for one, other in zip(got[0][1], got[1][1], strict=True):
            assert torch.equal(one, other), step
        (loss, norm, applied, _), weights = got[0]
        expected_loss, expected_norm, expected = closed_form(before, parts, kind)
        assert applied
        # Each is a mean of at most 20 samples of |output - y| < 4, an output of 9 products and sums, in fp32.
        room = 30 * EPS * 16
        assert abs(loss - expected_loss) < room, step
        assert abs(norm - expected_norm) < room, step
        for weight, its in zip(weights, expected, strict=True):
            assert float((weight.double() - its).abs().max()) < LR * room, step
        before = weights


@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_ragged_batches_weigh_what_they_hold(world2, engine):
    windows = batches(3, 2, 2)
    counts = [[sum(len(of_ranks[rank][0]) for of_ranks in parts) for rank in range(2)] for parts in windows]
    assert all(a != b for a, b in counts)
    for kind in (*COUNTS, "mean"):
        for policy in ("fp32", "fp32 scale=dynamic scale.init=1024"):
            check(world2.run(steps, engine, policy, kind, windows, 2), windows, kind)


@pytest.mark.parametrize("kind", ["int", "device"])
def test_a_rank_that_counts_0_weighs_nothing(world2, kind):
    """Its loss is 0 x output, so that it takes part in what its engine does."""
    windows = batches(3, 1, 2)
    for parts in windows[:2]:
        parts[0][1] = torch.empty(0, 4), torch.empty(0, 1)
    for engine in ("ddp", "fsdp"):
        # The unit is fixed by the first counts: 0 has no say in it.
        for policy in ("fp32", "fp32 scale=dynamic scale.init=1024"):
            check(world2.run(steps, engine, policy, kind, windows, 1), windows, kind)


@pytest.mark.parametrize("kind", ["int", "device"])
def test_where_all_counts_are_0_nobody_steps_and_the_scale_stays(world2, kind):
    empty = torch.empty(0, 4), torch.empty(0, 1)
    for engine in ("ddp", "fsdp"):
        windows = [[[empty, empty]], *batches(1, 1, 2)]
        for history in world2.run(steps, engine, "fp32 scale=dynamic scale.init=1024", kind, windows, 1):
            (_, _, applied, reason), weights = history[0]
            assert not applied
            assert reason == "the count is 0: there is nothing to take the mean of"
            assert all(torch.equal(w, own) for w, own in zip(weights, PlantedNet().parameters(), strict=True))
            assert history[1][0][2]


def test_a_short_window_that_is_shorter_on_some_ranks(world2):
    """3 micro-batches and 1, 2 and none, none and 2: ``flush`` ends the window of all."""
    windows = batches(3, 3, 2)
    for parts, nums in zip(windows, [(2, 1), (2, 0), (0, 2)], strict=True):
        for micro, of_ranks in enumerate(parts):
            for rank, num in enumerate(nums):
                if micro >= num:
                    of_ranks[rank] = None
    for policy in ("fp32", "fp32 scale=dynamic scale.init=1024"):
        for kind in ("int", "device", "mean"):
            check(world2.run(steps, "ddp", policy, kind, windows, 4, True), windows, kind)


def units(counts):
    """The unit of the scaled sums of many tokens, and the largest gradient that a rank saw in fp16."""
    net = PlantedNet()
    model = engine_over(net, "ddp")
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=LR), "fp16 scale.init=1024", watch=False)
    seen = []
    net.body.register_full_backward_hook(lambda module, _, gradient: seen.append(float(gradient[0].abs().max())))
    count = counts[distributed.get_rank()]
    x, y = batches(1, 1, 1)[0][0][0]
    report = stepper.step(lambda: ((model(x) - y).square().mean() * count, count))
    return stepper.state_dict()["unit"], report.num_replays, report.applied, max(seen)


def test_first_counts_that_differ_have_one_unit(world2):
    """The power of two nearest to the largest: what fp16 meets is near a mean on the rank that has most tokens."""
    for counts in ((3000, 5000), (5000, 70), (0, 5000)):
        got = world2.run(units, counts)
        assert [unit for unit, *_ in got] == [4096.0, 4096.0]
        assert [rest[:2] for _, *rest in got] == [[0, True]] * 2
        assert max(largest for *_, largest in got) < 1024 * 10
