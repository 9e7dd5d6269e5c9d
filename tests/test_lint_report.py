"""What lint prints: frames with carets, a summary, counts, JSON."""

import json
import re
from io import StringIO

import pytest
from rich.console import Console

from halfstep.lint.finding import Finding
from halfstep.lint.report import LintReport, draw, source_lines

TEXT = """\
for batch in loader:

    scaler.scale(loss).backward()
    clip_grad_norm_(
        model.parameters(), 1.0
    )
    scaler.step(optimizer)

"""


def finding(line, column=1, end=None, severity="error", fix=None, **fields):
    values = {"file": "train.py", "end_line": line, "code": "HS101", "name": "clip-before-unscale", **fields}
    values["end_column"] = end or column
    return Finding(line=line, column=column, severity=severity, fix=fix, message="a mistake", **values)


def report(*findings, text=TEXT, **fields):
    return LintReport(findings, {("train.py", None): source_lines(text)}, num_files=2, **fields)


def test_text_has_the_place_the_frame_the_fix_and_the_summary():
    clip = finding(4, 5, 5, end_line=6, fix="safe")
    step = finding(7, 5, 26, severity="warning", code="HS303", name="other", fix="unsafe")
    assert str(report(clip, step, num_fixed=3)) == (
        "train.py:4:5: HS101 a mistake\n"
        "  |\n"
        "3 |     scaler.scale(loss).backward()\n"
        "4 |     clip_grad_norm_(\n"
        "  |     ^^^^^^^^^^^^^^^^\n"
        "5 |         model.parameters(), 1.0\n"
        "6 |     )\n"
        "  = fix: safe, --fix\n"
        "\n"
        "train.py:7:5: HS303 a mistake\n"
        "  |\n"
        "5 |         model.parameters(), 1.0\n"
        "6 |     )\n"
        "7 |     scaler.step(optimizer)\n"
        "  |     ^^^^^^^^^^^^^^^^^^^^^^\n"
        "  = fix: unsafe, --unsafe-fixes\n"
        "\n"
        "1 error, 1 warning in 2 files, 3 fixed; can be fixed: 1 with --fix, 1 with --unsafe-fixes"
    )


@pytest.mark.parametrize(
    ("line", "column", "end", "carets"),
    [
        ("x = half(y)", 5, 11, "    ^^^^^^^"),
        ("\tx = half(y)", 6, 12, "\t    ^^^^^^^"),
        ("名 = half(名)", 5, 11, "     ^^^^^^^^"),
        ("x", 1, 0, "^"),
    ],
)
def test_carets_stand_under_what_they_mean(line, column, end, carets):
    drawn = [text.plain for text in draw(finding(1, column, end), [line])]
    assert drawn[2:] == [f"1 | {line}", f"  | {carets}"]


def test_numbers_of_different_width_stand_in_one_column():
    drawn = [text.plain for text in draw(finding(10, 1, 3), [f"line {n}" for n in range(1, 13)])]
    assert drawn[1:5] == ["   |", " 8 | line 8", " 9 | line 9", "10 | line 10"]


@pytest.mark.parametrize(
    ("before", "call", "after", "code", "carets"),
    [
        (10, 20, 90, "b" * 10 + "c" * 20 + "a" * 90, " " * 10 + "^" * 20),
        (10, 20, 91, "b" * 10 + "c" * 20 + "a" * 90 + "...", " " * 10 + "^" * 20),
        (500, 20, 0, "..." + "b" * 40 + "c" * 20, " " * 43 + "^" * 20),
        (500, 20, 500, "..." + "b" * 40 + "c" * 20 + "a" * 60 + "...", " " * 43 + "^" * 20),
        (500, 100, 500, "..." + "b" * 20 + "c" * 100 + "...", " " * 23 + "^" * 100),
        (500, 200, 500, "..." + "c" * 120 + "...", " " * 3 + "^" * 123),
        (0, 200, 0, "c" * 120 + "...", "^" * 123),
        (40, 100, 9, "b" * 40 + "c" * 80 + "...", " " * 40 + "^" * 83),
    ],
)
def test_a_long_line_is_cut_around_the_mistake(before, call, after, code, carets):
    line = "b" * before + "c" * call + "a" * after
    drawn = [text.plain for text in draw(finding(2, before + 1, before + call), ["x" * 121, line, "short"])]
    assert drawn[2:] == ["1 | " + "x" * 120 + "...", f"2 | {code}", f"  | {carets}", "3 | short"]


