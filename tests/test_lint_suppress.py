"""A noqa comment silences what it names, on the lines where people write it, and nothing else."""

import tokenize

import pytest

from halfstep.lint.finding import Finding
from halfstep.lint.suppress import UNUSED_NOQA, suppress

CODES = {"HS001", "HS101", "HS102"}


def finding(line, code="HS101", end_line=None, column=1):
    return Finding("train.py", line, column, end_line or line, column + 3, code, "some-rule", "a mistake", "error")


def left(text, *findings, codes=CODES):
    return [(f.line, f.code) for f in suppress(findings, text, codes, "train.py")]


@pytest.mark.parametrize(
    ("text", "is_silenced"),
    [
        ("step()  # noqa\n", True),
        ("step()  # NOQA\n", True),
        ("step()  #noqa\n", True),
        ("step()  # noqa: HS101\n", True),
        ("step()  # noqa:HS101\n", True),
        ("step()  # noqa : HS101\n", True),
        ("step()  # noqa: E501, HS101\n", True),
        ("step()  # noqa: E501 HS101 known from the paper\n", True),
        ("step()  # type: ignore  # noqa: HS101\n", True),
        ("step()  # noqa: E501\n", False),
        ("step()  # noqa: HS102\n", False),
        ("step()  # noqa: HS1\n", False),
        ("step()  # noqa: because the paper says so\n", False),
        ("step()  # say noqa here\n", False),
        ("step()  # noqa_later\n", False),
        ("step('# noqa')\n", False),
        ("step(\n'''# noqa\n''')\n", False),
        ("# noqa\nstep()\n", False),
        ("# flake8: noqa\nstep()\n", False),
    ],
)
def test_which_comment_silences(text, is_silenced):
    line = text.split("\n").index(next(row for row in text.split("\n") if row.startswith("step"))) + 1
    found = [code for _, code in left(text, finding(line), codes=CODES - {"HS001"})]
    assert found == ([] if is_silenced else ["HS101"])


def test_a_statement_of_several_lines_is_silenced_where_the_finding_begins_or_ends_or_the_statement_ends():
    text = "clip(\n    first,\n    second(\n        third,\n    ),\n    fourth,\n)\n"
    for line, is_silenced in {1: False, 2: False, 3: True, 4: False, 5: True, 6: False, 7: True}.items():
        rows = text.split("\n")
        rows[line - 1] += "  # noqa"
        found = left("\n".join(rows), finding(3, end_line=5), codes=CODES - {"HS001"})
        assert (found == []) == is_silenced, line


def test_a_block_is_silenced_at_its_head_and_not_by_a_comment_of_its_last_statement():
    text = "for x in y:{}\n    step()\n    update(){}\n"
    block = finding(1, end_line=3)
    assert left(text.format("  # noqa", ""), block) == []
    assert left(text.format("", "  # noqa"), block) == [(1, "HS101")]


def test_lines_count_as_python_counts_them():
    """A form feed ends no line, and a carriage return does."""
    assert left("a = 1\x0c\rstep()  # noqa\r\nx = 2\n", finding(2)) == []


def test_a_whole_file():
    assert left("# halfstep: noqa\nstep()\n", finding(2), finding(2, "HS102")) == []
    assert left("step()\n# halfstep: noqa: HS101\n", finding(1), finding(1, "HS102")) == [(1, "HS102")]
    assert left("step('# halfstep: noqa')\n", finding(1)) == [(1, "HS101")]


@pytest.mark.parametrize(
    ("comment", "unused", "mended"),
    [
        ("# noqa: HS101", "HS101", ""),
        ("# noqa: HS101, HS102", "HS101, HS102", ""),
        ("# noqa: E501, HS101", "HS101", "# noqa: E501"),
        ("# noqa: HS101,E501,HS102 for now", "HS101, HS102", "# noqa: E501 for now"),
        ("# noqa: HS101 known from the paper", "HS101", "# known from the paper"),
        ("# noqa: HS101 - known", "HS101", "# known"),
        ("# noqa: HS101  # type: ignore", "HS101", "# type: ignore"),
        ("# type: ignore  # noqa: HS101", "HS101", "# type: ignore"),
        ("# halfstep: noqa: HS101", "HS101", ""),
        ("# noqa: HS1, HS2026", "HS1, HS2026", ""),  # no rule has such a code
    ],
)
def test_codes_that_silence_nothing_are_reported_with_a_safe_fix(comment, unused, mended):
    code = "x = 'ß'; step()  "
    (found,) = suppress([], f"{code}{comment}\n", CODES, "train.py")
    assert (found.file, found.code, found.severity, found.fix) == ("train.py", "HS001", "warning", "safe")
    assert found.message == f"{unused} silences nothing {'in this file' if 'halfstep' in comment else 'here'}"
    (edit,) = found.edits
    assert (edit.action, edit.code) == ("replace", mended)
    assert (edit.span.line, edit.span.column, edit.span.end_column) == (1, len(code), len(code + comment))
    assert comment[found.column - 1 - len(code) :].lower().startswith(("# noqa", "# halfstep"))


def test_what_is_used_or_was_not_looked_for_is_not_reported():
    assert left("step()  # noqa: HS101\n", finding(1)) == []
    assert left("# halfstep: noqa: HS101\nstep()\n", finding(2)) == []
    assert left("step()  # noqa: HS101\n", codes={"HS001", "HS102"}) == []
    assert left("step()  # noqa: HS101\n", codes={"HS101"}) == []
    assert left("step()  # noqa: E501\n") == []
    assert left("step()  # noqa\n") == []
    assert left("# halfstep: noqa\nstep()\n") == []
    assert left("step()  # noqa: HS101, HS102\n", finding(1)) == [(1, "HS001")]


def test_hs001_itself_is_silenced_by_its_code():
    assert left("step()  # noqa: HS101, HS001\n") == []
    assert left("# halfstep: noqa: HS001\nstep()  # noqa: HS101\n") == []
    assert left("# halfstep: noqa: HS102\nstep()  # noqa: HS101\n") == [(1, "HS001"), (2, "HS001")]


def test_findings_come_in_the_order_of_lines():
    text = "step()  # noqa: HS102\nstep()\n"
    assert left(text, finding(2), finding(2, "HS102", column=3)) == [(1, "HS001"), (2, "HS101"), (2, "HS102")]


def test_a_text_with_nothing_to_silence_or_judge_is_not_taken_apart(monkeypatch):
    monkeypatch.setattr(tokenize, "generate_tokens", None)
    assert left("x = 'noqa'  # noqa\n# noqa: E501, HS102\n", codes={"HS001", "HS101"}) == []
    assert left("step()  # noqa: HS101\n", codes={"HS101"}) == []


def test_a_text_that_is_not_python_keeps_its_findings():
    for text in ("step(  # noqa\n", "  x\n y  # noqa\n", "x = '''\n# noqa"):
        assert left(text, finding(1)) == [(1, "HS101")]


def test_the_rule_is_found_by_its_own_examples():
    assert len(suppress([], UNUSED_NOQA.bad[0], {"HS001", "HS104"}, "")) == 1
    assert suppress([], UNUSED_NOQA.good[0], {"HS001", "HS104"}, "") == []
    assert list(UNUSED_NOQA.check(None)) == []
