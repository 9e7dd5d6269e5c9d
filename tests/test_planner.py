"""``halfstep plan`` as a user calls it: what it prints, writes and refuses, and what stays out of its process."""

import importlib.util
import json
import pickle
import subprocess
import sys

import pytest

from halfstep.cli import run
from halfstep.errors import HalfstepError
from halfstep.plan import plan
from halfstep.plan.fake_step import fake_step
from halfstep.plan.subject import Subject
from halfstep.plan.target import target_of


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """One plan of a named card in every form: status, JSON, page, snapshot, folder."""
    folder = tmp_path_factory.mktemp("plan")
    names = {form: str(folder / f"plan.{form}") for form in ("json", "html", "pickle")}
    arguments = ["--json", names["json"], "--html", names["html"], "--snapshot", names["pickle"]]
    status = run(["plan", "mlp", "--card", "RTX 3070", "--policies", "fp32,bf16", *arguments])
    with open(names["json"]) as file:
        return status, json.load(file), folder


def test_every_form_is_written(planned):
    status, report, folder = planned
    assert status == 0
    assert sorted(path.name for path in folder.iterdir()) == ["plan.html", "plan.json", "plan.pickle"]
    assert (folder / "plan.html").read_text().lower().startswith("<!doctype html>")
    assert report["card"] == "RTX 3070"
    assert report["memory_gib"] == 8.0
    assert [each["policy"] for each in report["policies"]] == ["fp32", "bf16"]


def test_figures_are_those_of_the_traced_step(planned):
    _, report, _ = planned
    for row in report["policies"]:
        trace = fake_step(Subject("mlp"), row["policy"], target_of("RTX 3070"))
        assert row["peak_mib"] == trace.peak.nbytes / 2**20
        assert row["components"] == {name: n / 2**20 for name, n in trace.peak.components.items()}
        assert row["reserved_mib"] >= row["peak_mib"]
        assert row["fits"] is True
        assert row["largest_batch"] > report["batch_size"]
        assert row["samples_per_s_bound"] > 0


def test_stacks_and_advice_are_there(planned):
    _, report, _ = planned
    assert {"names", "peak_mib", "fits"} <= report["stacks"][0].keys()
    assert any(stack["names"] for stack in report["stacks"])
    assert report["assumptions"]


def test_snapshot_opens_with_torch(planned):
    from torch.cuda import _memory_viz

    folder = planned[2]
    snapshot = pickle.loads((folder / "plan.pickle").read_bytes())
    assert "segments" in snapshot
    assert "<html" in _memory_viz.trace_plot(snapshot).lower() or "<script" in _memory_viz.trace_plot(snapshot).lower()


@pytest.mark.slow
def test_a_step_is_divided_over_ranks():
    one = plan("mlp", ["bf16", "bf16 master=copy"], num_ranks=4)
    peaks = [peak for policy, peak in one.sharded if policy == "bf16"]
    assert [peak.stage for peak in peaks] == [1, 2, 3]
    states = one.plans[0].trace.peak.components["optimizer states"]
    assert all(peak.components["optimizer states"] < states / 3 for peak in peaks)
    (refused,) = [peak for policy, peak in one.sharded if policy != "bf16"]
    assert "is not derived" in refused


@pytest.mark.slow
def test_a_batch_is_planned_without_its_data():
    small, large = (plan("mlp", ["fp32"], batch_size=n).plans[0].trace for n in (32, 64))
    assert (small.batch_size, large.batch_size) == (32, 64)
    assert large.peak.nbytes > small.peak.nbytes
    assert large.peak.components["weights"] == small.peak.components["weights"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["mlp", "--card", "RTX 3075"], ["card 'RTX 3075'", "Nearest names: RTX 3070"]),
        (["mlp", "--batch", "0"], ["a batch of 0"]),
        (["mlp", "--memory", "-1"], ["memory of -1 GiB"]),
        (["mlp", "--policies", "bf17"], ["bf17", "auto, fp32, tf32, bf16, fp16"]),
        (["mlp", "--policies", ","], ["a plan without a policy"]),
        pytest.param(
            ["mlp", "--card", "T4", "--policies", "bf16"],
            ["T4 cannot compute bf16", "Use fp16"],
            marks=pytest.mark.slow,  # refused in a worker, as the workload that is none below
        ),
        (["mlp", "--ranks", "0"], ["0 ranks"]),
        (["nothing"], ["workload 'nothing'"]),
        (["mlp", "--snapshot", "nowhere/plan.pickle"], ["there is no directory nowhere"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_wrong_call_is_one_line(arguments, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(["plan", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    for part in said:
        assert part in printed.err


def test_without_torch_it_is_one_line(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(HalfstepError, match="torch is not installed"):
        plan("mlp")


def test_the_process_of_the_caller_needs_no_torch():
    code = (
        "import sys; from halfstep.cli import run; status = run(['plan', 'mlp', '--policies', 'fp32', '--json', '-']);"
        "sys.exit(3 if 'torch' in sys.modules else status)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["policies"][0]["policy"] == "fp32"


@pytest.mark.slow
def test_exit_status_is_one_where_nothing_fits(capsys):
    assert run(["plan", "mlp", "--policies", "fp32", "--memory", "0.1"]) == 1
    assert "does not fit into 0.1 GiB" in capsys.readouterr().out
