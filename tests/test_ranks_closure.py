"""Optimizers that evaluate the loss themselves, and closures that fail, over ranks."""

from __future__ import annotations

import pytest
import torch
from reference.planted_ranks import PlantedNet, batches, engine_over, square_loss, whole
from torch import distributed

from halfstep.errors import HalfstepError
from halfstep.stepper import Stepper


class Sharpness(torch.optim.Optimizer):
    """Takes the gradient from a little way up the slope, which a second evaluation finds there."""

    def __init__(self, parameters):
        super().__init__(parameters, {})
        self.inner = torch.optim.SGD(self.param_groups, lr=0.05)

    @torch.no_grad()
    def first_step(self):
        self.moved = [(p, p.grad * 0.1) for group in self.param_groups for p in group["params"]]
        for p, by in self.moved:
            p.add_(by)

    @torch.no_grad()
    def second_step(self):
        for p, by in self.moved:
            p.sub_(by)
        self.inner.step()

    def step(self, closure=None):
        assert closure is not None
        self.first_step()
        closure()
        self.second_step()


OPTIMIZERS = {
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.5, max_iter=4),
    "lbfgs with a line search": lambda p: torch.optim.LBFGS(p, lr=0.5, max_iter=4, line_search_fn="strong_wolfe"),
    "sharpness": Sharpness,
}


def train(engine, optimizer):
    """Loss, replays and evaluations of each step on this rank, and the weights; rank 1 overflows in the second one."""
    is_one = engine == "one"
    rank = 0 if is_one else distributed.get_rank()
    net = PlantedNet()
    model = engine_over(net, engine)
    policy = "fp32 scale=dynamic scale.init=64"
    stepper = Stepper(model, OPTIMIZERS[optimizer](model.parameters()), policy, watch=False)
    outcomes = []
    for step, (of_ranks,) in enumerate(batches(4, 1, 2)):
        x, y = (torch.cat(parts) for parts in zip(*of_ranks, strict=True)) if is_one else of_ranks[rank]
        net.limit = 2.0 if step == 1 and (is_one or rank == 1) else float("inf")
        calls = net.calls
        report = stepper.step(lambda x=x, y=y: finished(net, *square_loss(model, x, y)))
        outcomes.append((report.loss, report.num_replays > 0, net.calls - calls, report.applied))
    return outcomes, [whole(p) for p in stepper.ranks.module.parameters()]


def finished(net, loss, count):
    return net.finish(loss), count


@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_all_ranks_evaluate_as_often_and_step_as_one_process_does(world2, engine):
    for optimizer in OPTIMIZERS:
        if engine == "fsdp" and "lbfgs" in optimizer:
            continue
        (outcomes, weights), (others, other_weights) = world2.run(train, engine, optimizer)
        expected, of_one = train("one", optimizer)
        assert outcomes == others
        assert [replayed for _, replayed, *_ in outcomes] == [False, True, False, False]
        assert all(applied for *_, applied in outcomes)
        for (loss, *_), (one_loss, *_) in zip(outcomes, expected, strict=True):
            # Sums of at most 10 squares in another order; LBFGS divides differences of gradients by each other.
            assert loss == pytest.approx(one_loss, rel=1e-4)
        for a, b, one in zip(weights, other_weights, of_one, strict=True):
            assert torch.equal(a, b)
            assert torch.allclose(a, one, atol=1e-3)


def lbfgs_over_shards():
    model = engine_over(PlantedNet(), "fsdp")
    with pytest.raises(HalfstepError) as caught:
        Stepper(model, torch.optim.LBFGS(model.parameters()), "fp32", watch=False)
    return str(caught.value)


def test_lbfgs_over_shards_is_refused(world2):
    for message in world2.run(lbfgs_over_shards):
        assert "LBFGS over weights that are shards: it lays all weights end to end" in message


# --- a closure that fails on one rank ---------------------------------------------------------------------------------


def fail_once(fails):
    """Weights after windows in which rank 1's reader fails in an early micro-batch, and it tries that one again."""
    rank = distributed.get_rank()
    net = PlantedNet()
    model = engine_over(net, "ddp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    stepper = Stepper(model, optimizer, "fp32 scale=dynamic scale.init=64", accumulate=2, watch=False)
    for step, parts in enumerate(batches(3, 2, 2)):
        for micro, of_ranks in enumerate(parts):
            x, y = of_ranks[rank]
            if fails and (step, micro, rank) == (1, 0, 1):
                with pytest.raises(OSError, match="no such sample"):
                    stepper.step(lambda x=x, y=y: failing(square_loss(model, x, y)))
            report = stepper.step(lambda x=x, y=y: square_loss(model, x, y))
        assert report.applied
    return [whole(p) for p in net.parameters()]


def failing(result):
    raise OSError("no such sample")


def test_a_failure_in_a_micro_batch_of_its_own_is_a_ranks_own(world2):
    for ours, plain in zip(world2.run(fail_once, True), world2.run(fail_once, False), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))
