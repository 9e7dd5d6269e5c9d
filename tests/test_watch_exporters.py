"""What the exporters write, read back by the tool that it is for."""

import json
import math
import subprocess
import sys

import pytest

from halfstep.errors import HalfstepError
from halfstep.report import json_number
from halfstep.watch.entry import RunStart, Step
from halfstep.watch.export import export
from halfstep.watch.exporters import exporter_of, mlflow
from halfstep.watch.exporters.fact import Facts, describe
from halfstep.watch.exporters.prometheus import PrometheusFile, metrics_text
from halfstep.watch.run_state import STATES
from halfstep.watch.session import Session
from halfstep.watch.settings import Watch

NAN, INF = math.nan, math.inf
LOSSES = [2.0, NAN, INF, -INF, 1.5]
NORMS = [0.5, NAN, INF, 0.25, 0.125]
INFO = {"requested": "auto", "effective": "fp16", "reason": "a | b", "device": "H200", "versions": {"torch": "2.13"}}
START = 1_700_000_000.0
REPLACED = Step(4, START + 4, loss=9.0, grad_norm=9.0, scale=1024.0)
"""Of before the seam, after which step 4 is computed again."""


def start(session, time, **other):
    return RunStart(time, session=session, policy="fp16", info=INFO, scale={"kind": "dynamic"}, **other).to_entry()


def alert(step, time, rank=0, severity="error"):
    text = {"message": "99 of <100> lost", "action": "Look at it."}
    return {
        "kind": "alert",
        "time": time,
        "rule": "loss-spike",
        "step": step,
        "severity": severity,
        "rank": rank,
        **text,
    }


def steps(first, last, offset):
    for n in range(first, last + 1):
        is_finite = math.isfinite(LOSSES[n - 1]) and math.isfinite(NORMS[n - 1])
        yield Step(
            n,
            START + offset + n / 4,
            LOSSES[n - 1],
            NORMS[n - 1],
            scale=1024.0,
            applied=is_finite,
            num_replays=n - 1,
            nonfinite_share=0.0 if is_finite else None,
            count=32.0,
            memory_mib=100.5 if n > 1 else None,
        ).to_entry()


def a_run():
    """Steps 1 to 4 of one process, and of another, which resumed after step 3, steps 4 and 5; time goes by quarters."""
    layers = {"parameters": ["a.weight", "a.bias"], "norms": [3.5, "Infinity"]}
    return [
        start("one", START),
        *steps(1, 3, 0),
        alert(3, START + 0.75),
        REPLACED.to_entry(),
        start("two", START + 100, num_ranks=2),
        {"kind": "seam", "time": START + 100, "step": 3},
        *steps(4, 5, 100),
        {"kind": "layers", "time": START + 101.25, "step": 5, **layers},
        {
            "kind": "promotion",
            "time": START + 101.25,
            "step": 5,
            "module": "a",
            "policy": "p",
            "reason": "it overflows",
        },
        {"kind": "gap", "time": START + 102, "num_lost": 7},
        alert(5, START + 102, severity="note"),
        {"kind": "end", "time": START + 103, "state": "failed", "reason": "RuntimeError: a fault"},
    ]


def write(exporter, entries):
    for entry in entries:
        # As a log's reader has it: NaN and inf are texts.
        exporter.write(json.loads(json.dumps(entry, allow_nan=False)))
    exporter.close()


def shown(values):
    """NaN is not equal to itself: every value as strict JSON has it."""
    return [json_number(value) for value in values]


def save(folder, rank, entries):
    folder.mkdir(exist_ok=True)
    lines = "".join(json.dumps(entry, allow_nan=False) + "\n" for entry in entries)
    (folder / f"rank-{rank:05d}.jsonl").write_text(lines)


# TensorBoard.


def tensorboard_of(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder)).Reload()


def texts(events, tag):
    return [(event.step, event.tensor_proto.string_val[0].decode()) for event in events.Tensors(tag)]


