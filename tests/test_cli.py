"""The command: what it prints where, exit status, one line for every error, nothing half-written."""

import html
import json
import re
import signal
import subprocess
import sys
import time

import pytest

from halfstep.cli import run


def test_compare_writes_json_and_html(tmp_path, capsys):
    json_file, html_file = tmp_path / "r.json", tmp_path / "r.html"
    arguments = ["--seeds", "3", "--steps", "4", "--json", str(json_file), "--html", str(html_file)]
    assert run(["compare", "mlp", *arguments]) == 0
    out = capsys.readouterr().out
    assert out.startswith("mlp over 3 seeds: ")
    report = json.loads(json_file.read_text())
    assert [policy["policy"] for policy in report["policies"]] == ["fp32", "bf16", "fp16"]
    assert html_file.read_text().lstrip().lower().startswith("<!doctype html>")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r.html", "r.json"]


def test_json_alone_goes_to_standard_output(capsys):
    for arguments in (["doctor", "--json"], ["doctor", "--json", "-"], ["doctor", "--json", "--device", "cpu"]):
        assert run(arguments) == 0
        assert json.loads(capsys.readouterr().out)["policy"]


@pytest.mark.parametrize(
    ("arguments", "status", "keys"),
    [
        (["trace", "fragile"], 1, ["step", "policy", "producer", "carriers", "before", "advice"]),
        (["ranges", "mlp"], 0, ["modules", "advice"]),
        (["audit", "fragile"], 1, ["ops", "advice"]),
        (["diff", "mlp", "--policies", "fp32,bf16"], 0, ["paired_pct", "first", "advice"]),
        (
            ["tune", "fragile", "--steps", "3"],
            1,
            ["fp32", "probes", "minimal", "policy_file", "verdict", "cost", "advice"],
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_a_tool_writes_its_report_in_every_form(arguments, status, keys, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run([*arguments, "--json", "r.json", "--html", "r.html"]) == status
    printed = capsys.readouterr()
    assert printed.err == ""
    report = json.loads((tmp_path / "r.json").read_text(), parse_constant=pytest.fail)
    assert set(keys) <= report.keys()
    assert all(set(advice) == {"text", "policy", "result"} for advice in report["advice"])
    page = (tmp_path / "r.html").read_text()
    assert page.lower().startswith("<!doctype html>")
    headline = html.unescape(re.search(r"<h1>(.*?)</h1>", page, re.S)[1])
    assert printed.out.startswith(headline)


def test_a_policy_file_stands_for_a_policy_everywhere(tmp_path, capsys):
    file = tmp_path / "tuned.toml"
    file.write_text('compute = "fp16"\n[modules]\npool = "fp32"\n')
    for command in ("trace", "ranges", "audit"):
        flag = ["--steps", "3"] if command == "trace" else ["--step", "2"]
        assert run([command, "fragile", "--policy", str(file), *flag]) == 0, capsys.readouterr()
    assert run(["diff", "fragile", "--policies", f"fp32,{file}", "--step", "2"]) == 0
    assert "module:pool=fp32" in capsys.readouterr().out


def test_what_it_looks_for_is_status_1(capsys):
    assert run(["compare", "fragile", "--policies", "fp32,fp16", "--seeds", "1", "--steps", "20"]) == 1
    assert "diverged" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["compare", "nope"], "no built-in workload has this name"),
        (["compare", "charml"], "did you mean charlm"),
        (["compare", "missing.py"], "no such file"),
        (["compare", "mlp", "--policies", "fp33"], "'fp33'"),
        (["compare", "mlp", "--policies", "fp32,e4m3"], "no region computes in"),
        (["compare", "mlp", "--policies", ","], "nothing to compare"),
        (["compare", "mlp", "--steps", "many"], "--steps"),
        (["compare", "mlp", "--steps", "-1"], "steps=-1"),
        (["compare", "mlp", "--steps", "0"], "steps=0"),
        (["compare", "mlp", "--seeds", "-1"], "seeds=-1"),
        (["compare", "mlp", "--margin", "-1", "--seeds", "1", "--steps", "1"], "margin"),
        (["compare", "mlp", "--device", "gpu7"], "gpu7"),
        (["compare", "mlp", "--json", "no/such/dir/r.json"], "no directory"),
        (["compare", "mlp", "--html", "."], "is a directory"),
        (["compare", "mlp", "--data", "x"], "no such option"),
        (["compare"], "WORKLOAD"),
        (["compare", "mlp", "--sedes", "3"], "--sedes"),
        (["comparre"], "comparre"),
        (["trace", "nope"], "no built-in workload has this name"),
        (["trace", "mlp", "--steps", "0"], "steps=0"),
        (["trace", "mlp", "--policy", "fp33"], "'fp33'"),
        (["trace", "mlp", "--policy", "missing.toml"], "missing.toml"),
        (["trace", "mlp", "--seed", "-1"], "seed -1"),
        (["ranges", "mlp", "--step", "0"], "step 0"),
        (["ranges", "mlp", "--html", "no/such/dir/r.html"], "no directory"),
        (["ranges", "mlp", "--device", "gpu7"], "gpu7"),
        (["audit", "mlp", "--step", "-3"], "step -3"),
        (["audit", "missing.py"], "no such file"),
        (["diff", "mlp", "--policies", "fp32"], "two"),
        (["diff", "mlp", "--policies", "fp32,bf16,fp16"], "two"),
        (["tune", "mlp", "--policy", "fp32"], "nothing in 16 bit"),
        (["tune", "mlp", "--seeds", "0"], "seeds=0"),
        (["tune", "mlp", "--probes", "0"], "max_probes=0"),
        (["tune", "mlp", "--policy-file", "no/such/dir/p.toml"], "no directory"),
        (["doctor", "--device", "tpu"], "tpu"),
        (["new", "no/such/dir/x.py"], "no/such/dir"),
    ],
)
def test_a_wrong_call_is_one_line_and_status_2(arguments, message, capsys):
    assert run(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("halfstep: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err


def test_no_command_is_help_and_version_is_a_line(capsys):
    assert run([]) == 2
    assert "compare" in capsys.readouterr().out
    assert run(["--version"]) == 0
    assert capsys.readouterr().out.startswith("halfstep 0.")


def test_new_writes_a_file_that_compare_runs(tmp_path, capsys):
    file = tmp_path / "mine.py"
    assert run(["new", str(file)]) == 0
    assert run(["new", str(file)]) == 2
    assert run(["compare", f"{file}:workload", "--seeds", "1", "--steps", "2", "--policies", "fp32,bf16"]) == 0
    assert "no verdict" in capsys.readouterr().out


def test_interrupt_keeps_finished_trials(tmp_path):
    """A real SIGINT to a real process, once the second seed has begun."""
    begun, json_file, workload = tmp_path / "begun", tmp_path / "r.json", tmp_path / "mine.py"
    workload.write_text(
        "from pathlib import Path\n"
        "from halfstep.workloads import mlp\n"
        "def workload(seed):\n"
        f"    seed and Path({str(begun)!r}).touch()\n"
        "    return mlp.workload(seed)\n"
    )
    command = [sys.executable, "-m", "halfstep", "compare", str(workload), "--policies", "fp32", "--seeds", "500"]
    process = subprocess.Popen(
        [*command, "--steps", "20", "--json", str(json_file)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 120
    while not begun.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "the first trial never ended"
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0
    assert "interrupted" in out
    assert err.startswith("halfstep: interrupted; the report holds the ")
    report = json.loads(json_file.read_text())
    assert report["interrupted"] is True
    assert len(report["policies"][0]["final_loss"]["values"]) < 500


def test_interrupt_before_anything_has_ended_says_so(tmp_path):
    """A real SIGINT while trace looks for what is not there."""
    begun, workload = tmp_path / "begun", tmp_path / "mine.py"
    workload.write_text(
        "from pathlib import Path\n"
        "from halfstep.workloads import mlp\n"
        "def workload(seed):\n"
        f"    Path({str(begun)!r}).touch()\n"
        "    return mlp.workload(seed)\n"
    )
    command = [sys.executable, "-m", "halfstep", "trace", str(workload), "--steps", "1000000", "--json", "r.json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    deadline = time.monotonic() + 120
    while not begun.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "the run never began"
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (130, "")
    assert err == "halfstep: interrupted; nothing was left half-written\n"
    assert not (tmp_path / "r.json").exists()
