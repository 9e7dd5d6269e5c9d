"""Where a training job writes: nothing is written over, and a resumed one finds its last checkpoint."""

import os

import pytest

from halfstep import HalfstepError
from halfstep.train.folder import folder_of, last_checkpoint, step_of
from halfstep.train.settings import Settings


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_a_job_without_a_place_gets_a_new_one():
    names = []
    for _ in range(3):
        folder = folder_of(Settings("sft", model="some/where/mine"))
        names.append(str(folder))
        folder.mkdir(parents=True)
    assert names == ["runs/sft-mine", "runs/sft-mine-2", "runs/sft-mine-3"]
    assert str(folder_of(Settings("dpo"))) == "runs/dpo-tiny"
    assert str(folder_of(Settings("sft", model="mine", resume=True))) == "runs/sft-mine-3"


def test_a_folder_in_use_is_kept(tmp_path):
    folder = tmp_path / "out"
    assert folder_of(Settings("sft", output=str(folder))) == folder
    folder.mkdir()
    assert folder_of(Settings("sft", output=str(folder))) == folder
    (folder / "x").touch()
    with pytest.raises(HalfstepError, match=r"out: it is not empty. Use --resume to go on, or name another --output"):
        folder_of(Settings("sft", output=str(folder)))
    assert folder_of(Settings("sft", output=str(folder), resume=True)) == folder
    with pytest.raises(HalfstepError, match="it is a file"):
        folder_of(Settings("sft", output=str(folder / "x")))


def test_the_last_checkpoint_is_that_of_the_highest_step(tmp_path):
    with pytest.raises(HalfstepError, match="there is no checkpoint in it"):
        last_checkpoint(tmp_path / "none")
    # One that was killed before its first checkpoint: without --resume it would be said to be not empty.
    (tmp_path / "job.json").touch()
    with pytest.raises(HalfstepError, match=r"there is no checkpoint in it. Begin anew with another --output"):
        last_checkpoint(tmp_path)
    for name in ("checkpoint-9", "checkpoint-10", "checkpoint-2", "checkpoint-11.tmp", "model"):
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoint-12").touch()  # a file
    assert last_checkpoint(tmp_path).name == "checkpoint-10"


def test_a_place_that_cannot_be_written_is_refused_first(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(HalfstepError, match=r"file/a/b: .*file is a file. Name a folder"):
        folder_of(Settings("sft", output=str(tmp_path / "file" / "a" / "b")))
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(HalfstepError, match="it is a link to nothing"):
        folder_of(Settings("sft", output=str(tmp_path / "link")))
    (tmp_path / "there").mkdir()
    (tmp_path / "other").symlink_to(tmp_path / "there")
    assert folder_of(Settings("sft", output=str(tmp_path / "other"))) == tmp_path / "other"
    if os.geteuid() == 0:
        return  # root may write everywhere
    (tmp_path / "there").chmod(0o500)
    with pytest.raises(HalfstepError, match="there cannot be written in"):
        folder_of(Settings("sft", output=str(tmp_path / "there" / "new")))


def test_the_step_of_a_checkpoint(tmp_path):
    assert step_of(tmp_path / "checkpoint-12") == 12