def test_tensorboard_reads_every_number_and_forgets_what_a_seam_replaces(tmp_path):
    exporter = exporter_of(f"tensorboard:{tmp_path}", "mine")
    exporter.write(a_run()[1])
    assert [event.value for event in tensorboard_of(tmp_path / "mine").Scalars("loss")] == [2.0]  # at once
    write(exporter, a_run())
    events = tensorboard_of(tmp_path / "mine")
    loss = events.Scalars("loss")
    assert [event.step for event in loss] == [1, 2, 3, 4, 5]
    assert shown(event.value for event in loss) == [2.0, "NaN", "Infinity", "-Infinity", 1.5]
    assert [event.wall_time - START for event in loss] == [0.25, 0.5, 0.75, 101, 101.25]
    assert shown(event.value for event in events.Scalars("grad_norm")) == [0.5, "NaN", "Infinity", 0.25, 0.125]
    assert [event.value for event in events.Scalars("nonfinite")] == [0, 1, 1, 1, 0]
    assert [event.value for event in events.Scalars("applied")] == [1, 0, 0, 0, 1]
    assert [event.value for event in events.Scalars("num_replays")] == [0, 1, 2, 3, 4]
    assert [event.value for event in events.Scalars("scale")] == [1024.0] * 5
    assert [(e.step, e.value) for e in events.Scalars("nonfinite_share")] == [(1, 0.0), (5, 0.0)]
    assert [(e.step, e.value) for e in events.Scalars("memory_mib")] == [(n, 100.5) for n in (2, 3, 4, 5)]
    # None at the first step of a process.
    assert [(e.step, e.value) for e in events.Scalars("seconds")] == [(2, 0.25), (3, 0.25), (5, 0.25)]
    assert [(e.step, e.value) for e in events.Scalars("count_per_s")] == [(2, 128.0), (3, 128.0), (5, 128.0)]
    assert [(e.step, e.value) for e in events.Scalars("layers/a.weight")] == [(5, 3.5)]
    assert [(e.step, e.value) for e in events.Scalars("layers/a.bias")] == [(5, INF)]
    said = "99 of <100> lost. Look at it."
    assert texts(events, "alert/loss-spike") == [(3, f"loss-spike, error: {said}"), (5, f"loss-spike, note: {said}")]
    # Each under a tag of its own: the server of TensorBoard shows one text of a tag and a step.
    assert texts(events, "seam") == [(3, "The run goes on after step 3; later steps of before do not count.")]
    assert texts(events, "promotion/a") == [(5, "a computes in fp32 from now on: it overflows")]
    assert texts(events, "gap") == [(5, "The log was lost for a while: 7 entries were never written.")]
    assert texts(events, "end") == [(5, "The run failed: RuntimeError: a fault")]
    described = texts(events, "run")[0][1]
    assert "| policy | fp16 |\n" in described
    assert "| reason | a &#124; b |\n" in described
    assert "| versions.torch | 2.13 |\n" in described


def test_a_session_feeds_the_exporters_of_its_settings(tmp_path):
    settings = Watch(exporters=(f"tensorboard:{tmp_path / 'tb'}",))
    session = Session(RunStart(START), settings, tmp_path / "runs" / "mine", lambda alert: None)
    session.see(Step(1, START, 1.0, 2.0))
    session.close()
    events = tensorboard_of(tmp_path / "tb" / "mine")
    assert [(event.step, event.value) for event in events.Scalars("grad_norm")] == [(1, 2.0)]
    assert texts(events, "end") == [(1, "The run finished.")]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/dev/full")
def test_a_full_disk_is_raised_out_of_write(tmp_path):
    exporter = exporter_of(f"tensorboard:{tmp_path}", "mine")
    with open("/dev/full", "wb", buffering=0) as full:
        good, exporter._records._writer = exporter._records._writer, full
        with pytest.raises(OSError, match="No space left"):
            write(exporter, a_run())
        good.close()


# Weights & Biases. Its service takes a second to start, so one test has all of it.


