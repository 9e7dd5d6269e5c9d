"""Data from the standard library: the same in every run, no sample in two parts, one line without sources."""

import ast
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from halfstep.errors import HalfstepError
from halfstep.train import builtin
from halfstep.train.dataset import read


@pytest.fixture(scope="module")
def sets():
    """The data of every task, read once."""
    return {task: read(task, "builtin") for task in ("pretrain", "sft", "dpo", "kto")}


def examples(data):
    return [*data.train, *data.evaluation]


@pytest.mark.parametrize("task", ["sft", "dpo", "kto"])
def test_each_task_has_several_hundred_short_examples(sets, task):
    data = sets[task]
    assert 300 <= len(data.train) <= 1000
    assert 15 <= len(data.evaluation) <= 50
    assert str(data).startswith(f"builtin: {len(data.train)} examples of prompt + c")
    assert data.notes == ()
    for row in examples(data):
        assert sum(len(row[column]) for column in data.columns if column != "label") <= 101 + 2 * 120


def test_answers_are_what_the_docstrings_say(sets):
    """Looked up again by line number in the library's sources."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for row in sets["sft"].train.select(range(15)):
        name, _, line = row["line"].rpartition(":")
        nodes = ast.walk(ast.parse((root / name).read_text(encoding="utf-8")))
        (node,) = (node for node in nodes if isinstance(node, ast.FunctionDef) and node.lineno == int(line))
        assert row["prompt"].startswith(f"def {node.name}(")
        assert row["prompt"].endswith("):\n")
        assert " ".join(ast.get_docstring(node).split()).startswith(row["completion"])


def test_rejected_answers_are_of_other_functions_that_are_asked_about_nowhere(sets):
    own = {row["prompt"]: row["completion"] for row in examples(sets["sft"])}
    rejected = set()
    for row in examples(sets["dpo"]):
        assert row["chosen"] == own[row["prompt"]]
        assert row["rejected"] not in own.values()
        rejected.add(row["rejected"])
    assert len(rejected) == 20
    for row in examples(sets["kto"]):
        assert (row["completion"] == own[row["prompt"]]) == row["label"]
        assert row["label"] or row["completion"] in rejected
    labels = [row["label"] for row in examples(sets["kto"])]
    assert abs(sum(labels) / len(labels) - 0.5) < 0.01


@pytest.mark.parametrize("task", ["pretrain", "sft", "dpo", "kto"])
def test_what_is_held_out_is_not_trained_on(sets, task):
    data = sets[task]
    key = "text" if task == "pretrain" else "prompt"
    assert not set(data.train[key]) & set(data.evaluation[key])
    assert not set(data.train["line"]) & set(data.evaluation["line"])


def test_pretraining_gets_whole_modules(sets):
    texts = [row["text"] for row in examples(sets["pretrain"])]
    assert 300_000 < sum(map(len, texts)) <= 600_000
    root = Path(sysconfig.get_paths()["stdlib"])
    for row in sets["pretrain"].evaluation:
        assert row["text"] == (root / row["line"].removesuffix(":1")).read_text(encoding="utf-8")


def test_another_process_finds_the_same(sets):
    program = "from halfstep.train import builtin; print([f.line for f in builtin.functions()])"
    lines = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert ast.literal_eval(lines) == [function.line for function in builtin.functions()]
    assert {row["line"] for row in examples(sets["sft"])} <= set(ast.literal_eval(lines))


def test_a_python_without_sources(monkeypatch, tmp_path):
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    for task in ("pretrain", "sft"):
        with pytest.raises(HalfstepError, match="data builtin: the sources of Python's standard library are not in"):
            read(task, "builtin")


def test_a_source_that_is_no_python_is_passed_over(monkeypatch, tmp_path):
    for number in range(20):
        (tmp_path / f"m{number:02}.py").write_text(f'def f{number}(x):\n    """Say the number {number}, at once."""\n')
    (tmp_path / "bad.py").write_text('def f(:\n    """Say nothing, since it is bad."""\n')
    (tmp_path / "worse.py").write_bytes(b"# caf\xe9\n")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    assert sorted(function.line for function in builtin.functions()) == [f"m{number:02}.py:1" for number in range(20)]
