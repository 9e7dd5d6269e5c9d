"""Replicas under DDP in what is easily got wrong: each against one process that has the samples of all ranks."""

import pytest
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from halfstep import HalfstepError, Stepper
from halfstep.ranks import replicas

NUM_STEPS = 4
FP16 = "fp16 scale.init=256"
SPIKE = 2.0**12
"""Makes the loss of a micro-batch so large that it overflows at FP16's first scale, and not at a lower one."""
SMALL = 1e-5
"""Relative: fp32 sums of a few hundred numbers in another order, over four steps."""


class Net(nn.Module):
    """Two branches, of which a micro-batch uses one or both."""

    def __init__(self):
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(6, 3) for _ in range(2))
        self.head = nn.Linear(3, 3)

    def forward(self, x, uses="ab"):
        return self.head(torch.tanh(sum(self.branches["ab".index(use)](x) for use in uses)))


def batch_of(step, micro, rank):
    g = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    return torch.randn(int(torch.randint(1, 5, (), generator=g)), 6, generator=g)


def loss_of(model, x, **kwargs):
    return model(x, **kwargs).square().sum(), float(len(x))


def train(model, uses, policy="fp32", num_steps=NUM_STEPS, spikes=()):
    """Weights after some steps, what was reported, and the ranks.

    uses:   branches of each micro-batch of a window, by rank. A rank of one process runs those of all.
    spikes: (step, micro-batch, rank) of the micro-batches that overflow.
    """
    own = [distributed.get_rank()] if distributed.is_initialized() else range(len(uses))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    num_micro_batches = len(uses[0])
    stepper = Stepper(model, optimizer, policy, accumulate=num_micro_batches * len(own), max_norm=1.0, watch=False)
    reports = []
    for step in range(num_steps):
        for micro in range(num_micro_batches):
            for rank in own:
                x = batch_of(step, micro, rank)
                factor = SPIKE if (step, micro, rank) in spikes else 1.0

                def closure(x=x, rank=rank, micro=micro, factor=factor):
                    loss, count = loss_of(model, x, uses=uses[rank][micro])
                    return loss * factor, count

                report = stepper.step(closure)
        reports.append((report.loss, report.grad_norm, report.scale, report.applied, report.num_replays))
    return weights_of(stepper.ranks.module), reports, stepper


def weights_of(model):
    return {name: p.detach().numpy().copy() for name, p in model.named_parameters()}


def job(uses, arguments, *args):
    torch.manual_seed(0)
    return train(DistributedDataParallel(Net(), **arguments), uses, *args)[:2]


def check_like_one(world, uses, arguments, *args, tolerance=SMALL):
    (weights, reports), (others, other_reports) = world.run(job, uses, arguments, *args)
    torch.manual_seed(0)
    expected, expected_reports, _ = train(Net(), uses, *args)
    for name, value in expected.items():
        assert (weights[name] == others[name]).all(), name
        torch.testing.assert_close(weights[name], value, rtol=tolerance, atol=tolerance)
    for a, b, c in zip(reports, other_reports, expected_reports, strict=True):
        assert a[:4] == b[:4]
        assert a[:2] == pytest.approx(c[:2], rel=tolerance)
    return reports, other_reports


BOTH = ("ab", "ab")
USES = {
    "one-rank-leaves-one-out": (BOTH, ("a", "a")),
    "last-leaves-out-what-an-earlier-one-used": (("ab", "a"), ("ab", "a")),
    "only-one-rank-used-it-and-early": (("ab", "a"), ("a", "a")),
    "nobody-uses-it": (("a", "a"), ("a", "a")),
    "each-rank-another": (("a", "a"), ("b", "b")),
}


@pytest.mark.parametrize("policy", ["fp32", FP16])
@pytest.mark.parametrize("uses", USES.values(), ids=USES)
def test_parameters_that_some_micro_batches_leave_out(world2, uses, policy):
    tolerance = SMALL if policy == "fp32" else 0.01  # 2**-11 in each number, and another scale
    check_like_one(world2, uses, {"find_unused_parameters": True}, policy, tolerance=tolerance)


