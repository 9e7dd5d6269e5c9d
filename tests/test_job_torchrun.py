"""The command started by torchrun itself: what all ranks end with, and what Ctrl-C leaves."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.slow  # tests/test_compare_ranks.py has the same on ranks that stand already

LAUNCH = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


def launch(folder, *arguments):
    with (folder / "out").open("w") as out, (folder / "err").open("w") as err:
        return subprocess.Popen(
            [sys.executable, *LAUNCH, "-m", "halfstep", *arguments],
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
            stdout=out,
            stderr=err,
        )


def said(folder):
    return [line for line in (folder / "err").read_text().splitlines() if line.startswith("halfstep: ")]


def test_the_report_is_whole_although_torchrun_ends_every_rank_when_one_has_a_status(tmp_path):
    arguments = ["--policies", "fp32,fp16", "--steps", "2", "--seeds", "1", "--json", "r.json", "--html", "r.html"]
    assert launch(tmp_path, "compare", "fragile", *arguments).wait(300) == 1
    assert json.loads((tmp_path / "r.json").read_text())["policies"][1]["verdict"]["word"] == "diverged"
    assert "</html>" in (tmp_path / "r.html").read_text()[-20:]
    assert (tmp_path / "out").read_text().count("fragile over 1 seed") == 1
    assert said(tmp_path) == []
    assert "exitcode  : 1 " in (tmp_path / "err").read_text()


def test_ctrl_c_keeps_the_trials_that_have_ended(tmp_path):
    process = launch(tmp_path, "compare", "file.py", "--policies", "fp32", "--json", "r.json")
    process.wait(300)
    assert said(tmp_path) == [f"halfstep: workload file file.py: there is no such file. {HINT}"]

    (tmp_path / "file.py").write_text(WORKLOAD)
    process = launch(
        tmp_path, "compare", "file.py", "--policies", "fp32", "--steps", "5", "--seeds", "900", "--json", "r.json"
    )
    end = time.monotonic() + 300
    while not (tmp_path / "third").exists() and time.monotonic() < end:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    process.wait(60)
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["interrupted"]
    assert report["seeds"] == 900
    (line,) = said(tmp_path)
    assert line.startswith("halfstep: interrupted; the report holds the ")
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith((".", "r."))) == ["r.json"]


HINT = "Correct the path, or start one with halfstep new file.py."
WORKLOAD = """
import pathlib
import torch
import halfstep

def workload(seed):
    if seed == 3:
        pathlib.Path("third").touch()
    return halfstep.Workload(
        model=torch.nn.Linear(4, 1),
        batches=[torch.randn(8, 4) for _ in range(8)],
        loss=lambda model, x: model(x).float().square().mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
"""
