"""A file is written whole or not at all."""

import os

import pytest

from halfstep.errors import HalfstepError
from halfstep.files import write_whole


def test_a_file_is_replaced_whole(tmp_path, monkeypatch):
    target = tmp_path / "report.json"
    target.write_text("the report of yesterday")

    def full_disk(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full_disk)
        with pytest.raises(HalfstepError, match="No space left on device"):
            write_whole(target, "half of a new one")
    assert target.read_text() == "the report of yesterday"
    assert [file.name for file in tmp_path.iterdir()] == ["report.json"]
    write_whole(str(target), "ein Häppchen")
    assert target.read_text(encoding="utf-8") == "ein Häppchen"
    assert [file.name for file in tmp_path.iterdir()] == ["report.json"]


def test_an_interrupt_leaves_nothing_behind(tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "chmod", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_whole(tmp_path / "report.json", "text")
    assert list(tmp_path.iterdir()) == []


def test_others_may_read_what_is_written(tmp_path):
    write_whole(tmp_path / "report.html", "text")
    assert (tmp_path / "report.html").stat().st_mode & 0o777 == 0o644


def test_a_folder_that_is_missing_is_said(tmp_path):
    with pytest.raises(HalfstepError, match="Name a file in a folder that exists"):
        write_whole(tmp_path / "nowhere" / "report.json", "text")
