"""The verdict over ranks: 0 or 1, the same on all of them in the same step, from one small collective."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from reference.loop import assert_same
from reference.planted_ranks import PlantedNet, batches, engine_over, square_loss, whole
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from halfstep.policy import LossScale
from halfstep.ranks.engine import ranks_of
from halfstep.scale import make_scale
from halfstep.stepper import Stepper
from halfstep.window import Window, judge

LARGEST = torch.finfo(torch.float32).max
OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "sgd fused": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "adagrad fused": lambda p: torch.optim.Adagrad(p, lr=0.01, fused=True),
}
NOT_SHARDED = ("sgd fused", "adagrad fused")
"""torch 2.13 has no form of them for the parameters of fully_shard."""


# --- what is added up, by itself --------------------------------------------------------------------------------------

CASES = {
    # norms of what each rank holds, losses of each, what is found, who is named
    "all finite": ((1.0, 2.0, 3.0), (1.0, 1.0, 1.0), 0.0, None),
    "inf on one": ((1.0, math.inf, 3.0), (1.0, 1.0, 1.0), 1.0, None),
    "nan on one": ((1.0, 2.0, math.nan), (1.0, 1.0, 1.0), 1.0, None),
    "inf and nan": ((math.inf, math.nan, 3.0), (1.0, 1.0, 1.0), 1.0, None),
    "inf on all": ((math.inf,) * 3, (1.0, 1.0, 1.0), 1.0, None),
    "largest squares": ((LARGEST / 2, LARGEST / 2, LARGEST / 2), (1.0, 1.0, 1.0), 0.0, None),
    "subnormal": ((1e-45, 1e-45, 1e-45), (1.0, 1.0, 1.0), 0.0, None),
    "zero": ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0), 0.0, None),
    "losses that cancel": ((1.0, 1.0, 1.0), (math.inf, -math.inf, 1.0), 0.0, "the losses of 2 ranks"),
    "nan loss": ((1.0, 1.0, 1.0), (1.0, 1.0, math.nan), 0.0, "the loss of rank 2"),
    "nan loss and gradient": ((1.0, 1.0, math.nan), (1.0, 1.0, math.nan), 1.0, "the loss of rank 2"),
}


def judge_cases(engine):
    """Three ranks, whose means are no exact numbers: the verdict of each case, on this rank."""
    group = distributed.new_group([0, 1, 2])
    if distributed.get_rank() == 3:
        return None
    net = nn.Linear(1, 3, bias=False)
    if engine == "ddp":
        ranks = ranks_of(DistributedDataParallel(net, process_group=group))
    else:
        mesh = distributed.DeviceMesh.from_group(group, "cpu")
        ranks = ranks_of(torch.distributed.fsdp.fully_shard(net, mesh=mesh))
    (weight,) = ranks.module.parameters()
    scale = make_scale(LossScale("static", init=1.0), torch.device("cpu"))
    verdicts = {}
    for name, (norms, losses, *_) in CASES.items():
        own = torch.tensor([[norms[ranks.rank]]])
        gradients = {weight: own}
        window = Window(1, torch.tensor(losses[ranks.rank]), 1.0)
        verdict = judge(window, gradients, scale, 1.0, None, ranks)
        verdicts[name] = verdict.numbers.tolist(), verdict.found.item(), verdict.norms.tolist()
    return verdicts


@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_the_flag_is_0_or_1_and_the_same_on_every_rank(world4, engine):
    verdicts = world4.run(judge_cases, engine)[:3]
    for name, (norms, losses, found, who) in CASES.items():
        numbers = [repr(verdict[name][0]) for verdict in verdicts]
        assert numbers[0] == numbers[1] == numbers[2], name
        assert [verdict[name][1] for verdict in verdicts] == [found] * 3, name
        loss, norm, _, flag, num_bad, sum_of_bad, *_ = verdicts[0][name][0]
        assert flag == found, name
        # A shard's norm is one part of three; a replica's is the whole, and that of the first one stands for all.
        if not found:
            parts = torch.tensor(norms[:1] if engine == "ddp" else norms).double()
            assert norm == parts.square().sum().sqrt().float(), name
        if who is None:
            assert (num_bad, loss) == (0.0, pytest.approx(sum(losses) / 3)), name
        else:
            named = f"the loss of rank {sum_of_bad:.0f}" if num_bad == 1 else f"the losses of {num_bad:.0f} ranks"
            assert named == who, name


# --- a bad step ------------------------------------------------------------------------------------------------------

POLICIES = ["bf16", "fp32", "fp16 scale.init=4", "fp16 on_overflow=skip scale.init=4", "bf16 master=split16"]


def faults(engine, optimizer):
    """Kinds of a bad step, and whether it is the first one, which begins a momentum."""
    yield from [("gradient of one", True), ("gradient of one", False), ("loss of one", False)]
    if optimizer == "adamw fused":
        yield from [("loss of all", False), ("gradient of all", False)]
        if engine == "fsdp":
            yield "part of one", False


def skip_steps(engine, policy, names):
    """Two good steps around or after a bad one: what is reported, and what the bad one changed."""
    return {
        (name, fault, first): skip_one(engine, policy, OPTIMIZERS[name], fault, first)
        for name in names
        if engine == "ddp" or name not in NOT_SHARDED
        for fault, first in faults(engine, name)
    }


def skip_one(engine, policy, make_optimizer, fault, first):
    rank = distributed.get_rank()
    net = PlantedNet()
    model = engine_over(net, engine)
    optimizer = make_optimizer(model.parameters())
    stepper = Stepper(model, optimizer, policy, accumulate=2, max_norm=1.0, watch=False)
    reports, changed = [], None
    for step, parts in enumerate(batches(3, 2, 2)):
        is_bad = step == (0 if first else 1)
        before = copy.deepcopy((weights_of(model), states_of(optimizer)))
        for micro, of_ranks in enumerate(parts):
            x, y = of_ranks[rank]
            hits = is_bad and micro == 1 and (rank == 1 or fault.endswith("all"))
            net.limit = math.inf if not hits or fault == "part of one" else math.nan if "loss" in fault else 0.0
            if is_bad and micro == 1 and fault == "part of one" and rank == 0:
                # After the reduction, in what this rank alone holds: rank 1 has no part of a weight with one row.
                net.head.weight.grad.to_local().view(-1)[0] = math.nan
            report = stepper.step(lambda x=x, y=y: finished(net, *square_loss(model, x, y)))
        if is_bad:
            after = weights_of(model), states_of(optimizer)
            changed = differs(before, after)
        reports.append((report.applied, repr(report.loss), repr(report.grad_norm), report.scale, report.reason))
    return reports, changed, weights_of(model)


def finished(net, loss, count):
    return net.finish(loss), count


def weights_of(model):
    return [whole(p) for p in model.parameters()]


def states_of(optimizer):
    """Of the optimizer as numbers, but for what a fused one sets up before it skips."""
    states = [
        {key: whole(value) for key, value in optimizer.state[p].items() if isinstance(value, torch.Tensor)}
        for group in optimizer.param_groups
        for p in group["params"]
        if p in optimizer.state
    ]
    return [state for state in states if any(value.any() for value in state.values())]


def differs(before, after):
    try:
        assert_same(before, after)
    except AssertionError as error:
        return str(error) or "differs"
    return None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "policy"), [("ddp", each) for each in POLICIES] + [("fsdp", each) for each in POLICIES[:-1]]
)
def test_a_bad_step_is_skipped_by_all_ranks_with_every_optimizer(world2, engine, policy):
    check_skipped(world2.run(skip_steps, engine, policy, list(OPTIMIZERS)))


@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_a_bad_step_is_skipped_by_all_ranks_and_leaves_no_trace(world2, engine):
    for policy, name in (("bf16", "adamw fused"), ("fp16 scale.init=4", "sgd"), ("fp32", "sgd fused")):
        check_skipped(world2.run(skip_steps, engine, policy, [name]))


def check_skipped(results):
    a, b = results
    for key in a:
        (reports, changed, weights), (others, changed_there, weights_there) = a[key], b[key]
        assert reports == others, key
        assert (changed, changed_there) == (None, None), key
        is_bad = [step == (0 if key[2] else 1) for step in range(3)]
        assert [applied for applied, *_ in reports] == [not bad for bad in is_bad], key
        assert all(torch.equal(x, y) and x.isfinite().all() for x, y in zip(weights, weights_there, strict=True)), key
        reason = reports[is_bad.index(True)][-1]
        expected = {"loss of one": "the loss of rank 1", "loss of all": "the losses of 2 ranks"}
        assert expected.get(key[1], "the gradient norm is") in reason, key


# --- what it costs ---------------------------------------------------------------------------------------------------


def count_collectives(engine, policy, accumulate, limits):
    """Collectives of each window of a Stepper beside those of the engine alone, and the bytes of each of its own."""
    rank, group = distributed.get_rank(), distributed.distributed_c10d._get_default_group()
    sizes, plain_all_reduce = [], distributed.all_reduce

    def all_reduce(tensor, *args, **kwargs):
        sizes.append(tensor.numel() * tensor.element_size())
        return plain_all_reduce(tensor, *args, **kwargs)

    windows = []
    distributed.all_reduce = all_reduce
    try:
        net = PlantedNet()
        model = engine_over(net, engine)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        stepper = Stepper(model, optimizer, policy, accumulate=accumulate, max_norm=1.0, watch=False)
        for step, parts in enumerate(batches(len(limits) + 2, accumulate, 2)):
            sizes.clear()
            before = group._get_sequence_number_for_group()
            for micro, of_ranks in enumerate(parts):
                x, y = of_ranks[rank]
                net.limit = limits[step - 2][micro][rank] if step > 1 else math.inf
                report = stepper.step(lambda x=x, y=y: net.finish((model(x) - y).square().mean()))
            assert report.applied
            windows.append((group._get_sequence_number_for_group() - before, list(sizes)))
    finally:
        distributed.all_reduce = plain_all_reduce
    # The first window fixes the unit and compares with the other ranks, and after it DDP orders its buckets.
    return windows[2:]


def count_of_engine(engine, accumulate):
    """Collectives of a window without a Stepper."""
    rank, group = distributed.get_rank(), distributed.distributed_c10d._get_default_group()
    net = PlantedNet()
    model = engine_over(net, engine)
    for parts in batches(3, accumulate, 2):
        before = group._get_sequence_number_for_group()
        for micro, of_ranks in enumerate(parts):
            if engine == "ddp":
                model.require_backward_grad_sync = micro + 1 == accumulate
            square_loss(model, *of_ranks[rank])[0].backward()
    return group._get_sequence_number_for_group() - before


INF = math.inf
VERDICT = {"ddp": (6 + 1) * 8, "fsdp": (6 + 4) * 8}
"""Loss, count and four of flags, in fp64, and the norm of the whole gradient or a square for each parameter."""
AGREE = 5 * 4
"""Scale, clean steps and three flags, in fp32."""


@pytest.mark.parametrize("policy", ["bf16", "fp16 on_overflow=skip scale.init=4"])
@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_a_step_has_one_small_collective(world2, engine, policy):
    for accumulate in (1, 2):
        clean = [[[INF, INF]] * accumulate] * 2
        of_engine = world2.run(count_of_engine, engine, accumulate)[0]
        for of_rank in world2.run(count_collectives, engine, policy, accumulate, clean):
            assert of_rank == [(of_engine + 1, [VERDICT[engine]])] * 2, accumulate


CALM, EARLY, LATE = [[INF, INF], [INF, INF]], [[4.0, INF], [INF, INF]], [[INF, INF], [INF, 1.0]]
"""Up to which scale a micro-batch of a rank is finite, in windows without an overflow and with one, from 16, 4 on."""
REPLAY = {
    # Each pass of all ranks is judged by one collective (v). Before gradients come together the ranks agree (a). What a
    # replay or a sum has changed is judged once more.
    ("ddp", 1): [(CALM[:1], "v"), (EARLY[:1], "vvvv")],
    ("ddp", 2): [(CALM, "av"), (EARLY, "av"), (LATE, "avvvv")],
    ("fsdp", 1): [(CALM[:1], "v"), (EARLY[:1], "vvvv")],
    ("fsdp", 2): [(CALM, "vvv"), (EARLY, "vvvvv"), (LATE, "vvvvv")],
}


@pytest.mark.parametrize(("engine", "accumulate"), REPLAY)
def test_what_replay_costs(world2, engine, accumulate):
    policy, windows = "fp32 scale=dynamic scale.init=16", REPLAY[engine, accumulate]
    expected = [[{"v": VERDICT[engine], "a": AGREE}[kind] for kind in kinds] for _, kinds in windows]
    for of_rank in world2.run(count_collectives, engine, policy, accumulate, [limits for limits, _ in windows]):
        assert [sizes for _, sizes in of_rank] == expected
