"""Reading a log: whatever is in the file, the entries that are whole come out, in order, and nothing raises."""

import json
import os
import random

import pytest

from halfstep.errors import HalfstepError
from halfstep.watch import reading
from halfstep.watch.entry import Step, is_entry, line_of
from halfstep.watch.log import file_of
from halfstep.watch.reading import Tail, ranks_of, read_entries


def line(number, **values):
    return line_of(Step(number, 100.0 + number, 1.5, 0.5, **values).to_entry()).encode() + b"\n"


def steps_of(entries):
    return [entry["step"] for _, entry in entries]


@pytest.fixture
def path(tmp_path):
    return file_of(tmp_path, 0)


# A file that grows.


def test_entries_come_with_the_offsets_of_their_lines(path):
    data = line(1) + b"\n" + line(2, scale=4.0) + b"{}\n" + line(3)
    path.write_bytes(data)
    tail = Tail(path)
    found = tail.read()
    assert found == [(offset, json.loads(data[offset:].split(b"\n")[0])) for offset, _ in found]
    assert steps_of(found) == [1, 2, 3]
    assert (tail.offset, tail.num_torn) == (len(data), 1)
    assert tail.read() == []


def test_a_line_stays_until_it_is_whole(path):
    data = line(1) + line(2)
    tail = Tail(path)
    seen = []
    for end in range(len(data) + 1):
        path.write_bytes(data[:end])
        seen += tail.read()
        assert len(seen) == data[:end].count(b"\n")
    assert steps_of(seen) == [1, 2]
    assert (tail.num_torn, tail.num_starts) == (0, 0)


def test_reading_goes_on_from_an_offset(path):
    path.write_bytes(line(1) + line(2))
    tail = Tail(path, len(line(1)))
    assert steps_of(tail.read()) == [2]
    with path.open("ab") as file:
        file.write(line(3))
    assert steps_of(tail.read()) == [3]
    assert tail.num_starts == 0


@pytest.mark.parametrize("max_bytes", [1, 60, 100, 1000])
def test_pieces_give_what_the_whole_gives(path, max_bytes):
    path.write_bytes(b"".join(line(number) + b"junk\n" * (number % 7) for number in range(50)))
    whole = Tail(path)
    tail, seen, calls = Tail(path), [], 0
    expected = whole.read()
    while tail.offset < path.stat().st_size:
        start = tail.offset
        seen += tail.read(max_bytes)
        assert tail.offset > start
        assert tail.offset - start <= max_bytes * 8 + 512
        calls += 1
    assert seen == expected
    assert tail.num_torn == whole.num_torn == sum(number % 7 for number in range(50))
    assert calls > path.stat().st_size / (max_bytes * 8 + 512)


# Lines that are broken.

BROKEN = [
    b'{"kind":"step","st',
    b'{"kind":"step","step":2,"time":1.0,"loss":1.0}',
    b'{"kind":"step","step":"2","time":1.0,"loss":1.0,"grad_norm":1.0}',
    b"[]",
    b"null",
    b"12",
    b'"kind"',
    b'{"step":2}',
    b'{"kind":3}',
    b"\x00" * 300,
    bytes(range(1, 10)) + bytes(range(11, 256)),
    "{'kind':'step'}".encode("utf-16"),
    b'{"kind":"step"},{"kind":"step"}',
    line(8).strip() + line(9).strip(),
    b"[" * 100_000,
    b'{"kind":"step","step":' + b"9" * 5000 + b"}",
    b"]",
    b"[",
    b'"',
]


@pytest.mark.parametrize("bad", BROKEN, ids=lambda bad: str(bad[:30]))
@pytest.mark.parametrize("place", ["first", "middle", "last"])
def test_a_broken_line_is_dropped_and_counted_and_its_neighbours_are_not(path, bad, place):
    parts = [line(1), line(2), line(3)]
    parts.insert({"first": 0, "middle": 1, "last": 3}[place], bad + b"\n")
    path.write_bytes(b"".join(parts))
    tail = Tail(path)
    assert steps_of(tail.read()) == [1, 2, 3]
    assert tail.num_torn == 1
    assert steps_of(enumerate(read_entries(path.parent, 0))) == [1, 2, 3]


