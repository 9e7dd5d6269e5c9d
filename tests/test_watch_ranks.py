"""Two ranks of a replicated model: they lower the loss scale in the same step, or not at all."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent

SCRIPT = """
import json, os, sys
import torch
from torch import nn
from halfstep import Stepper
from halfstep.events import Alert
from reference.planted_gradient import Net

torch.set_num_threads(1)
folder = sys.argv[1]
child = os.fork()
rank = int(child == 0)
os.environ.update(RANK=str(rank), WORLD_SIZE="2")


def train(num_steps, factor, loss, **options):
    net = Net(4)
    events = []
    model = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    policy = "fp32 scale=dynamic on_overflow=skip scale.init=1024"
    stepper = Stepper(model, optimizer, policy, sinks=[events.append], **options)
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(rank))
    scales = []
    for step in range(1, num_steps + 1):
        net.factor = factor(step) if rank == 1 else 1.0
        times = loss(step) if rank == 1 else 1.0
        scales.append(stepper.step(lambda: times * (model(x) - 1).square().mean()).scale)
    stepper.close()
    said = [[a.rule, a.step, a.rank, a.severity, a.message] for a in events if isinstance(a, Alert)]
    return {"scales": scales, "alerts": said}


code = 1
try:
    store = torch.distributed.FileStore(f"{folder}/store", 2)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    inf, nan = float("inf"), float("nan")
    spoilt = lambda step: inf if step in (30, 64) else 1.0
    fine = lambda step: 1.0
    found = {
        "gradient": train(110, spoilt, fine, log=f"{folder}/gradient"),
        "loss": train(60, fine, lambda step: nan if step == 30 else 1.0, log=f"{folder}/loss"),
        "half watched": train(60, spoilt, fine, watch=rank == 0),
    }
    torch.distributed.destroy_process_group()
    with open(f"{folder}/found-{rank}.json", "w") as file:
        json.dump(found, file)
    code = 0
finally:
    if rank == 1:
        os._exit(code)
    sys.exit(code or os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    environment = {
        **os.environ,
        "PYTHONPATH": f"{HERE.parent}{os.pathsep}{HERE}",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT, str(folder)],
        env=environment, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder, [json.loads((folder / f"found-{rank}.json").read_text()) for rank in (0, 1)]


def lines(folder, name, rank, kind):
    text = (folder / name / f"rank-{rank:05d}.jsonl").read_text()
    return [entry for entry in map(json.loads, text.splitlines()) if entry["kind"] == kind]


def said(found, rule="nonfinite-gradients"):
    return [tuple(alert[1:4]) for alert in found["alerts"] if alert[0] == rule]


def test_a_gradient_that_is_inf_on_one_rank_lowers_the_scale_of_both_in_one_step(ranks):
    """Once, although both ask for it twice in a window; by itself the scale halves after steps 30 and 64."""
    folder, found = ranks
    for rank in (0, 1):
        assert [entry["step"] for entry in lines(folder, "gradient", rank, "reduction")] == [50]
        scales = found[rank]["gradient"]["scales"]
        assert scales == [1024.0] * 30 + [512.0] * 20 + [256.0] * 14 + [128.0] * 46
        assert said(found[rank]["gradient"]) == [(30, rank, "warning")]
        assert "lowers it once if every rank asks" in found[rank]["gradient"]["alerts"][0][-1]


def test_a_loss_that_is_not_finite_on_one_rank_lowers_it_on_none(ranks):
    """Every rank knows whose loss it was."""
    folder, found = ranks
    for rank in (0, 1):
        assert lines(folder, "loss", rank, "reduction") == []
        assert found[rank]["loss"]["scales"] == [1024.0] * 30 + [512.0] * 30
        assert said(found[rank]["loss"]) == [(30, rank, "error")]
        assert said(found[rank]["loss"], "loss-not-finite") == [(30, rank, "error")]
        (skipped,) = [step for step in lines(folder, "loss", rank, "step") if step.get("applied") is False]
        assert skipped["reason"].startswith("the loss of rank 1 is not finite")


def test_replicas_that_are_not_all_watched_lower_nothing_and_say_so(ranks):
    _, found = ranks
    for rank in (0, 1):
        assert found[rank]["half watched"]["scales"] == [1024.0] * 30 + [512.0] * 30
    ((*_, message),) = found[0]["half watched"]["alerts"]
    assert "nothing was lowered, since the ranks are no replicas" in message
    assert found[1]["half watched"]["alerts"] == []
