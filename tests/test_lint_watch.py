"""Watching: everything once, and then only what changed."""

import os
from pathlib import Path

import pytest

from halfstep.lint.finding import Finding
from halfstep.lint.watch import watch


def finding(file, line, message="a mistake"):
    return Finding(str(file), line, 1, line, 5, "HS101", "clip", message, "error")


class Folder:
    """Files whose lines that begin with ``bad`` are mistakes. Each wait makes the next change of ``script``."""

    def __init__(self, path, *script):
        self.path, self.script, self.linted, self.clock, self.settings = path, list(script), [], 0, ""

    def look(self):
        return {str(file): self.settings for file in sorted(self.path.iterdir())}

    def lint(self, files):
        self.linted.append([os.path.basename(file) for file in files])
        return [
            finding(file, number, line)
            for file in files
            for number, line in enumerate(Path(file).read_text().splitlines(), 1)
            if line.startswith("bad")
        ]

    def write(self, name, text):
        self.clock += 1
        (self.path / name).write_text(text)
        os.utime(self.path / name, ns=(self.clock, self.clock))

    def wait(self):
        if not self.script:
            raise KeyboardInterrupt
        self.script.pop(0)(self)

    def run(self):
        """The changes up to the end of the script, where the user presses Ctrl-C."""
        changes = []

        def go():
            for change in watch(self.look, self.lint, self.wait):
                changes.append(change)  # one at a time: the last one raises

        with pytest.raises(KeyboardInterrupt):
            go()
        return changes


def messages(findings):
    return [(os.path.basename(found.file), found.message) for found in findings]


def test_only_what_changed_is_linted_and_told(tmp_path):
    folder = Folder(
        tmp_path,
        lambda self: None,
        lambda self: self.write("a.py", "\n\nbad one\nbad two\n"),
        lambda self: self.write("c.py", "bad three\n"),
        lambda self: self.write("a.py", "bad two\n"),
        lambda self: (tmp_path / "b.py").unlink(),
    )
    folder.write("a.py", "bad one\n")
    folder.write("b.py", "bad b\n")
    changes = folder.run()
    assert folder.linted == [["a.py", "b.py"], ["a.py"], ["c.py"], ["a.py"]]
    assert [(messages(change.new), messages(change.gone)) for change in changes] == [
        ([("a.py", "bad one"), ("b.py", "bad b")], []),
        ([("a.py", "bad two")], []),
        ([("c.py", "bad three")], []),
        ([], [("a.py", "bad one")]),
        ([], [("b.py", "bad b")]),
    ]
    assert messages(changes[-1].findings) == [("a.py", "bad two"), ("c.py", "bad three")]
    assert [change.num_files for change in changes] == [2, 2, 3, 3, 2]


def test_a_second_mistake_of_one_kind_is_new_and_a_moved_line_is_not(tmp_path):
    folder = Folder(
        tmp_path,
        lambda self: self.write("a.py", "bad\nbad\n"),
        lambda self: self.write("a.py", "\nbad\nbad\n"),
        lambda self: self.write("a.py", "bad\n"),
    )
    folder.write("a.py", "bad\n")
    changes = folder.run()
    assert [(len(change.new), len(change.gone)) for change in changes] == [(1, 0), (1, 0), (0, 0), (0, 1)]
    assert changes[1].new[0].line == 2
    assert [found.line for found in changes[2].findings] == [2, 3]


def test_a_change_of_size_within_one_tick_of_the_clock_is_seen(tmp_path):
    def same_time(self):
        self.clock -= 1
        self.write("a.py", "bad more\n")

    folder = Folder(tmp_path, same_time)
    folder.write("a.py", "bad\n")
    assert len(folder.run()) == 2


def test_a_file_that_goes_while_it_is_listed_is_not_linted(tmp_path):
    folder = Folder(tmp_path)
    folder.write("a.py", "bad\n")
    folder.look = lambda: dict.fromkeys([str(tmp_path / "a.py"), str(tmp_path / "gone.py")])
    (first,) = folder.run()
    assert folder.linted == [["a.py"]]
    assert first.num_files == 1


def test_other_settings_are_a_change_of_each_file_that_they_hold_for(tmp_path):
    folder = Folder(tmp_path, lambda self: setattr(self, "settings", "HS1"), lambda self: None)
    folder.write("a.py", "bad\n")
    folder.run()
    assert folder.linted == [["a.py"], ["a.py"]]


def test_nothing_to_watch_is_said_once(tmp_path):
    folder = Folder(tmp_path, lambda self: None, lambda self: None)
    (change,) = folder.run()
    assert (change.findings, change.num_files, folder.linted) == ([], 0, [])