def test_a_narrow_terminal_gets_shorter_lines():
    drawn = [text.plain for text in draw(finding(1, 301, 304), ["b" * 300 + "call" + "a" * 300], 64)]
    assert drawn[2:] == ["1 | ..." + "b" * 20 + "call" + "a" * 36 + "...", "  | " + " " * 23 + "^^^^"]
    assert [len(line.plain) for line in draw(finding(1), ["b" * 300], 10)[2:3]] == [len("1 | ") + 40 + len("...")]


def test_a_finding_without_its_lines_is_shown_alone():
    assert [text.plain for text in draw(finding(4, fix="safe"), [])] == [
        "train.py:4:1: HS101 a mistake",
        "  = fix: safe, --fix",
    ]
    assert len(draw(finding(4), ["one", "two"])) == 1


def test_a_notebook_is_named_with_its_cell():
    found = finding(2, 1, 3, cell=7)
    sources = {("train.py", 7): ["import torch", "halve()"], ("train.py", None): ["no", "no"]}
    assert str(LintReport([found], sources)).splitlines()[:4] == [
        "train.py:cell 7:2:1: HS101 a mistake",
        "  |",
        "1 | import torch",
        "2 | halve()",
    ]


def test_lines_are_those_of_python():
    assert source_lines("a\x0cb\u2028c\r\nd\re\n") == ["a\x0cb\u2028c", "d", "e", ""]


def test_markup_in_source_is_printed_as_it_stands():
    assert "1 | x = y[bold]  # [/] :smile:" in str(report(finding(1), text="x = y[bold]  # [/] :smile:"))


def test_blank_lines_at_the_ends_of_a_frame_are_left_out():
    drawn = [text.plain for text in draw(finding(3, 1, 3), ["", "", "abc", "next", ""])]
    assert drawn[2:] == ["3 | abc", "  | ^^^", "4 | next"]
    drawn = [text.plain for text in draw(finding(3, 1, 3), ["before", "", "abc", "", "next"])]
    assert [line[:1] for line in drawn[2:]] == ["1", "2", "3", " ", "4", "5"]


def test_a_terminal_gets_colours_and_whole_lines():
    terminal = Console(file=StringIO(), force_terminal=True, width=20, color_system="standard")
    result = report(finding(4, 5))
    result.render(terminal)
    printed = terminal.file.getvalue()
    assert "\x1b[" in printed
    assert "\x1b[" not in str(result)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", printed)
    assert [line.rstrip() for line in plain.splitlines()] == str(result).splitlines()


@pytest.mark.parametrize(
    ("severities", "summary", "found"),
    [
        ([], "nothing found in 2 files", False),
        (["note"], "1 note in 2 files", False),
        (["note", "warning"], "1 warning, 1 note in 2 files", True),
        (["warning", "error", "warning"], "1 error, 2 warnings in 2 files", True),
    ],
)
def test_a_note_fails_nothing(severities, summary, found):
    result = report(*(finding(1, severity=severity) for severity in severities))
    assert (result.summary(), result.found) == (summary, found)
    assert str(result).splitlines()[-1] == summary


def test_statistics_count_by_rule_the_most_frequent_first():
    other = {"code": "HS102", "name": "scaled-gradients-read"}
    result = report(finding(1), finding(1, **other), finding(3, **other), counts_only=True)
    assert [line.split() for line in str(result).splitlines()[2:]] == [
        ["count", "code", "name"],
        ["2", "HS102", "scaled-gradients-read"],
        ["1", "HS101", "clip-before-unscale"],
    ]
    assert str(report(counts_only=True)) == "nothing found in 2 files"


def test_json_is_a_list_with_these_keys():
    result = report(finding(4, 5, 7, end_line=6, fix="safe"), counts_only=True)
    assert json.loads(result.json()) == [
        {
            "file": "train.py",
            "cell": None,
            "line": 4,
            "column": 5,
            "end_line": 6,
            "code": "HS101",
            "name": "clip-before-unscale",
            "message": "a mistake",
            "severity": "error",
            "fix": "safe",
        }
    ]
    assert report().json() == "[]\n"
