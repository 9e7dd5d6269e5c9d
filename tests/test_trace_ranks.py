"""A trace over ranks: it stops on all of them in the same step, and says which rank's micro-batch is at fault."""

import contextlib
import io
import json

import pytest
import torch
from reference.loop import Gate
from torch import nn

from halfstep.cli import run
from halfstep.distributed.sharding import shard
from halfstep.explain.lookout import spoiled
from halfstep.explain.trace import trace
from halfstep.policy import Policy
from halfstep.ranks.engine import ranks_of
from halfstep.source import Source, load
from halfstep.workload import Workload

WIDTH = 16


class Net(nn.Module):
    """In a batch that says so, the output of ``gate`` or its gradient is NaN."""

    def __init__(self, normalises=False):
        super().__init__()
        self.stem, self.gate, self.head = nn.Linear(WIDTH, WIDTH), Gate(), nn.Linear(WIDTH, 1)
        self.norm = nn.BatchNorm1d(WIDTH) if normalises else nn.Identity()

    def forward(self, batch):
        self.gate.where, x = batch
        return self.head(self.norm(self.gate(self.stem(x))))


def net(seed, bad=(), where="output", engine="replicate", accumulate=1, fused=False, normalises=False, policy="auto"):
    """Batches with the numbers ``bad`` are, counted over all ranks."""
    model = Net(normalises)
    generator = torch.Generator().manual_seed(seed)
    return Workload(
        model=shard(model, policy) if engine == "shard" else model,
        batches=[(where if i in bad else "nowhere", torch.randn(4, WIDTH, generator=generator)) for i in range(24)],
        loss=lambda model, batch: model(batch).float().square().mean(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, fused=fused),
        accumulate=accumulate,
    )


def trace_net(policy, options, steps=6):
    return trace(Source("net", net, options), Policy.parse(policy), steps)


def traced(*arguments):
    report = trace_net(*arguments)
    return report.to_dict(), str(report)


FAULTS = [
    ("fp16", {"bad": (7,)}),
    ("fp16", {"bad": (5,), "accumulate": 2, "where": "gradient"}),
]
MORE = [
    ("bf16", {"bad": (5,), "accumulate": 2, "normalises": True}),
    ("fp16", {"bad": (7,), "where": "gradient", "fused": True}),
    ("fp16 on_overflow=skip", {"bad": (7,), "where": "gradient"}),
    ("bf16", {"bad": (7, 8), "accumulate": 2, "where": "gradient", "fused": True}),
]


def faults(*others):
    return [*FAULTS, *others, *(pytest.param(*each, marks=pytest.mark.slow) for each in MORE if each not in others)]


