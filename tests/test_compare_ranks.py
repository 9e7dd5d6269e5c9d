"""A comparison over ranks: the samples of one process, one verdict, written once, left by all in the same step."""

import contextlib
import io
import itertools
import json
import os
import signal

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from halfstep.cli import run
from halfstep.compare import Trial, compare
from halfstep.compare.trial import together
from halfstep.distributed.sharding import shard
from halfstep.errors import HalfstepError
from halfstep.share import share
from halfstep.source import Source
from halfstep.workload import Workload, stream


class Net(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.body, self.drop, self.head = nn.Linear(8, 16), nn.Dropout(dropout), nn.Linear(16, 2)

    def forward(self, x):
        return self.head(self.drop(torch.tanh(self.body(x))))


def loss(model, batch):
    """Sum and count, of batches that differ in length."""
    x, y = batch
    return (model(x).float() - y).square().sum(), len(x)


def ragged(seed, num=64):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(num):
        n = int(torch.randint(1, 6, (), generator=generator))
        yield torch.randn(n, 8, generator=generator), torch.randn(n, 2, generator=generator)


@torch.no_grad()
def evaluate(model):
    generator = torch.Generator().manual_seed(9)
    return loss(model, (torch.randn(32, 8, generator=generator), torch.randn(32, 2, generator=generator)))[0] / 32


def net(seed, accumulate=1, engine="replicate", policy="auto"):
    model = Net()
    if engine == "shard":
        model = shard(model, policy)
    return Workload(
        model=model,
        batches=list(ragged(seed)),
        loss=loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        evaluate=evaluate,
        max_norm=1.0,
        accumulate=accumulate,
    )


def compare_net(engine, policies):
    report, trials = compare(Source("net", net, {"engine": engine}), policies, steps=4, seeds=1)
    return report.to_dict(), trials


@pytest.mark.parametrize("engine", ["replicate", "shard"])
def test_two_ranks_compare_what_one_process_does_over_the_same_samples(world2, engine):
    """A window of two ranks holds the samples of one that is twice as long, and every rank has the same report."""
    policies = ["fp32", "bf16", "fp16"]
    (report, trials), (other, _) = world2.run(compare_net, engine, policies)
    assert report == other
    _, alone = compare(Source("net", net, {"accumulate": 2}), policies, steps=4, seeds=1)
    for one, two in zip(alone, trials, strict=True):
        assert (two.policy, two.seed, two.effective) == (one.policy, one.seed, one.effective)
        # The same products, added up in another order: fp32 has an eps of 1.2e-7, and a loss sums some thousand terms.
        # A 16-bit product that falls on the other side of a tie is one ulp off, bf16's 2^-8 of one of 16 terms.
        tolerance = 1e-5 if two.policy == "fp32" else 2e-3
        assert two.losses == pytest.approx(one.losses, rel=tolerance)
        assert two.evaluated == pytest.approx(one.evaluated, rel=tolerance)
    assert report["device"].startswith("2 ranks, ")
    assert report["policies"][0]["verdict"]["word"] == "reference"


# --- a rank's share ------------------------------------------------------------------------------------------------


def shuffled(dropout=0.0, sampler=False, **fields):
    """A loader that shuffles by torch's own random numbers, which dropout draws from as well."""
    data = TensorDataset(torch.arange(12.0).repeat(8, 1).T.contiguous())
    batches = DataLoader(data, 2, sampler=DistributedSampler(data), shuffle=False) if sampler else None
    return Workload(
        model=Net(dropout),
        batches=batches or DataLoader(data, 2, shuffle=True),
        loss=lambda model, batch: model(batch[0]).float().square().mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        **fields,
    )


def deal(sampler):
    """Samples of each batch of two epochs, with a forward pass whose length depends on the rank after each."""
    torch.manual_seed(3)
    workload = share(shuffled(0.5, sampler), "cpu")
    mask = workload.model.module.drop(torch.ones(64))
    seen, drawn, batches = [], [], stream(workload)
    for _ in range(6):
        (x,) = next(batches)
        drawn.append(torch.rand(1 + 5 * torch.distributed.get_rank())[0].item())
        seen.append(x[:, 0].tolist())
    return seen, drawn, mask.tolist()


def test_batches_are_dealt_out_one_by_one_whatever_the_ranks_draw_besides(world2):
    (first, drawn, mask), (second, other_drawn, other_mask) = world2.run(deal, False)
    torch.manual_seed(3)
    workload = shuffled(0.5)
    whole = [x[:, 0].tolist() for _, (x,) in zip(range(12), stream(workload), strict=False)]
    assert [batch for pair in zip(first, second, strict=True) for batch in pair] == whole
    assert sorted(itertools.chain(*first[:3], *second[:3])) == list(range(12))
    # Dropout of one rank is not that of another, before a batch is drawn and after.
    assert mask != other_mask
    assert not set(drawn) & set(other_drawn)


def test_a_loader_with_a_distributed_sampler_is_divided_already(world2):
    (first, *_), (second, *_) = world2.run(deal, True)
    assert sorted(itertools.chain(*first[:3], *second[:3])) == list(range(12))


def run_dry():
    """A generator with five batches: rank 1 would be the first to miss one."""
    workload = net(0)
    object.__setattr__(workload, "batches", ragged(0, num=5))
    batches = stream(share(workload, "cpu"))
    num = 0
    try:
        for _ in batches:
            num += 1
    except HalfstepError as error:
        return num, str(error)


def test_ranks_run_dry_in_the_same_step(world2):
    first, second = world2.run(run_dry)
    assert first == second
    assert first[0] == 2
    assert "a generator): it ran dry after 5 batches" in first[1]


def wrapped():
    """What share leaves as it is, and the device that it refuses."""
    model = DistributedDataParallel(Net())
    workload = net(0)
    object.__setattr__(workload, "model", model)
    return share(workload, "cpu").model is model


def test_a_model_that_is_wrapped_already_stays_so(world2):
    assert world2.run(wrapped) == [True, True]


def told(seed, policy="auto"):
    print(policy)
    return net(seed)


def test_a_function_that_takes_a_policy_is_told_that_of_each_trial(capsys):
    compare(Source("told", told), ["fp32", "bf16"], steps=1, seeds=1)
    assert capsys.readouterr().out.split() == ["fp32", "fp32", "bf16", "bf16"]  # memory is measured first


# --- one verdict ---------------------------------------------------------------------------------------------------


def trial(**fields):
    return Trial("fp16", "fp16", 0, 2, (1.0, 0.5), (4.0, 4.0), (True, True), (0, 1), **fields)


def test_what_ranks_measure_is_put_together():
    one = together(
        [trial(evaluated=1.0, peak_memory_mib=5.0, samples_per_s=10.0), trial(evaluated=2.0, samples_per_s=12.0)]
    )
    assert (one.evaluated, one.peak_memory_mib, one.samples_per_s, one.num_replays) == (1.5, 5.0, 22.0, 1)
    alone = trial(evaluated=0.1, peak_memory_mib=5.0, samples_per_s=10.0)
    assert together([alone]) == alone
    assert together([trial(), trial()]).evaluated is None


def interrupted():
    """Rank 1 gets Ctrl-C in its second trial."""
    calls = 0

    def progress(policy, seed):
        nonlocal calls
        calls += 1
        if calls == 5 and torch.distributed.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGINT)

    report, trials = compare(Source("net", net), ["fp32"], steps=3, seeds=4, progress=progress)
    return report.to_dict(), [(t.policy, t.seed) for t in trials], calls