def test_two_halves_of_a_list_do_not_make_one_entry(path):
    path.write_bytes(line(1) + b'{"kind":"a","of":[{"b":1}\n{"c":2}]}\n' + line(2))
    tail = Tail(path)
    assert steps_of(tail.read()) == [1, 2]
    assert tail.num_torn == 2


def test_random_damage_spares_the_lines_that_it_did_not_touch(path):
    draw = random.Random(0)
    lines = [line(number, parameters=("ä", "b")) for number in range(60)]
    for _ in range(150):
        data = bytearray(b"".join(lines))
        touched = set()
        for _ in range(draw.randrange(1, 6)):
            place = draw.randrange(len(data))
            size = draw.randrange(1, 40)
            data[place : place + size] = draw.randbytes(len(data[place : place + size]))
            sizes = [0]
            for one in lines:
                sizes.append(sizes[-1] + len(one))
            touched |= {n for n in range(60) if sizes[n] < place + size and place < sizes[n + 1]}
            touched |= {n + 1 for n in touched if n < 60 and place < sizes[n + 1] <= place + size}  # its end is gone
        path.write_bytes(data)
        tail = Tail(path)
        found = {entry["step"] for _, entry in tail.read() if entry.get("kind") == "step"}
        assert found >= set(range(60)) - touched
        assert tail.offset == data.rfind(b"\n") + 1


def test_line_ends_of_windows_and_empty_lines_are_no_damage(path):
    path.write_bytes(line(1).replace(b"\n", b"\r\n") + b"\r\n \n\n" + line(2).replace(b"\n", b"\r\n"))
    tail = Tail(path)
    assert steps_of(tail.read()) == [1, 2]
    assert tail.num_torn == 0


def test_a_line_of_many_megabytes_is_read(path):
    long = line_of({"kind": "ranges", "step": 1, "of": "x" * 5_000_000}).encode() + b"\n"
    path.write_bytes(line(1) + long[:-1])
    tail = Tail(path)
    assert steps_of(tail.read()) == [1]
    assert tail.read(1000) == []
    path.write_bytes(line(1) + long + line(2))
    seen = tail.read(1000)
    assert [entry["kind"] for _, entry in seen] == ["ranges", "step"]
    assert len(seen[0][1]["of"]) == 5_000_000


def test_a_line_that_never_ends_is_left_behind(path, monkeypatch):
    monkeypatch.setattr(reading, "_LONGEST_LINE", 4000)
    path.write_bytes(line(1) + b"x" * 100_000)
    tail = Tail(path)
    assert steps_of(tail.read(500)) == [1]
    for _ in range(60):
        tail.read(500)
    assert tail.offset > 90_000
    with path.open("ab") as file:
        file.write(b"\n" + line(2))
    assert steps_of(tail.read()) == [2]


# A file that is another one.


@pytest.mark.parametrize("how", ["cut", "cut and grown", "replaced", "replaced by the same inode"])
def test_a_file_that_is_another_one_is_read_from_its_start(path, how):
    path.write_bytes(b"junk\n" + line(1) + line(2))
    tail = Tail(path)
    assert steps_of(tail.read()) == [1, 2]
    new = {"cut": line(1), "cut and grown": line(7) * 9}.get(how, line(5) + line(6) + line(7))
    if how == "replaced":
        path.unlink()
    path.write_bytes(new)
    found = tail.read()
    assert found[0][0] == 0
    assert steps_of(found) == [json.loads(one)["step"] for one in new.splitlines()]
    assert (tail.num_starts, tail.num_torn) == (1, 0)
    assert tail.read() == []
    assert tail.num_starts == 1


def test_a_file_that_was_emptied_is_one_new_start(path):
    path.write_bytes(line(1))
    tail = Tail(path)
    tail.read()
    path.write_bytes(b"")
    assert (tail.read(), tail.read(), tail.num_starts, tail.offset) == ([], [], 1, 0)
    path.write_bytes(line(2))
    assert steps_of(tail.read()) == [2]
    assert tail.num_starts == 1