@pytest.mark.parametrize(("policy", "options"), faults(MORE[0]))
def test_the_trace_of_a_rank_is_that_of_one_process_over_the_same_samples(world2, policy, options):
    (report, text), other = world2.run(traced, policy, options)
    assert other == (report, text)
    alone = trace_net(policy, {**options, "accumulate": 2 * options.get("accumulate", 1)}).to_dict()
    for key in ("step", "policy", "fp32_step", "advice", "reason"):
        assert report[key] == alone[key], key
    for key in ("module", "phase", "kind", "op", "line"):
        assert report["producer"][key] == alone["producer"][key], key
    assert report["rank"] == 1
    assert report["ranks"][0].startswith("nothing: in its own micro-batch every value is finite")
    assert report["ranks"][1].startswith("gate makes NaN in the ")
    assert text.startswith(f"step {report['step']}, rank 1: gate makes NaN in the {report['producer']['phase']} pass")
    assert report["before"]
    if options.get("accumulate"):
        assert report["micro_batch"] == (options["bad"][0] // 2) % 2


@pytest.mark.parametrize(("policy", "options"), faults())
def test_where_weights_are_shards_the_ranks_say_what_they_met(world2, policy, options):
    (report, text), other = world2.run(traced, policy, {**options, "engine": "shard"})
    assert other == (report, text)
    alone = trace_net(policy, {**options, "accumulate": 2 * options.get("accumulate", 1)}).to_dict()
    assert report["step"] == alone["step"]
    for key in ("module", "phase", "kind"):
        assert report["producer"][key] == alone["producer"][key], key
    assert report["rank"] == 1
    assert report["ranks"][0].startswith("nothing")
    assert not any(advice["policy"] for advice in report["advice"])
    assert "No rank can run its micro-batch again without the others" in text
    assert report["fp32_step"] == alone["fp32_step"]


def test_a_fault_of_every_rank_is_shown_for_the_first_and_said_for_all(world2):
    (status, out, err), other = world2.run(command, "trace", "fragile", "--policy", "fp16", "--steps", "2", "--json")
    assert (status, err) == (1, "")
    assert other == (1, "", "")
    report = json.loads(out)
    assert report["rank"] == 0
    assert report["producer"]["module"] == "pool"
    assert [said.startswith("pool makes inf in the forward pass") for said in report["ranks"]] == [True, True]


def command(*arguments):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = run(list(arguments))
    return status, out.getvalue(), err.getvalue()


def test_a_run_without_a_fault_says_what_calibrated_on_any_rank(world2):
    first, second = world2.run(calibrates)
    assert first == second
    assert not first["found"]
    assert "the loss scale finding its place, from 65536 to" in first["notes"][0]


def calibrates():
    """Rank 1 alone overflows at the first scale, in its first micro-batch of two, which it replays alone."""

    def small(seed):
        workload = net(seed, accumulate=2)
        for number, (_, x) in enumerate(workload.batches):
            workload.batches[number] = ("nowhere", x * (300.0 if number == 1 else 0.01))
        return workload

    return trace(Source("small", small), Policy("fp16"), 3).to_dict()


def overshoots(engine):
    """An update that makes weights inf."""

    def fast(seed, policy="auto"):
        workload = net(seed, engine=engine, policy=policy)
        object.__setattr__(workload, "optimizer", lambda parameters: torch.optim.SGD(parameters, lr=3e38))
        object.__setattr__(workload, "loss", lambda model, batch: model(batch).float().square().mean() * 1e4)
        return workload

    return trace(Source("fast", fast), Policy("bf16"), 3).to_dict()


@pytest.mark.parametrize("engine", ["replicate", "shard"])
def test_a_fault_of_the_update_is_one_of_all_ranks(world2, engine):
    first, second = world2.run(overshoots, engine)
    assert first == second
    assert (first["step"], first["rank"], first["ranks"]) == (1, None, [])
    assert first["producer"]["phase"] == "update"
    assert first["advice"][-1]["result"] in ("mends it", "does not")


def spoil_one():
    """One element of the shard that rank 1 holds."""
    model = shard(nn.Linear(4, 4), "fp32")
    rank = torch.distributed.get_rank()
    before = spoiled(ranks_of(model))
    if rank == 1:
        model.bias.detach().to_local()[0] = -torch.inf
    return before, spoiled(ranks_of(model))


def test_a_weight_that_is_spoiled_in_the_shard_of_one_rank_is_known_to_all(world2):
    assert world2.run(spoil_one) == [(None, ("bias", "inf"))] * 2


def contrasted():
    """A loss that adds up over the ranks in the forward pass, as a contrastive one does; rank 1 has NaN in its data."""
    from torch.distributed.nn.functional import all_reduce

    def shared(seed):
        workload = net(seed)
        workload.batches[5][1][0, 0] = torch.nan
        object.__setattr__(
            workload, "loss", lambda model, batch: all_reduce(model(batch).float().mean()).square() + batch[1].sum() * 0
        )
        return workload

    return trace(Source("shared", shared), Policy("bf16"), 5).to_dict()


def test_a_model_that_talks_in_its_forward_pass_is_not_run_by_one_rank_alone(world2):
    first, second = world2.run(contrasted)
    assert first == second
    assert (first["step"], first["producer"]["module"]) == (3, "the batch")


def test_a_built_in_workload_is_clean(world2):
    first, second = world2.run(clean)
    assert first == second
    assert first.startswith("nothing found in 2 steps")


def clean():
    return str(trace(load("mlp"), Policy("bf16"), 2))
