"""A job that goes on: after its end, with other settings, under another policy; and what ends it."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from reference.sums import write_sums
from safetensors.torch import load_file

from halfstep import HalfstepError, ScaleExhausted
from halfstep.train.quiet import quieten
from halfstep.train.run import train
from halfstep.train.settings import Settings

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # what transformers plans to rename
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
quieten()

SMALL = {"device": "cpu", "batch": 4, "max_length": 64, "steps": 6, "lr": 3e-3, "save_every": 3}


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def sums(tmp_path_factory):
    return write_sums(tmp_path_factory.mktemp("data"))


def weights(output):
    return load_file(f"{output}/model/model.safetensors")


def are_equal(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def steps_of(output):
    entries = map(json.loads, Path(output, "rank-00000.jsonl").read_text().splitlines())
    return [entry["step"] for entry in entries if entry["kind"] == "step"]


def test_a_job_that_had_ended_takes_no_step_and_gives_the_same(sums):
    settings = {**SMALL, "data": sums, "output": "out", "policy": "fp16"}
    first = train(Settings("sft", **settings))
    before = weights("out")
    again = train(Settings("sft", resume=True, **settings))
    assert again.precision.num_steps == 0
    assert not again.found
    assert "All 6 steps had been taken before: nothing was trained." in again.notes
    assert again.evaluation == first.evaluation
    assert are_equal(weights("out"), before)
    assert steps_of("out") == [1, 2, 3, 4, 5, 6]


def test_what_a_killed_run_left_is_no_part_of_the_model(sums):
    settings = {**SMALL, "data": sums, "output": "out"}
    train(Settings("sft", **settings))
    before = sorted(path.name for path in Path("out").rglob("*"))
    for left in (".model.part", ".model.old.part", ".checkpoint-5.part"):
        Path("out", left).mkdir()
        Path("out", left, "model-00001-of-00002.safetensors").write_bytes(b"half")
    Path("out/model/config.json").unlink()
    train(Settings("sft", resume=True, **settings))
    assert sorted(path.name for path in Path("out").rglob("*")) == before


def test_more_steps_go_on_from_the_last(sums):
    train(Settings("sft", data=sums, output="out", **SMALL))
    report = train(Settings("sft", data=sums, output="out", resume=True, **{**SMALL, "steps": 8}))
    assert report.precision.num_steps == 2
    assert any("It went on from step 6" in note for note in report.notes)
    assert any("It was begun for 6 steps" in note for note in report.notes)
    assert steps_of("out") == list(range(1, 9))
    assert json.loads(Path("out/job.json").read_text())["steps"] == 8


POLICIES = ["fp16", "fp32", "bf16 master=split16", "fp16 scale=static", "bf16 master=stochastic", "fp16"]


@pytest.mark.filterwarnings("ignore:.*loss scale of kind.*so that it starts afresh")
def test_the_policy_may_change_at_a_checkpoint(sums):
    settings = {**SMALL, "data": sums, "output": "out"}
    before, last = None, 0.0
    for number, policy in enumerate(POLICIES, 1):
        report = train(Settings("sft", resume=number > 1, **settings | {"policy": policy, "steps": 2 * number}))
        assert report.effective == policy
        assert report.precision.num_applied == 2
        if before is not None:
            assert any(note.startswith(f"Its policy was {before} before, and {policy} from") for note in report.notes)
            assert report.loss_first < 1.1 * last  # it goes on falling; new weights have a loss of 6.9
        before, last = policy, report.loss_last
    assert steps_of("out") == list(range(1, 13))


def test_a_scale_that_is_exhausted_leaves_a_checkpoint_to_go_on_from(sums):
    settings = {**SMALL, "data": sums, "output": "out", "save_every": 500, "lr": 30.0, "steps": 30}
    with pytest.raises(ScaleExhausted, match=r"--resume with another --policy goes on from out/checkpoint-\d+\.$") as e:
        train(Settings("sft", policy="fp16 scale.init=4", **settings))
    assert "\n" not in str(e.value)
    (checkpoint,) = Path("out").glob("checkpoint-*")
    step = int(checkpoint.name.rpartition("-")[2])
    saved = load_file(checkpoint / "model.safetensors")
    assert all(weight.isfinite().all() for weight in saved.values())
    assert end_of("out")["state"] == "failed"
    report = train(Settings("sft", policy="fp32", resume=True, **{**settings, "steps": step + 2}))
    assert report.precision.num_steps == 2
    assert steps_of("out")[-2:] == [step + 1, step + 2]


def end_of(output):
    return json.loads(Path(output, "rank-00000.jsonl").read_text().splitlines()[-1])


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="limits of files are POSIX")
def test_a_full_disk_is_one_line_and_the_log_says_how_it_ended(sums):
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**21, before[1]))  # the weights take 3.5 MiB
    try:
        with pytest.raises(HalfstepError, match="folder out/checkpoint-3: it cannot be written") as error:
            train(Settings("sft", data=sums, output="out", **SMALL))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert "\n" not in str(error.value)
    assert sorted(path.name for path in Path("out").iterdir()) == ["job.json", "rank-00000.jsonl"]
    end = end_of("out")
    assert end["kind"] == "end"
    assert end["state"] == "failed"
    assert end["reason"] == f"HalfstepError: {error.value}"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lr": 1.0}, "it was begun with lr 0.003"),
        ({"seed": 1}, "it was begun with seed 0"),
        ({"data": "builtin"}, "it was begun with other data"),
        ({"steps": 5}, "steps=5: the last checkpoint in out is of step 6"),
    ],
)
def test_another_job_is_not_taken_for_this_one(changes, message, sums):
    settings = {**SMALL, "data": sums, "output": "out"}
    train(Settings("sft", **settings))
    before = {path: path.stat().st_mtime_ns for path in Path("out").rglob("*")}
    with pytest.raises(HalfstepError, match=message):
        train(Settings("sft", resume=True, **settings | changes))
    assert {path: path.stat().st_mtime_ns for path in Path("out").rglob("*")} == before


def test_sigterm_ends_a_run_as_ctrl_c_does(sums, capfd):
    asked = []

    def show(text, step, total):
        if step == 2 and not asked:
            asked.append(step)
            os.kill(os.getpid(), signal.SIGTERM)

    report = train(Settings("sft", data=sums, output="out", **SMALL), show)
    assert report.stopped_at == 2
    assert Path("out/checkpoint-2").is_dir()
    assert "stopping after this step; once more stops at once" in capfd.readouterr().err
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_what_is_shown_names_the_step_that_it_is_of(sums):
    shown = []
    train(
        Settings("sft", data=sums, options="eval_strategy=steps eval_steps=3 logging_steps=1", **SMALL),
        lambda *words: shown.append(words),
    )
    last = {step: text for text, step, _ in shown if text.startswith("loss") and "held out" not in text}
    logs = json.loads(Path("runs/sft-tiny/checkpoint-6/trainer_state.json").read_text())["log_history"]
    losses = {
        log["step"]: f"loss {log['loss']:.4g}, gradient norm {log['grad_norm']:.3g}" for log in logs if "loss" in log
    }
    assert last == losses
    assert len(losses) == 6
    assert sum("held out" in text for text, step, _ in shown if step == 6) == 1  # not evaluated twice
