"""What a job was begun with: it goes on as it was, and what differs is said."""

import json
import re
from dataclasses import replace

import pytest

from halfstep import HalfstepError
from halfstep.train.begun import Begun
from halfstep.train.defaults import with_defaults
from halfstep.train.settings import Settings

WHOLE = with_defaults(Settings("sft", device="cpu", batch=4, options="weight_decay=0.1 logging_steps=3"), 512)
DATA = "0123"


def begun(data=DATA, num_ranks=1, **changes):
    return Begun.of(replace(WHOLE, **changes), data, num_ranks)


@pytest.fixture
def folder(tmp_path):
    begun().write(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"max_norm": 0.5},
        {"checkpointing": True},
        {"device": "cuda"},
        {"save_every": 3},
        {"resume": True},
        {"output": "moved"},
        {"options": "logging_steps=1 weight_decay=0.1"},
        {"batch": 2, "accumulate": 2},
    ],
)
def test_what_changes_no_sample_and_no_rate_may_differ(folder, changes):
    assert begun(**changes).check(folder, 7) == ()


def test_ranks_share_the_samples_of_a_step(folder):
    assert begun(batch=2, num_ranks=2).check(folder, 7) == ()
    with pytest.raises(HalfstepError, match=r"samples of a step 4 \(now 8\)"):
        begun(num_ranks=2).check(folder, 7)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"task": "pretrain"}, "task sft (now pretrain)"),
        ({"model": "other"}, "model tiny (now other)"),
        ({"data": "9"}, "other data"),
        ({"lora": True}, "lora off (now on), lora-rank none (now 16), lora-targets none (now all-linear)"),
        ({"optimizer": "sgd"}, "optimizer adamw (now sgd)"),
        ({"lr": 0.5}, "lr 0.003 (now 0.5)"),
        ({"max_length": 64}, "max-length 128 (now 64)"),
        ({"seed": 1}, "seed 0 (now 1)"),
        ({"batch": 8}, "samples of a step 4 (now 8)"),
        ({"options": ""}, "options 'weight_decay=0.1' (now '')"),
        ({"seed": 1, "lr": 0.5}, "lr 0.003 (now 0.5), seed 0 (now 1)"),
    ],
)
def test_what_would_make_it_another_job_is_one_line(folder, changes, said):
    with pytest.raises(HalfstepError, match=re.escape(f"it was begun with {said}. Use the same")) as error:
        begun(**changes).check(folder, 7)
    assert "\n" not in str(error.value)


def test_another_policy_is_a_note(folder):
    assert begun(policy="fp16").check(folder, 7) == ("Its policy was auto before, and fp16 from step 7 on.",)


def test_more_steps_are_a_note_and_fewer_than_taken_are_refused(folder):
    (note,) = begun(steps=200).check(folder, 7)
    assert note == "It was begun for 150 steps: the learning rate goes on as that of 200 steps."
    with pytest.raises(HalfstepError, match=r"steps=6: the last checkpoint in .* is of step 7. Ask for more steps"):
        begun(steps=6).check(folder, 7)
    assert begun(steps=7).check(folder, 7)


@pytest.mark.parametrize("text", [None, "", "[]", "{}", "\xff"])
def test_what_is_not_known_is_said(tmp_path, text):
    if text is not None:
        (tmp_path / "job.json").write_bytes(text.encode("latin1"))
    (note,) = begun().check(tmp_path, 7)
    assert note.endswith("whether it was begun with the same settings is not known.")


def test_a_folder_of_a_model_is_the_same_from_everywhere(folder, tmp_path, monkeypatch):
    (tmp_path / "a" / "mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    begun(model="a/mine").write(folder)
    monkeypatch.chdir("a")
    assert begun(model="mine").check(folder, 7) == ()


def test_the_file_is_json(folder):
    assert json.loads((folder / "job.json").read_text())["samples of a step"] == 4
