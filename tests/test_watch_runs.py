"""Only the runs inside the folder are found, by names that lead nowhere else."""

from __future__ import annotations

import os

import pytest

from halfstep.errors import HalfstepError
from halfstep.watch import runs as runs_module
from halfstep.watch.log import file_of
from halfstep.watch.runs import Runs, no_run


def make(folder, rank=0):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"rank-{rank:05d}.jsonl").write_text("")
    return folder


def test_finds_the_runs_and_nothing_else(tmp_path):
    runs = tmp_path / "runs"
    for name in ("b", "a", "sweep/one", "sweep/two", "sweep", "1/2/3/4"):
        make(runs / name)
    make(runs / "only rank 7", 7)
    make(runs / "1/2/3/4/5")
    make(runs / ".hidden/run")
    (runs / "empty").mkdir()
    (runs / "other").mkdir()
    (runs / "other" / "rank-0.jsonl").write_text("")
    (runs / "notes.txt").write_text("")
    found = Runs(runs)
    assert found.names() == ["1/2/3/4", "a", "b", "only rank 7", "sweep", "sweep/one", "sweep/two"]
    for name in found.names():
        assert found.folder_of(name) == runs / name


def test_the_folder_itself_can_be_a_run(tmp_path):
    make(tmp_path / "mine" / "part")
    make(tmp_path / "mine")
    found = Runs(tmp_path / "mine")
    assert found.names() == ["mine", "part"]
    assert found.folder_of("mine") == tmp_path / "mine"
    assert found.folder_of("part") == tmp_path / "mine" / "part"


def test_a_run_that_comes_and_goes(tmp_path):
    found = Runs(tmp_path)
    assert found.names() == []
    folder = make(tmp_path / "new")
    assert found.names() == ["new"]
    os.rename(folder, tmp_path / ".gone")
    assert found.names() == []
    with pytest.raises(HalfstepError, match="run 'new': there is no such run, or not any more"):
        found.folder_of("new")


def test_many_folders_are_looked_through_every_two_seconds(tmp_path, monkeypatch):
    monkeypatch.setattr(runs_module, "_MANY", 4)
    now = [100.0]
    monkeypatch.setattr(runs_module.time, "monotonic", lambda: now[0])
    found = Runs(tmp_path)
    make(tmp_path / "a")
    assert found.names() == ["a"]
    make(tmp_path / "b")
    assert found.names() == ["a", "b"]
    for name in ("1", "2", "3"):
        (tmp_path / name).mkdir()
    names = found.names()
    assert names == ["a", "b"]
    names.clear()  # what one has is no other's
    make(tmp_path / "c")
    now[0] += 1.9
    assert found.names() == ["a", "b"]
    now[0] += 0.2
    assert found.names() == ["a", "b", "c"]


@pytest.mark.parametrize(
    "name",
    [
        "..",
        "../outside",
        "a/../../outside",
        "a/..",
        ".",
        "./a",
        "a/.",
        "",
        "/",
        "a/",
        "/a",
        "//a",
        "a//b",
        "{outside}",
        "C:",
        "C:/outside",
        "c:a",
        "C:\\outside",
        "..\\outside",
        "a\\b",
        "\\\\host\\share",
        "a\0",
        "\0",
        "a\nb",
        "a\x1b[2J",
        "a\x85",
        "\udcff",
        ".hidden",
        "a/.hidden",
        "nothing",
        "empty",
        "a/rank-00000.jsonl",
        "1/2/3/4/5",
        "x" * 5000,
        "%2e%2e/outside",
        "~/outside",
    ],
)
def test_refuses_what_leads_elsewhere(tmp_path, name):
    runs = tmp_path / "runs"
    make(tmp_path / "outside")
    for inside in ("a", ".hidden", "a/.hidden", "1/2/3/4/5"):
        make(runs / inside)
    (runs / "empty").mkdir()
    with pytest.raises(HalfstepError) as raised:
        Runs(runs).folder_of(name.replace("{outside}", str(tmp_path / "outside")))
    assert str(raised.value).isprintable()


