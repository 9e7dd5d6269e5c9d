"""Where torch's own scalers let ranks drift apart: the same scripts with the Stepper, in one test each."""

from __future__ import annotations

import math

import torch
from reference.planted_ranks import engine_over, whole
from torch import distributed, nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from halfstep.stepper import Stepper

SCALE = 2.0**16


class Rows(nn.Module):
    """``weight`` has a row for each rank, which is its shard; the gradient of the rows ``bad`` is inf."""

    def __init__(self, num_rows, bad):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(num_rows, 4))
        self.bad = bad

    def forward(self):
        return _SpoilRows.apply(self.weight, self.bad).sum()


class _SpoilRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, rows):
        ctx.rows = rows
        return weight.clone()

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        gradient[list(ctx.rows)] = math.inf
        return gradient, None


def sharded_scaler(bad, unscales):
    """FSDP1's scaler over a shard, whose gradient is this rank's own: weights and scale after a step by fused SGD."""
    rank = distributed.get_rank()
    model = Rows(1, [0] if rank in bad else [])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    scaler = ShardedGradScaler("cpu", init_scale=SCALE)
    scaler.scale(model()).backward()
    if unscales:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    return model.weight.detach()[0], scaler.get_scale()


def sharded_stepper(bad):
    """The same with shards of ``fully_shard`` and a fused optimizer that it has."""
    rank = distributed.get_rank()
    model = engine_over(Rows(2, bad), "fsdp")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, fused=True)
    stepper = Stepper(model, optimizer, "fp32 scale=dynamic on_overflow=skip", watch=False)
    report = stepper.step(model)
    return whole(model.weight)[rank], stepper.scale.value.item(), report.applied


def test_a_sharded_scaler_without_unscale_steps_on_the_ranks_that_saw_nothing(world2):
    (weights, scale), (others, other_scale) = world2.run(sharded_scaler, [1], False)
    assert not torch.equal(weights, torch.ones(4)), "torch has mended this: update docs/ranks.md"
    assert torch.equal(others, torch.ones(4))
    assert (scale, other_scale) == (SCALE, SCALE / 2)
    for weights, scale, applied in world2.run(sharded_stepper, [1]):
        assert torch.equal(weights, torch.ones(4))
        assert (scale, applied) == (SCALE / 2, False)


def test_a_summed_flag_of_2_is_applied_by_a_fused_optimizer(world2):
    for weights, scale in world2.run(sharded_scaler, [0, 1], True):
        assert weights.isinf().all(), "torch has mended this: update docs/ranks.md"
        assert scale == SCALE / 2
    for weights, scale, applied in world2.run(sharded_stepper, [0, 1]):
        assert torch.equal(weights, torch.ones(4))
        assert (scale, applied) == (SCALE / 2, False)


# --- ranks that have other numbers of batches -------------------------------------------------------------------------

TRUE = torch.tensor([1.0, 2.0, 3.0, 4.0])
NUM = 11


def uneven_scalers():
    """A scaler on each rank; rank 1 has no batch in every fourth round, and its scaler no step. Gradients seen."""
    rank = distributed.get_rank()
    weight = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=5)
    seen = []
    for number in range(NUM):
        is_short = number % 4 == 3
        if is_short and rank == 1:
            continue
        optimizer.zero_grad()
        scaler.scale((weight * TRUE).sum()).backward()
        if not is_short:
            distributed.all_reduce(weight.grad)
            weight.grad /= 2
        scaler.unscale_(optimizer)
        seen.append(weight.grad[0].item())
        scaler.step(optimizer)
        scaler.update()
    return set(seen), scaler.get_scale()


class Product(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self):
        return (self.weight * TRUE).sum()


def uneven_steppers():
    """The rank without a batch returns 0 of 0, which weighs nothing."""
    rank = distributed.get_rank()
    model = engine_over(Product(), "ddp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    policy = "fp32 scale=dynamic scale.init=1024 scale.interval=5"
    stepper = Stepper(model, optimizer, policy, watch=False)
    seen = set()
    for number in range(NUM):
        has_none = number % 4 == 3 and rank == 1
        report = stepper.step(lambda none=has_none: (0 * model(), 0) if none else (model(), 1))
        seen.add(report.grad_norm)
    return seen, stepper.scale.value.item()


def test_scales_of_uneven_ranks(world2):
    (seen, scale), (others, other_scale) = world2.run(uneven_scalers)
    assert scale != other_scale, "torch has mended this: update docs/ranks.md"
    assert (seen, others) == ({1.0, 0.75}, {1.0, 1.5})
    (seen, scale), (others, other_scale) = world2.run(uneven_steppers)
    assert scale == other_scale == 4096.0
    assert seen == others == {TRUE.norm().item()}


# --- a decision of rank 0 --------------------------------------------------------------------------------------------


def losses(x):
    return [math.nan if rank == x else 1.0 for rank in range(2)]


def decided_by_rank_0(nan_rank):
    """A loop in bf16 that skips where the loss of rank 0 is not finite: its weights."""
    model = engine_over(Product(), "ddp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model() * losses(nan_rank)[distributed.get_rank()]
    flag = loss.detach().isfinite().float()
    distributed.broadcast(flag, 0)
    loss.backward()
    if flag.item():
        optimizer.step()
    return whole(next(model.parameters()))


def decided_by_all(nan_rank):
    model = engine_over(Product(), "ddp")
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16", watch=False)
    report = stepper.step(lambda: model() * losses(nan_rank)[distributed.get_rank()])
    return whole(next(model.parameters())), report.reason


def test_a_skip_that_rank_0_decides(world2):
    for weights in world2.run(decided_by_rank_0, 1):
        assert weights.isnan().all()
    for weights, reason in world2.run(decided_by_all, 1):
        assert torch.equal(weights, torch.ones(4))
        assert reason.startswith("the loss of rank 1 is not finite")
