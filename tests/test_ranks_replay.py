"""Replay over ranks: alone where a micro-batch is a rank's own, together in the last one, and nobody waits in vain.

A rank that waited for a collective which another leaves out would hang; ``World.run`` ends such a test.
"""

from __future__ import annotations

import math

import pytest
import torch
from reference.planted_ranks import OneProcess, PlantedNet, batches, engine_over, plans, square_loss, whole
from reference.rank_scales import RankScales, Rules, Stopped

from halfstep.errors import ScaleExhausted
from halfstep.stepper import Stepper

LR = 0.05
MENDED = (0.1, 0.0, 0.0)
"""A tenth of the micro-batches overflow, of each rank others and with other limits; a lower scale mends all."""
RISING = Rules(interval=1)
"""The scale grows with every clean window, so that it does not stay below what overflows."""
HARD = (0.2, 0.1, 0.06)
MIXED = (0.2, 0.01, 0.01)


def alone_in(engine, accumulate, is_late=False):
    """Which micro-batches of a window are a rank's own."""
    return [engine == "ddp" and (is_late or micro + 1 < accumulate) for micro in range(accumulate)]


def run_plan(engine, policy, accumulate, plan, seed):
    """On this rank: of each window what it did, the scale's state after it, its forward passes, and the weights."""
    rank, num = torch.distributed.get_rank(), torch.distributed.get_world_size()
    net = PlantedNet()
    model = engine_over(net, engine)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    stepper = Stepper(model, optimizer, policy, accumulate=accumulate, watch=False)
    history = []
    for window, parts in zip(plan, batches(len(plan), accumulate, num, seed), strict=True):
        calls, report = net.calls, None
        for limit, of_ranks in zip(window[rank], parts, strict=True):
            net.limit = limit
            x, y = of_ranks[rank]
            try:
                report = stepper.step(lambda x=x, y=y: finished(net, *square_loss(model, x, y)))
            except ScaleExhausted:
                report = None
                break
        fate = report and (report.applied, report.scale, report.num_replays)
        state = stepper.state_dict()
        scale = state["scale"]["value"], state["scale"]["num_clean"], state["had_hopeless"]
        weights = [whole(weight) for weight in stepper.ranks.module.parameters()]
        history.append((fate, scale, net.calls - calls, weights))
    return history


def finished(net, loss, count):
    return net.finish(loss), count


def check(histories, alone, plan, rules, seed, is_exact=True):
    """Every rank did what the plain twin says, and the weights are those of one process over the same samples.

    Returns how many windows were applied, and how many stopped the run.
    """
    num, accumulate = len(histories), len(alone)
    data = batches(len(plan), accumulate, num, seed)
    unit = 2.0 ** round(math.log2(max(len(x) for x, _ in data[0][0])))  # of the largest first count
    twin, one, num_stopped = RankScales(num, alone, rules), OneProcess(LR), 0
    for step, (window, parts) in enumerate(zip(plan, data, strict=True)):
        got = [history[step] for history in histories]
        applied = False
        try:
            applied, scale, replays = twin.window([[limit * unit for limit in of_rank] for of_rank in window])
            assert [fate for fate, *_ in got] == [(applied, scale, each) for each in replays], step
            assert [calls for _, _, calls, _ in got] == [accumulate + each for each in replays], step
        except Stopped:
            assert [fate for fate, *_ in got] == [None] * num, step
            num_stopped += 1
        assert {state for _, state, *_ in got} == {(twin.scale, twin.num_clean, twin.had_hopeless)}, step
        for weights in zip(*(weights for *_, weights in got), strict=True):
            assert all(torch.equal(weights[0], each) for each in weights), step
        if applied:
            one.window([sample for of_ranks in parts for sample in of_ranks])
        if is_exact:
            one.check(got[0][3])
    return one.num_steps, num_stopped


def run(world, engine, accumulate, num_windows, shares, rules=None, seed=0):
    rules, plan = rules or Rules(), plans(num_windows, accumulate, world.num, seed, shares)
    histories = world.run(run_plan, engine, rules.policy(), accumulate, plan, seed, timeout=150)
    return check(histories, alone_in(engine, accumulate), plan, rules, seed), histories


def test_ranks_that_overflow_apart_lose_nothing_and_stay_together_over_200_steps(world2):
    (num_applied, num_stopped), histories = run(world2, "ddp", 3, 200, MENDED, RISING)
    assert (num_applied, num_stopped) == (200, 0)
    replays = [[fate[2] for fate, *_ in history] for history in histories]
    assert sum(a != b for a, b in zip(*replays, strict=True)) > 40  # not in lockstep