def test_wandb_reads_every_step_of_a_run_that_resumed(tmp_path, monkeypatch):
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"NETRC": tmp_path / "netrc", "HOME": tmp_path, "WANDB_DIR": tmp_path}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    import wandb
    from wandb.util import get_core_path

    with monkeypatch.context() as older:
        older.setattr(wandb, "__version__", "0.30.9")
        with pytest.raises(HalfstepError, match="is too old"):
            exporter_of("wandb:mine", "run")
    with pytest.raises(HalfstepError, match="exporter wandb:mine: nobody is logged in"):
        exporter_of("wandb:mine", "run")
    wandb.teardown()
    monkeypatch.setenv("WANDB_MODE", "offline")
    with pytest.raises(HalfstepError, match="Invalid project name 'a/b'"):
        exporter_of("wandb:a/b", "run")
    try:
        exporter = exporter_of("wandb:project", "mine")
        assert wandb.run is None  # that is a script's own
        write(exporter, a_run())
    finally:
        wandb.teardown()
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    command = [get_core_path(), "leet", "inspect", "-no-observability", "-json", "-run-file", str(file)]
    lines = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout.splitlines()
    records = [json.loads(line) for line in lines]

    def of(kind):
        return [record[kind] for record in records if record["type"] == kind]

    assert (of("run")[0]["project"], of("run")[0]["display_name"], of("run")[0]["run_group"]) == (
        "project",
        "mine",
        "mine",
    )
    assert {"glob_name": "*", "options": {"defined": True, "step_sync": True}, "step_metric": "step"} in of("metric")
    rows = [row["item"] for row in of("history")]
    losses = [(row["step"], row["loss"]) for row in rows if "loss" in row]
    assert losses == [(1, 2), (2, "NaN"), (3, "Infinity"), (4, 9), (4, "-Infinity"), (5, 1.5)]
    assert [row["nonfinite"] for row in rows if "loss" in row] == [0, 1, 1, 0, 1, 0]
    assert [row["seconds"] for row in rows if "seconds" in row] == [0.25, 0.25, 1.25, 0.25]
    (layers,) = [row for row in rows if "layers/a.bias" in row]
    assert (layers["step"], layers["layers/a.weight"], layers["layers/a.bias"]) == (5, 3.5, "Infinity")
    alerts = [(row["step"], row["num_alerts"], row["alert"].split(":")[0]) for row in rows if "alert" in row]
    assert alerts == [(3, 1, "loss-spike, error"), (5, 2, "loss-spike, note")]
    assert [row["event"].split()[0] for row in rows if "event" in row] == ["The", "a", "The", "The"]
    sent = [(record["title"], record["level"]) for record in of("alert")]
    assert sent == [("loss-spike at step 3", "ERROR"), ("loss-spike at step 5", "INFO")]
    config = {}
    for record in [of("run")[0], *of("config")]:
        config |= record.get("config", record).get("update", {})
    assert (config["policy"], config["session"], config["num_ranks"]) == ("fp16", "two", "2")
    assert of("exit")[0]["exit_code"] == 1


# MLflow.


