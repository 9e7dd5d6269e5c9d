"""Workflow commands: what GitHub reads, escaped as it unescapes, and never more than it shows."""

import pytest

from halfstep.lint.annotations import name_from, workflow_commands
from halfstep.lint.finding import Finding
from halfstep.lint.report import LintReport


def finding(line, file="train.py", severity="error", **fields):
    values = {"column": 5, "end_line": line, "end_column": 9, "message": "a mistake", **fields}
    return Finding(file=file, line=line, code="HS101", name="clip", severity=severity, **values)


def lines(*findings, root):
    return workflow_commands(LintReport(findings, num_files=1), root).splitlines()


def test_a_command_names_file_lines_columns_and_rule(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert lines(
        finding(3), finding(4, severity="note"), finding(2, severity="warning", end_line=6), root=tmp_path
    ) == [
        "::error file=train.py,line=3,endLine=3,col=5,endColumn=9,title=HS101 clip::a mistake",
        "::warning file=train.py,line=2,endLine=6,title=HS101 clip::a mistake",
        "::notice file=train.py,line=4,endLine=4,col=5,endColumn=9,title=HS101 clip::a mistake",
        "1 error, 1 warning, 1 note in 1 file",
    ]


def unescape(text):
    for code, character in (("%0A", "\n"), ("%0D", "\r"), ("%3A", ":"), ("%2C", ","), ("%25", "%")):
        text = text.replace(code, character)
    return text


@pytest.mark.parametrize("odd", ["50% of a, b: c", "a\r\nb", "%0A", "::error::x", "%25%3A"])
def test_what_is_escaped_comes_back(odd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (command, _) = lines(finding(1, file=odd.replace("/", ""), message=odd), root=tmp_path)
    properties, message = command.removeprefix("::error ").split("::", 1)
    (file, *_) = properties.split(",")
    assert unescape(file.removeprefix("file=")) == odd
    assert unescape(message) == odd
    assert ":" not in properties


def test_at_most_ten_of_each_kind(tmp_path):
    many = [finding(n) for n in range(1, 13)] + [finding(n, severity="note") for n in range(1, 11)]
    printed = lines(*many, root=tmp_path)
    assert [sum(line.startswith(f"::{kind} ") for line in printed) for kind in ("error", "warning", "notice")] == [
        10,
        0,
        10,
    ]
    assert [line for line in printed if not line.startswith("::")] == [
        "2 more of severity error",
        "12 errors, 10 notes in 1 file",
    ]


def test_files_are_named_from_the_repository(tmp_path, monkeypatch):
    (tmp_path / "src").mkdir()
    monkeypatch.chdir(tmp_path / "src")
    assert name_from(tmp_path, "train.py") == "src/train.py"
    assert name_from(tmp_path, str(tmp_path / "src" / "train.py")) == "src/train.py"
    assert name_from(tmp_path / "src", "../train.py") == (tmp_path / "train.py").as_posix()


def test_a_notebook_has_no_lines_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (command, _) = lines(finding(3, file="a.ipynb", cell=2), root=tmp_path)
    assert command == "::error file=a.ipynb,title=HS101 clip::cell 2, line 3: a mistake"