@pytest.mark.parametrize(("engine", "accumulate"), [("ddp", 1), ("ddp", 2), ("fsdp", 1), ("fsdp", 2)])
def test_any_schedule_of_overflows_does_what_the_plain_twin_does(world2, engine, accumulate):
    """Batches that no scale mends and NaN losses among them, some of which stop the run, on all ranks in one step."""
    rules = Rules(init=2.0**5, interval=2, floor=0.5)
    (num_applied, num_stopped), _ = run(world2, engine, accumulate, 30, HARD, rules)
    assert num_applied > 10
    assert num_stopped > 0


def test_four_ranks(world4):
    (num_applied, _), _ = run(world4, "ddp", 2, 20, MIXED)
    assert num_applied > 10


def test_the_first_micro_batch_after_ddp_has_seen_a_backward_pass_is_a_ranks_own(world2):
    """DDP orders its buckets then, once, by asking the other ranks, and such a forward pass could not run twice."""
    calm = [[math.inf] * 2] * 2
    plan, rules = [calm, [[4.0, math.inf], [math.inf] * 2], calm], Rules()
    histories = world2.run(run_plan, "ddp", rules.policy(), 2, plan, 0)
    assert check(histories, alone_in("ddp", 2), plan, rules, 0) == (3, 0)
    assert histories[0][1][0][2] > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_more_schedules(request, seed):
    world = request.getfixturevalue("world4" if seed % 4 == 3 else "world2")
    engine, accumulate = [("ddp", 1), ("ddp", 2), ("ddp", 3), ("fsdp", 1), ("fsdp", 2)][seed % 5]
    floor = 2.0 ** (seed % 3 - 1)
    rules = Rules(max(floor, 2.0 ** (seed % 7)), 2.0, 2.0 ** (-1 - seed % 2), 2 + seed % 4, floor)
    (num_applied, _), _ = run(world, engine, accumulate, 100, (HARD, MIXED)[seed % 2], rules, seed)
    assert num_applied > 10


@pytest.mark.slow
@pytest.mark.parametrize("num", [2, 4])
@pytest.mark.parametrize(("engine", "accumulate"), [("ddp", 1), ("ddp", 3), ("fsdp", 1), ("fsdp", 3)])
def test_200_steps_of_each_engine(request, engine, accumulate, num):
    (num_applied, num_stopped), _ = run(request.getfixturevalue(f"world{num}"), engine, accumulate, 200, MENDED, RISING)
    assert (num_applied, num_stopped) == (200, 0)


# --- gradients that come together at the window's end -----------------------------------------------------------------


@pytest.mark.parametrize("accumulate", [1, 2])
def test_16_bit_weights_are_alone_in_every_micro_batch(world2, accumulate):
    """Their gradients are brought together after the last one, so that each rank replays each by itself."""
    rules, shares = Rules(init=2.0**5, interval=2), HARD
    plan = plans(30, accumulate, 2, 0, shares)
    histories = world2.run(run_plan, "ddp", rules.policy("bf16 master=split16"), accumulate, plan, 0)
    num_applied, num_stopped = check(histories, [True] * accumulate, plan, rules, 0, is_exact=False)
    assert num_applied > 5
    assert num_stopped > 0


def test_16_bit_weights_are_those_of_one_process(world2):
    """Both compute the same 16-bit gradients of the same weights and add them in fp32, in another order.

    That is an error of a few eps of fp32 in a step; a weight that it carries over a rounding edge of bf16 changes the
    gradient by less than 2^-8 of itself. A run whose first weight begins one such edge off is the yardstick.
    """
    plan = plans(60, 2, 2, 0, MENDED)
    ours = world2.run(run_plan, "ddp", Rules().policy("bf16 master=split16"), 2, plan, 0)[0][-1][3]
    one, nudged = (one_process(plan, nudge) for nudge in (0.0, 2.0**-9))
    gap, spread = (max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True)) for other in (ours, nudged))
    assert gap <= spread < 0.01


def one_process(plan, nudge):
    net = PlantedNet()
    with torch.no_grad():
        net.body.weight[0, 0] += nudge
    optimizer = torch.optim.SGD(net.parameters(), lr=LR)
    stepper = Stepper(net, optimizer, "bf16 master=split16", accumulate=4, watch=False)
    for parts in batches(len(plan), 2, 2, 0):
        for of_ranks in parts:
            for x, y in of_ranks:
                report = stepper.step(lambda x=x, y=y: square_loss(net, x, y))
        assert report.applied
    return [weight.detach().float() for weight in net.parameters()]
