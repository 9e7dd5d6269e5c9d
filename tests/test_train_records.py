"""Files and folders of data: which are read, in which order, and what is said of one that cannot be."""

import json
import os
import tracemalloc
from pathlib import Path

import pytest

from halfstep.errors import HalfstepError
from halfstep.train.dataset import read
from halfstep.train.records import find, read_jsonl, read_text

SHARED = Path(__file__).parent.parent.parent / "shared" / "data"


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def message(task, data):
    with pytest.raises(HalfstepError) as caught:
        read(task, data)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_file_that_is_not_there():
    assert message("sft", "a.jsonl") == (
        "data a.jsonl: there is no such file or folder. Give FILE.jsonl, a folder of such files, or builtin."
    )


@pytest.mark.parametrize("content", ["", "\n\n", "\ufeff"])
def test_an_empty_file(content):
    Path("a.jsonl").write_text(content, encoding="utf-8")
    assert message("sft", "a.jsonl") == "data a.jsonl: it is empty. Give data with at least one example."
    Path("a.txt").write_text(content, encoding="utf-8")
    assert "it is empty" in message("pretrain", "a.txt")


@pytest.mark.parametrize(
    ("content", "line", "expected"),
    [
        (b'{"text": "a"}\n{"text": "b"\n', 2, "it is not JSON: Expecting ',' delimiter at column 13"),
        (b'{"text": "a"}\n\n{text: 1}\n', 3, "it is not JSON: Expecting property name"),
        (b'[\n  {"text": "a"}\n]\n', 1, "The file is one list: write one object a line."),
        (b'{\n  "text": "a"\n}\n', 1, "it is not JSON"),
        (b'{"text": "a"}\n{"text": "caf\xe9"}\n', 2, "byte 14 of it, 0xe9, is not UTF-8. Save the file as UTF-8."),
        ('{"text": "a"}\n'.encode("utf-16"), 1, "it is UTF-16, not UTF-8"),
        (b'{"text": "a"}\n{"text": "b", "text": "c"}\n', 2, "it has 'text' twice. Leave one of them out"),
        (b'{"text": "a", "more": {"x": 1, "x": 2}}\n', 1, "it has 'x' twice"),
        (b'{"text": "a"}\n' + b"[" * 100_000 + b"\n", 2, "its JSON cannot be read: maximum recursion depth"),
        (b'{"text": ' + b"1" * 5000 + b"}\n", 1, "its JSON cannot be read: Exceeds the limit"),
    ],
)
def test_a_bad_line_is_named(content, line, expected):
    Path("a.jsonl").write_bytes(content)
    text = message("pretrain", "a.jsonl")
    assert text.startswith(f"a.jsonl line {line}: ")
    assert expected in text


def test_what_editors_leave_in_a_file_is_no_fault():
    Path("a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\r\n{"text": "b"}')
    assert list(read_jsonl(Path("a.jsonl"))) == [(1, {"text": "a"}), (3, {"text": "b"})]


@pytest.mark.parametrize(
    ("task", "name", "expected"),
    [
        ("sft", "a.txt", "sft reads *.jsonl. Plain text fits halfstep train pretrain."),
        ("sft", "a.csv", "sft reads *.jsonl. Write one JSON object a line, as FILE.jsonl."),
        ("sft", "a.jsonl.gz", "sft reads *.jsonl. Unpack it first"),
        ("dpo", "a.json", "dpo reads *.jsonl. Write one object a line: jq -c '.[]' a.json > a.jsonl"),
        ("pretrain", "a.pdf", "pretrain reads *.jsonl, *.txt, *.py, *.md."),
    ],
)
def test_a_file_of_another_kind(task, name, expected):
    Path(name).write_text("a")
    assert message(task, name).startswith(f"data {name}: {expected}")


def test_a_folder_is_read_in_order():
    for name in ("b.txt", "a/c.py", "a/d.jsonl", "e.csv", ".git/f.txt", "empty.txt"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text('{"text": "in JSON"}' if name.endswith("jsonl") else f"in {name}")
    Path("empty.txt").write_text("")
    assert [str(path) for path in find("pretrain", ".")] == ["a/c.py", "a/d.jsonl", "b.txt", "empty.txt"]
    data = read("pretrain", ".")
    assert data.train["text"][:] == ["in a/c.py", "in JSON", "in b.txt"]
    assert data.train["line"][:] == ["a/c.py:1", "a/d.jsonl:1", "b.txt:1"]
    Path("none").mkdir()
    assert message("sft", "none") == (
        "data none: sft reads *.jsonl, and the folder has none. Give one that has, or builtin."
    )


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root reads everything")
def test_a_file_that_may_not_be_read():
    Path("a.jsonl").write_text("{}")
    Path("a.jsonl").chmod(0)
    assert "it cannot be read: Permission denied" in message("sft", "a.jsonl")


def test_a_text_is_cut_at_the_ends_of_lines_and_nothing_is_lost():
    text = "".join(f"line {number} äöü\n" for number in range(20_000))
    Path("a.txt").write_text(text, encoding="utf-8")
    pieces = list(read_text(Path("a.txt"), num_bytes=len(text.encode())))
    assert "".join(piece for _, piece in pieces) == text
    assert all(piece.endswith("\n") and len(piece) <= 16_384 for _, piece in pieces)
    lines = text.splitlines(keepends=True)
    assert all(piece.startswith(lines[number - 1]) for number, piece in pieces)
    assert len(list(read_text(Path("a.txt"), num_bytes=20 * 4096))) > 60  # pieces of a shorter text are shorter
    data = read("pretrain", "a.txt")
    assert 0 < len(data.evaluation) <= 80 // 20


def test_a_line_longer_than_a_piece_is_cut():
    Path("a.txt").write_text("short\n" + "x" * 3000 + "\nend")
    pieces = list(read_text(Path("a.txt"), num_bytes=0))
    assert pieces == [(1, "short\n"), (2, "x" * 1024), (2, "x" * 1024), (2, "x" * 952 + "\nend")]


def test_a_large_file_is_held_once():
    """Arrow holds the texts outside Python; what Python holds at its peak is a batch of them."""
    record = json.dumps({"text": "x" * 1000}) + "\n"
    Path("a.jsonl").write_text(record * 8_000)
    read("pretrain", "a.jsonl", held_out=0)  # imports, and what they keep
    tracemalloc.start()
    data = read("pretrain", "a.jsonl", held_out=0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(data.train) == 8_000
    assert peak < 4e6  # of 8 MB of text


@pytest.mark.skipif(not SHARED.is_dir(), reason="no data to try on beside this checkout")
def test_real_data_is_read():
    play = read("pretrain", str(SHARED / "tinyshakespeare.txt"))
    assert sum(len(text) for text in [*play.train["text"], *play.evaluation["text"]]) == 1_115_394
    tasks = read("sft", str(SHARED / "seed_tasks.jsonl"))
    assert len(tasks.train) + len(tasks.evaluation) == 175
    assert tasks.train[0]["prompt"].startswith("### Instruction:\nIs there anything I can eat")
    assert tasks.notes == ("Columns that are not used: id, is_classification, name.",)