@pytest.mark.parametrize(
    "name", ["with space", "50%", "%2e%2e", 'it\'s "quoted"', "<b>&amp;", "Lauf-ä-走る-🚀", "a:b-c", "~", "-x"]
)
def test_odd_names_are_names(tmp_path, name):
    if os.name == "nt":
        pytest.skip("Windows has no such names")
    make(tmp_path / name)
    if name == "a:b-c":  # as a drive on Windows
        assert Runs(tmp_path).names() == []
    else:
        assert Runs(tmp_path).names() == [name]
        assert Runs(tmp_path).folder_of(name) == tmp_path / name


@pytest.mark.parametrize("name", ["two\nlines", "back\\slash", "bell\a"])
def test_a_name_that_no_page_can_ask_for_is_left_out(tmp_path, name):
    make(tmp_path / name)
    make(tmp_path / "good")
    assert Runs(tmp_path).names() == ["good"]


def test_links_are_not_followed(tmp_path):
    runs, outside = tmp_path / "runs", make(tmp_path / "outside" / "run").parent
    real = make(runs / "real")
    (runs / "out").symlink_to(outside / "run")
    (runs / "up").symlink_to(outside)
    (runs / "in").symlink_to(real)
    (runs / "loop").symlink_to(runs)
    logs = runs / "linked log"
    logs.mkdir()
    (logs / "rank-00000.jsonl").symlink_to(outside / "run" / "rank-00000.jsonl")
    second = make(runs / "second log")
    (second / "rank-00001.jsonl").symlink_to(real / "rank-00000.jsonl")
    found = Runs(runs)
    assert found.names() == ["real"]
    for name in ("out", "up/run", "in", "loop/real", "linked log", "second log"):
        with pytest.raises(HalfstepError, match="there is no such run"):
            found.folder_of(name)
    # The folder that the user names may be behind a link.
    (tmp_path / "link").symlink_to(runs)
    assert Runs(tmp_path / "link").folder_of("real") == real


def test_a_folder_that_became_a_link_is_refused(tmp_path):
    runs, outside = tmp_path / "runs", make(tmp_path / "outside" / "run").parent
    make(runs / "sweep" / "run")
    found = Runs(runs)
    assert found.folder_of("sweep/run") == runs / "sweep" / "run"
    os.rename(runs / "sweep", runs / ".sweep")
    (runs / "sweep").symlink_to(outside)
    with pytest.raises(HalfstepError, match="there is no such run"):
        found.folder_of("sweep/run")


def test_a_pipe_or_a_folder_is_no_log(tmp_path):
    pipe, folder = tmp_path / "pipe", tmp_path / "folder"
    pipe.mkdir()
    os.mkfifo(pipe / "rank-00000.jsonl")
    (folder / "rank-00000.jsonl").mkdir(parents=True)
    found = Runs(tmp_path)
    assert found.names() == []
    for name in ("pipe", "folder"):
        with pytest.raises(HalfstepError, match="there is no such run"):
            found.folder_of(name)


def test_a_folder_that_is_not_there(tmp_path):
    for path in (tmp_path / "missing", make(tmp_path / "a") / "rank-00000.jsonl"):
        with pytest.raises(HalfstepError, match="it is not there, or is no folder"):
            Runs(path)
    found = Runs(tmp_path / "a")
    os.rename(tmp_path / "a", tmp_path / "b")
    with pytest.raises(HalfstepError, match="it is not there, or is no folder"):
        found.names()
    with pytest.raises(HalfstepError, match="there is no such run"):
        found.folder_of("a")


def test_a_folder_of_runs_is_no_run_and_names_them(tmp_path):
    for name in ("b", "exp/a"):
        (tmp_path / name).mkdir(parents=True)
        file_of(tmp_path / name, 0).touch()
    assert str(no_run(tmp_path)).endswith("with entries in it. Name a run in it: b, exp/a.")
    assert str(no_run(tmp_path / "nowhere")).endswith("Name the folder of a run, as in Stepper(log=...).")