def refusal(uses, direct=False, **arguments):
    torch.manual_seed(0)
    model = DistributedDataParallel(Net(), **arguments)
    before = weights_of(model.module)
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32", accumulate=len(uses), watch=False)
    called = model.module if direct else model
    for each in uses[:-1]:
        stepper.step(lambda each=each: loss_of(called, batch_of(0, 0, 0), uses=each))
    with pytest.raises(HalfstepError) as error:
        stepper.step(lambda: loss_of(called, batch_of(0, 0, 0), uses=uses[-1]))
    after = weights_of(model.module)
    assert all((after[name] == value).all() for name, value in before.items())
    return str(error.value)


def test_a_last_micro_batch_that_leaves_out_a_parameter_is_refused(world2):
    """DDP leaves its buckets unreduced then, and says so only in the next forward pass, after the step."""
    for message in world2.run(refusal, ("ab", "a")):
        assert "leaves out a parameter" in message
        assert "find_unused_parameters=True" in message


@pytest.mark.parametrize("uses", [("ab",), ("ab", "ab")])
def test_a_model_that_is_called_past_its_wrapper_is_refused(world2, uses):
    for message in world2.run(refusal, uses, True):
        assert "model(x) and not model.module(x)" in message


@pytest.mark.parametrize(("policy", "spikes"), [("fp32", ()), (FP16, ()), (FP16, ((0, 0, 1), (0, 2, 0), (2, 1, 1)))])
def test_a_static_graph_with_several_micro_batches(world2, policy, spikes):
    """torch's own no_sync() ends the process here: the first backward pass of a static graph has to be synchronised."""
    tolerance = SMALL if policy == "fp32" else 0.01
    uses = (("ab",) * 3,) * 2
    reports, _ = check_like_one(world2, uses, {"static_graph": True}, policy, NUM_STEPS, spikes, tolerance=tolerance)
    assert all(applied for _, _, _, applied, _ in reports)
    assert (reports[0][4] > 0) == bool(spikes)


def look_before_the_first_step():
    torch.manual_seed(0)
    model = DistributedDataParallel(Net(), static_graph=True)
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp16", accumulate=2, watch=False)
    x = batch_of(0, 0, distributed.get_rank())
    with pytest.raises(HalfstepError, match="before the first step") as error:
        stepper.capture(lambda: loss_of(model, x)).closure()
    for _ in range(4):
        stepper.step(lambda: loss_of(model, x))
    stepper.capture(lambda: loss_of(model, x)).closure()[0].backward()
    return str(error.value)


def test_a_static_graph_is_not_looked_at_before_it_is_known(world2):
    assert len(set(world2.run(look_before_the_first_step))) == 1


@pytest.mark.parametrize("micro", [0, 1])
def test_gradients_that_are_views_of_buckets(world2, micro):
    """A replay keeps finite gradients while the buckets that they lie in are filled again."""
    arguments = {"gradient_as_bucket_view": True}
    reports, others = check_like_one(world2, (BOTH, BOTH), arguments, FP16, NUM_STEPS, ((0, micro, 1),), tolerance=0.01)
    assert (reports[0][4] > 0, others[0][4] > 0) == (micro == 1, True)


# Collectives in the forward pass.


class OverRanks(torch.autograd.Function):
    """The sum over the ranks, and that of the gradients on the way back."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        distributed.all_reduce(x)
        return x

    backward = staticmethod(lambda ctx, gradient: OverRanks.forward(ctx, gradient))


class Talking(nn.Module):
    """Centres its output over all ranks, as a contrastive loss or a SyncBatchNorm does."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(6, 3), nn.Linear(3, 3)

    def forward(self, x):
        hidden = self.body(x).mean(0)
        return self.head(hidden - OverRanks.apply(hidden) / distributed.get_world_size())


class SyncedOnCpu(nn.SyncBatchNorm):
    """torch's own runs on CUDA alone. What matters to the step is that it is one, and talks."""

    def forward(self, x):
        mean = OverRanks.apply(x.mean(0)) / distributed.get_world_size()
        return (x - mean) * self.weight + self.bias