def test_a_copy_that_goes_on_where_the_file_was_is_no_new_start(path):
    path.write_bytes(line(1) + line(2))
    tail = Tail(path)
    tail.read()
    copy = path.with_suffix(".new")
    copy.write_bytes(line(1) + line(2) + line(3))
    os.replace(copy, path)
    assert steps_of(tail.read()) == [3]
    assert tail.num_starts == 0


@pytest.mark.parametrize("offset", [10_000, 5])
def test_an_offset_that_is_no_start_of_a_line_is_one_of_another_file(path, offset):
    path.write_bytes(line(1) + line(2))
    tail = Tail(path, offset)
    assert steps_of(tail.read()) == [1, 2]
    assert tail.num_starts == 1


def test_a_file_that_is_gone_gives_nothing_and_one_that_is_back_goes_on(path):
    tail = Tail(path)
    assert tail.read() == []
    path.write_bytes(line(1))
    assert steps_of(tail.read()) == [1]
    aside = path.rename(path.with_suffix(".aside"))
    assert tail.read() == []
    aside.rename(path)
    with path.open("ab") as file:
        file.write(line(2))
    assert steps_of(tail.read()) == [2]
    assert tail.num_starts == 0


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes in folders")
@pytest.mark.parametrize("what", ["link", "pipe", "folder", "lost link"])
def test_what_is_no_plain_file_is_not_read_and_not_waited_for(path, what):
    secret = path.parent / "secret.jsonl"
    secret.write_bytes(line(1))
    if what == "pipe":
        os.mkfifo(path)
    elif what == "folder":
        path.mkdir()
    else:
        path.symlink_to(secret if what == "link" else "nowhere")
    assert Tail(path).read() == []
    assert ranks_of(path.parent) == []
    with pytest.raises(HalfstepError, match=r"rank-00000.jsonl: it cannot be read \("):
        read_entries(path.parent, 0)


# Whole logs.


def test_a_log_without_its_file_or_without_an_entry_is_an_error(tmp_path, path):
    with pytest.raises(HalfstepError) as error:
        read_entries(tmp_path, 0)
    assert str(error.value) == (
        f"log {path}: it cannot be read (No such file or directory). "
        "Name the folder of a run, which holds rank-00000.jsonl."
    )
    path.write_bytes(b"a text\n" + os.urandom(10).hex().encode())
    with pytest.raises(HalfstepError, match="no line of it is an entry"):
        list(read_entries(tmp_path, 0))


def test_a_long_log_is_read_in_pieces_also_over_a_piece_that_is_all_junk(tmp_path, path, monkeypatch):
    monkeypatch.setattr(reading, "_PIECE", 500)
    path.write_bytes(line(0) + b"junk\n" * 1000 + b"".join(line(number) for number in range(1, 300)) + b'{"kind":"st')
    assert [entry["step"] for entry in read_entries(tmp_path, 0)] == list(range(300))


def test_the_ranks_of_a_folder(tmp_path):
    assert ranks_of(tmp_path / "none") == []
    for rank in (123456, *range(30)):
        file_of(tmp_path, rank).write_text("")
    for name in ("rank-00001.jsonl.gz", "rank-1.jsonl", "a-rank-00040.jsonl"):
        (tmp_path / name).write_text("")
    (tmp_path / "rank-000040.jsonl").write_text("")  # no name that a log has
    (tmp_path / "rank-00050.jsonl").mkdir()
    assert ranks_of(tmp_path) == [*range(30), 123456]


def test_what_is_read_is_what_its_slow_twin_reads(path):
    draw = random.Random(2)
    pool = [*BROKEN, b"", b"\r", *(line(number).strip() for number in range(20))]
    for _ in range(200):
        lines = [draw.choice(pool) for _ in range(draw.randrange(8))]
        path.write_bytes(b"".join(one + b"\n" for one in lines))
        tail = Tail(path)
        expected, offset, num_torn = [], 0, 0
        for one in path.read_bytes().split(b"\n")[:-1]:
            try:
                value = json.loads(one.decode())
            except (ValueError, RecursionError):
                value = None
            if is_entry(value):
                expected.append((offset, value))
            elif one.strip():
                num_torn += 1
            offset += len(one) + 1
        assert tail.read() == expected
        assert tail.num_torn == num_torn