def test_mlflow_reads_every_number_and_says_how_the_run_ended(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    monkeypatch.delenv("MLFLOW_RUN_ID", raising=False)
    from mlflow import MlflowClient
    from mlflow.utils.validation import MAX_METRICS_PER_BATCH

    assert mlflow._BATCH == MAX_METRICS_PER_BATCH
    monkeypatch.setattr(mlflow, "_BATCH", 5)
    entries = a_run()
    # More than one batch, under names that MLflow does not take.
    many = {"kind": "layers", "time": START + 5, "step": 4, "parameters": [f"a|{n}" for n in range(12)]}
    many["norms"] = list(range(12))
    write(exporter_of("mlflow:experiment", "mine"), [*entries[:6], many, {**many, "parameters": ["last"]}])
    client = MlflowClient()
    experiment = client.get_experiment_by_name("experiment")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("mine", "KILLED")  # its log has no end
    assert [run.data.metrics[f"layers/a_{n}"] for n in range(12)] == many["norms"]
    assert run.data.metrics["layers/last"] == 0  # sent at the end

    monkeypatch.setenv("MLFLOW_RUN_ID", "0" * 32)
    with pytest.raises(HalfstepError, match=r"exporter mlflow:experiment: .* not found"):
        exporter_of("mlflow:experiment", "mine")

    # The process that resumes goes on in the same run when it is told to.
    monkeypatch.setenv("MLFLOW_RUN_ID", run.info.run_id)
    write(exporter_of("mlflow:experiment", "mine"), entries[6:])
    run = client.get_run(run.info.run_id)
    assert run.info.status == "FAILED"

    def history(name):
        return client.get_metric_history(run.info.run_id, name)

    assert [point.step for point in history("loss")] == [1, 2, 3, 4, 4, 5]
    assert shown(p.value for p in history("loss")) == [2.0, "NaN", "Infinity", 9.0, "-Infinity", 1.5]
    assert [point.timestamp - 1000 * START for point in history("loss")] == [250, 500, 750, 4000, 101_000, 101_250]
    assert [point.value for point in history("nonfinite")] == [0, 1, 1, 0, 1, 0]
    assert [(point.step, point.value) for point in history("layers/a.bias")] == [(5, INF)]
    params, tags = run.data.params, run.data.tags
    assert (params["policy"], params["versions.torch"], params["session"]) == ("fp16", "2.13", "one")
    assert (tags["session"], tags["num_ranks"]) == ("two", "2")
    assert "policy" not in tags
    assert tags["step-00000003/alert/loss-spike"] == "loss-spike, error: 99 of <100> lost. Look at it."
    assert tags["step-00000003/seam"].startswith("The run goes on after step 3")
    assert tags["step-00000005/end"] == "The run failed: RuntimeError: a fault"
    assert len(client.search_runs([experiment.experiment_id])) == 1


# Prometheus.


def samples(text):
    from prometheus_client.parser import text_string_to_metric_families

    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


def value(text, name, **labels):
    (found,) = [s.value for s in samples(text) if s.name == name and labels.items() <= s.labels.items()]
    return found


def test_prometheus_reads_the_metrics_of_runs():
    name = 'a"b\\c\nd'
    known = {"rank": 0, "policy": "fp16", "last_step": 7, "num_skipped": 2, "num_replays": 3}
    runs = [
        {
            "name": name,
            "state": "failed",
            "loss": "NaN",
            "grad_norm": "Infinity",
            "scale": 65536.0,
            "seconds": 0.5,
            **known,
        },
        {
            "name": "other",
            "state": "running",
            "loss": "-Infinity",
            "grad_norm": None,
            "alert_counts": [["r", "error", 5]],
        },
    ]
    text = metrics_text(runs)
    assert f'halfstep_loss{{policy="fp16",rank="0",run="{name}"}}' not in text  # it is escaped
    assert math.isnan(value(text, "halfstep_loss", run=name, rank="0", policy="fp16"))
    assert value(text, "halfstep_grad_norm", run=name) == INF
    assert value(text, "halfstep_loss", run="other") == -INF
    assert [s.labels["run"] for s in samples(text) if s.name == "halfstep_grad_norm"] == [name]  # unknown is unknown
    assert value(text, "halfstep_loss_scale", run=name) == 65536
    assert value(text, "halfstep_step", run=name) == 7
    assert value(text, "halfstep_seconds_per_step", run=name) == 0.5
    assert value(text, "halfstep_skipped_steps_total", run=name) == 2
    assert value(text, "halfstep_replays_total", run=name) == 3
    assert value(text, "halfstep_alerts_total", run="other", rule="r", severity="error") == 5
    states = [s.labels["state"] for s in samples(text) if s.name == "halfstep_state" and s.value]
    assert states == ["failed", "running"]
    assert samples(metrics_text([])) == []


def test_prometheus_file_is_whole_from_the_start_to_the_end(tmp_path):
    file = tmp_path / "mine.prom"
    exporter = PrometheusFile(str(file), "mine")
    assert samples(file.read_text()) == []
    entries = a_run()
    for entry in entries[:5]:
        exporter.write(entry)
    # It is written at once at an alert.
    assert value(file.read_text(), "halfstep_step") == 3
    assert value(file.read_text(), "halfstep_seconds_per_step") == 0.25
    assert value(file.read_text(), "halfstep_state", state="running") == 1
    write(exporter, entries[5:])
    text = file.read_text()
    assert value(text, "halfstep_loss", run="mine", rank="0", policy="fp16") == 1.5
    assert "halfstep_seconds_per_step{" not in text  # one pause since the seam tells none
    assert value(text, "halfstep_skipped_steps_total") == 3
    assert value(text, "halfstep_replays_total") == 10
    assert value(text, "halfstep_alerts_total", rule="loss-spike", severity="error") == 1
    assert value(text, "halfstep_alerts_total", rule="loss-spike", severity="note") == 1
    assert value(text, "halfstep_last_entry_timestamp_seconds") == START + 103
    assert value(text, "halfstep_state", state="failed") == 1
    assert value(text, "halfstep_state", state="running") == 0
    assert [path.name for path in tmp_path.iterdir()] == ["mine.prom"]


def test_prometheus_has_the_runs_whose_texts_are_no_utf_8(tmp_path):
    odd = {"name": "a\udcff", "policy": "fp\ud800", "rank": None, "alert_counts": [["r\ud800", "e\udfff", 2]]}
    text = metrics_text([{"name": "good", "loss": 1.0}, {**odd, "loss": 2.0}])
    assert value(text, "halfstep_loss", run="good") == 1.0
    assert value(text, "halfstep_loss", run="a?", policy="fp?", rank="") == 2.0
    assert value(text, "halfstep_alerts_total", rule="r?", severity="e?") == 2
    write(PrometheusFile(str(tmp_path / "a.prom"), "mine"), [{"kind": "run", "time": START, "policy": "\ud800"}])
    assert value((tmp_path / "a.prom").read_text(), "halfstep_state", policy="?", state="running") == 1


def test_prometheus_has_every_state():
    states = [s for s in samples(metrics_text([{"name": "a", "state": "reading"}])) if s.name == "halfstep_state"]
    assert {s.labels["state"]: s.value for s in states} == dict.fromkeys(STATES, 0.0) | {"reading": 1.0}


def test_prometheus_file_of_a_log_on_its_way_has_the_last_step_and_the_median_pause(tmp_path):
    times = [0.1 * (n // 10) * 10 + 0.001 * (n % 10) for n in range(45)]  # a GPU's: the host waits at every tenth step
    paused = [Step(n, START + time, NAN, 1.0).to_entry() for n, time in enumerate(times, 1)]
    write(PrometheusFile(str(tmp_path / "a.prom"), "mine"), paused)
    text = (tmp_path / "a.prom").read_text()
    assert math.isnan(value(text, "halfstep_loss"))
    assert value(text, "halfstep_seconds_per_step") == pytest.approx(0.1)


# All of them.


def test_time_between_steps_is_told_only_where_they_follow_each_other():
    facts = Facts()
    given = [(1, 0.0), (2, 0.5), (4, 1.5), (5, 1.5), (6, 1.25), (7, 2.25)]
    told = [facts.of(Step(n, START + time, 1.0, 1.0, count=3.0).to_entry()).numbers for n, time in given]
    assert [numbers.get("seconds") for numbers in told] == [None, 0.5, None, 0.0, None, 1.0]
    assert [numbers.get("count_per_s") for numbers in told] == [None, 6.0, None, None, None, 3.0]


@pytest.mark.parametrize("versions", [None, "2.13", ["torch"], 3])
def test_versions_that_are_no_table_are_left_out(versions):
    assert describe({"kind": "run", "info": {"device": "T4", "versions": versions}}) == {"device": "T4"}


@pytest.mark.parametrize("kind", ["run", "seam"])
def test_the_first_step_of_a_process_or_after_a_seam_replaces_those_of_before(kind):
    facts = Facts()
    between = {"kind": kind, "time": START, "step": 1}
    entries = [*(Step(n, START + n, 1.0, 1.0).to_entry() for n in (1, 2)), between, Step(3, START + 3, 1, 1).to_entry()]
    seen = [facts.of(entry) for entry in entries]
    assert [fact.restarts for fact in seen] == [True, False, False, True]
    assert "seconds" not in seen[-1].numbers


@pytest.mark.parametrize("target", ["tensorboard:tb", "prometheus:a.prom"])
def test_lines_with_the_least_that_they_need_are_taken(target, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    least = [
        {"kind": "run", "info": None},
        {"kind": "step", "step": 1, "time": START, "loss": "NaN", "grad_norm": 1},
        {"kind": "layers", "step": 1, "parameters": ["a", "b"], "norms": [1]},
        {"kind": "promotion", "step": 1},
        {"kind": "alert", "rule": "r", "step": 1, "severity": "odd", "message": "m", "action": "a", "rank": None},
        {"kind": "overflow", "step": 1, "scale": 1},
        {"kind": "of-tomorrow", "step": "one"},
        {"kind": "end", "state": "odd"},
    ]
    save(tmp_path / "run", 0, least)
    report = export(tmp_path / "run", target)
    assert (report.num_steps, report.num_nonfinite, report.num_alerts) == (1, 1, 1)


@pytest.mark.parametrize("target", ["tensorboard", "wandb:", "sacred:x", ""])
def test_a_target_that_is_none_lists_them(target):
    listed = "tensorboard:FOLDER, wandb:PROJECT, mlflow:EXPERIMENT, prometheus:FILE"
    with pytest.raises(HalfstepError, match=f"no such exporter. Use one of {listed}"):
        exporter_of(target, "run")


@pytest.mark.parametrize(
    ("target", "module", "package"),
    [
        ("tensorboard:x", "tensorboard.compat.proto.event_pb2", "tensorboard"),
        ("wandb:x", "wandb", "wandb"),
        ("mlflow:x", "mlflow.entities", "mlflow"),
        ("prometheus:x.prom", "prometheus_client.exposition", "prometheus-client"),
    ],
)
def test_a_missing_package_is_named(target, module, package, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(HalfstepError, match=f"exporter to {package}: .*Run: pip install {package}$"):
        exporter_of(target, "run")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_said_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(HalfstepError, match="Name another folder"):
        exporter_of(f"tensorboard:{tmp_path / 'file'}", "run")
    with pytest.raises(HalfstepError, match="it cannot be written"):
        exporter_of(f"prometheus:{tmp_path / 'none' / 'a.prom'}", "run")


# Export of a log.


def test_export_takes_the_first_rank_and_the_alerts_of_all(tmp_path):
    save(tmp_path / "run", 0, a_run())
    save(
        tmp_path / "run",
        1,
        [start("one", START, rank=1), *steps(1, 2, 0), alert(2, START + 0.6, rank=1), alert(2, START + 999, rank=1)],
    )
    save(tmp_path / "run", 2, [])
    report = export(tmp_path / "run", f"tensorboard:{tmp_path / 'tb'}")
    counts = {"rank": 0, "num_steps": 6, "num_nonfinite": 3, "num_alerts": 4}
    assert report.to_dict() == {"run": "run", "target": f"tensorboard:{tmp_path / 'tb'}", **counts}
    assert str(report).startswith(f"6 steps and 4 alerts of run went to tensorboard:{tmp_path / 'tb'}.")
    assert not report.found
    events = tensorboard_of(tmp_path / "tb" / "run")
    assert [event.step for event in events.Scalars("loss")] == [1, 2, 3, 4, 5]
    others = texts(events, "alert/loss-spike/rank-1")
    assert [(step, text.split(":")[0]) for step, text in others] == [(2, "rank 1, loss-spike, error")] * 2
    assert len(texts(events, "alert/loss-spike")) == 2
    # A second time replaces the first.
    export(tmp_path / "run", f"tensorboard:{tmp_path / 'tb'}")
    assert [event.step for event in tensorboard_of(tmp_path / "tb" / "run").Scalars("loss")] == [1, 2, 3, 4, 5]


def test_export_of_no_log_makes_nothing(tmp_path):
    with pytest.raises(HalfstepError, match="it holds no log"):
        export(tmp_path, f"tensorboard:{tmp_path / 'tb'}")
    save(tmp_path / "run", 0, [])
    with pytest.raises(HalfstepError, match="no line of it is an entry"):
        export(tmp_path / "run", f"tensorboard:{tmp_path / 'tb'}")
    assert not (tmp_path / "tb").exists()


def test_export_says_where_the_tool_failed(tmp_path, monkeypatch):
    save(tmp_path / "run", 0, a_run())
    closed = []

    class Failing:
        def write(self, entry):
            if entry["kind"] == "alert":
                raise RuntimeError("the server is gone")

        def close(self):
            closed.append(True)

    monkeypatch.setattr("halfstep.watch.export.exporter_of", lambda target, run: Failing())
    said = (
        "exporter mlflow:x: it failed after 3 steps of run: RuntimeError: the server is gone. What arrived is not whole"
    )
    with pytest.raises(HalfstepError, match=said):
        export(tmp_path / "run", "mlflow:x")
    assert closed == [True]