def talking(kind, spikes, policy=FP16, num_steps=6):
    torch.manual_seed(0)
    net = Talking() if kind == "talking" else nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    model = DistributedDataParallel(net)
    if kind == "synced":
        net[1].__class__ = SyncedOnCpu  # only now, since DDP refuses one on the CPU
    stepper = Stepper(
        model, torch.optim.SGD(model.parameters(), lr=0.05), FP16, accumulate=3, max_norm=1.0, watch=False
    )
    rank, reports = distributed.get_rank(), []
    for step in range(num_steps):
        for micro in range(3):
            factor = SPIKE if (step, micro, rank) in spikes else 1.0
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + 10 * micro + rank))
            report = stepper.step(lambda x=x, factor=factor: model(x).square().sum() * factor)
        reports.append((report.applied, report.scale, report.num_replays))
    return reports, weights_of(net)


def test_a_rank_whose_forward_pass_talks_does_not_run_it_again_alone(world2):
    """The others are not in it any more. An early micro-batch costs all the window; the last one all repeat."""
    spikes = ((1, 0, 1), (3, 2, 0))
    (reports, weights), (others, other_weights) = world2.run(talking, "talking", spikes)
    assert reports == others
    assert [applied for applied, _, _ in reports] == [True, False, True, True, True, True]
    assert reports[2][1] < reports[0][1]  # the scale went down for it, once
    assert reports[3][2] > 0
    assert all((weights[name] == other_weights[name]).all() for name in weights)


@pytest.mark.parametrize("policy", [FP16, f"{FP16} master=split16"])
def test_ranks_with_synchronised_statistics_decide_on_each_micro_batch(world2, policy):
    spikes = ((0, 0, 1),)
    (reports, weights), (others, other_weights) = world2.run(talking, "synced", spikes, policy)
    assert reports == others
    assert all(applied for applied, _, _ in reports)
    assert reports[0][2] > 0
    assert all((weights[name] == other_weights[name]).all() for name in weights)


# Buffers.


def statistics(kind, accumulate=3):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    rank, seen = distributed.get_rank(), []
    if kind == "halfstep":
        stepper = Stepper(model, optimizer, "fp32", accumulate=accumulate, watch=False)
    for step in range(3):
        for micro in range(accumulate):
            x = torch.randn(5, 6, generator=torch.Generator().manual_seed(100 * step + 10 * micro + rank))
            if kind == "halfstep":
                stepper.step(lambda x=x: model(x).square().mean())
            elif micro < accumulate - 1:
                with model.no_sync():
                    (model(x).square().mean() / accumulate).backward()
            else:
                (model(x).square().mean() / accumulate).backward()
                optimizer.step()
                optimizer.zero_grad()
        seen.append([buffer.numpy().copy() for buffer in net.buffers()])
    return seen


def test_buffers_are_those_of_the_first_rank(world2):
    """As after torch's own loop with no_sync(): rank 0 counts its own micro-batches, and each once."""
    ours, others = world2.run(statistics, "halfstep")
    theirs, _ = world2.run(statistics, "torch")
    for a, b, other in zip(ours, theirs, others, strict=True):
        torch.testing.assert_close(a, b, rtol=SMALL, atol=SMALL)
        assert a[2] == other[2]  # num_batches_tracked
    assert ours[2][2] == 9


# torch.compile.


def compiled(how):
    torch.manual_seed(0)
    if how == "compile(DDP)":
        model = torch.compile(DistributedDataParallel(Net()), backend="eager")
    else:
        model = DistributedDataParallel(torch.compile(Net(), backend="eager"))
    weights, reports, stepper = train(model, (BOTH, BOTH), "bf16 module:head=fp32" if how == "compile(DDP)" else "bf16")
    names = list(stepper.state_dict()["window"]["gradients"]) or list(weights)
    return names, reports, weights