def test_ctrl_c_on_one_rank_ends_all_in_the_same_step_and_keeps_what_has_ended(world2):
    first, second = world2.run(interrupted)
    assert first == second
    report, trials, calls = first
    assert report["interrupted"]
    assert trials == [("fp32", 0)]
    assert calls == 6  # the step in which it was noted, and the one after which all knew


# --- the command ---------------------------------------------------------------------------------------------------


def command(*arguments):
    """Status, what was printed, and what was said of errors."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = run([word.replace("RANK", str(torch.distributed.get_rank())) for word in arguments])
    return status, out.getvalue(), err.getvalue()


def test_the_report_is_printed_and_written_once(world2, tmp_path):
    files = [str(tmp_path / f"report-RANK.{kind}") for kind in ("json", "html")]
    arguments = ["compare", "mlp", "--policies", "fp32", "--steps", "2", "--seeds", "1"]
    (status, out, err), other = world2.run(command, *arguments, "--json", files[0], "--html", files[1])
    assert (status, err) == (0, "")
    assert "2 ranks, " in out
    assert other == (0, "", "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report-0.html", "report-0.json"]
    assert json.loads((tmp_path / "report-0.json").read_text())["steps"] == 2


def test_what_was_found_is_the_status_of_every_rank(world2):
    arguments = ["compare", "fragile", "--policies", "fp32,fp16", "--steps", "2", "--seeds", "1", "--json"]
    (status, out, _), other = world2.run(command, *arguments)
    assert status == 1
    assert json.loads(out)["policies"][1]["verdict"]["word"] == "diverged"
    assert other == (1, "", "")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["compare", "charlmm"], "halfstep: workload 'charlmm': no built-in workload has this name"),
        (["compare", "mlp", "--policies", "fp17"], "halfstep: compute format 'fp17'"),
        (["compare", "mlp", "--device", "cpu:0"], "halfstep: device='cpu:0' for each of 2 ranks"),
        (["compare", "--wrong"], "halfstep: No such option: --wrong"),
    ],
)
def test_an_error_that_all_ranks_have_is_said_once(world2, arguments, said):
    first, second = world2.run(command, *arguments)
    assert first[:2] == (2, "")
    assert first[2].startswith(said)
    assert first[2].count("\n") == 1
    assert second == (2, "", "")


def refused(*arguments):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("halfstep.job.PATIENCE_S", 0.01)
        return command(*arguments)


@pytest.mark.parametrize("name", ["tune", "doctor", "lint"])
def test_a_command_of_one_process_is_refused_under_torchrun(world2, name):
    first, second = world2.run(refused, name, "mlp")
    said = f"{name} in 2 processes: it runs in one process; only compare, trace, train run over several ranks."
    assert first == (2, "", f"halfstep: {said} Leave torchrun out.\n")
    assert second == (2, "", "")


def test_an_error_of_one_rank_names_it_and_what_follows_from_it_is_not_said(world2, tmp_path):
    """Rank 0 cannot write, and rank 1 goes on to wait for it."""
    arguments = ["compare", "mlp", "--policies", "fp32", "--steps", "2", "--seeds", "1", "--json"]
    failure = world2.run(fails_alone, *arguments, str(tmp_path / "nowhere" / "report.json"))
    assert failure[0][0] == 2
    assert failure[0][2].startswith(f"halfstep: rank 0: output file {tmp_path}/nowhere/report.json")
    assert failure[1] == (2, "", "")


def fails_alone(*arguments):
    return command(*arguments) if torch.distributed.get_rank() == 0 else waits_alone()


def waits_alone():
    """What a rank does whose collective broke since another had ended."""
    from halfstep.job import Job

    job = Job()
    job.open("compare")
    err = io.StringIO()
    while not job._store.check(["error/0"]):
        pass
    with contextlib.redirect_stderr(err):
        status = job.end(2, "connection closed by peer")
    return status, "", err.getvalue()