@pytest.mark.parametrize("how", ["compile(DDP)", pytest.param("DDP(compile)", marks=pytest.mark.slow)])
def test_names_under_torch_compile(world2, how):
    """torch.compile of the wrapper leaves the model's own names, also in a policy; inside it adds its prefix."""
    (names, reports, weights), (_, other_reports, others) = world2.run(compiled, how)
    prefix = "" if how == "compile(DDP)" else "_orig_mod."
    assert names[0] == f"{prefix}branches.0.weight"
    assert all((weights[name] == others[name]).all() for name in names)
    assert reports == other_reports


# Windows that end early, and 16-bit weights: what is brought together at the window's end.


def flushed(held, policy, bucket):
    replicas.BUCKET_NUMEL = bucket
    torch.manual_seed(0)
    num = len(held)
    net = Net()
    model = DistributedDataParallel(net) if distributed.is_initialized() else net
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    own = [distributed.get_rank()] if distributed.is_initialized() else range(num)
    stepper = Stepper(model, optimizer, policy, accumulate=4 * len(own), max_norm=1.0, watch=False)
    for rank in own:
        for micro in range(held[rank]):
            x = batch_of(0, micro, rank)
            uses = "ab" if rank == 0 else "b"
            assert stepper.step(lambda x=x, uses=uses: loss_of(model, x, uses=uses)) is None
    report = stepper.flush()
    assert stepper.flush() is None
    return {name: value.numpy().copy() for name, value in stepper.weights()}, report and (report.loss, report.grad_norm)


@pytest.mark.parametrize("bucket", [25 * 2**18, 1], ids=["one-bucket", "many-buckets"])
@pytest.mark.parametrize("policy", ["fp32", "bf16 master=split16", FP16])
@pytest.mark.parametrize("held", [(2, 0), (0, 3), (1, 2)], ids=str)
def test_ranks_that_hold_different_numbers_of_micro_batches(world2, held, policy, bucket):
    (weights, report), (others, other_report) = world2.run(flushed, held, policy, bucket)
    expected, expected_report = flushed(held, policy, bucket)
    assert report == other_report
    # In fp32: the sums come in another order. In 16 bit: gradients are summed in fp32, but computed in 16 bit.
    tolerance = SMALL if policy == "fp32" else 0.01
    assert report == pytest.approx(expected_report, rel=tolerance)
    for name, value in expected.items():
        assert (weights[name] == others[name]).all(), name
        torch.testing.assert_close(weights[name], value, rtol=tolerance, atol=tolerance)


def test_nothing_is_held_by_any_rank(world2):
    assert [report for _, report in world2.run(flushed, (0, 0), "fp32", 100)] == [None, None]


def late_refusal(kind):
    torch.manual_seed(0)
    if kind == "sparse":
        net = nn.EmbeddingBag(10, 3, sparse=True)
        model = DistributedDataParallel(net)
        stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32", accumulate=2, watch=False)
        if distributed.get_rank() == 0:  # the other one holds nothing, and has to learn of it
            stepper.step(lambda: model(torch.tensor([[1, 2]])).sum())
        with pytest.raises(HalfstepError) as error:
            stepper.flush()
        return str(error.value)
    model = DistributedDataParallel(Net(), static_graph=kind == "static")
    if kind == "hook":
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        model.register_comm_hook(None, allreduce_hook)
    if kind == "outside":
        model = nn.Sequential(model, nn.Linear(3, 3))
    if kind == "ignored":
        net = Net()
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["head.bias"])
        model = DistributedDataParallel(net)
    policy = "bf16" if kind in ("outside", "ignored") else "bf16 master=split16"
    with pytest.raises(HalfstepError) as error:
        Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), policy, watch=False)
    return str(error.value)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("sparse", "a sparse gradient"),
        ("hook", "with a communication hook and master weights"),
        ("static", "with static_graph=True and master weights"),
        ("outside", "parameter 1.weight outside DistributedDataParallel"),
        ("ignored", "parameter head.bias outside DistributedDataParallel"),
    ],
)
def test_what_nobody_would_bring_together_is_refused(world2, kind, message):
    first, second = world2.run(late_refusal, kind)
    assert message in first
    assert first == second
