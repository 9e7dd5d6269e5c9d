"""A run over many files: what cannot be read, what fails of ours, processes, interrupts, and what is known already."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from halfstep.lint import catalogue, document, runner
from halfstep.lint.cache import Cache
from halfstep.lint.document import decode, lint_python, lint_text, read_source
from halfstep.lint.rule import Problem, Rule
from halfstep.lint.runner import Result, lint_files


def names_the_scaler(script):
    for node in script.tree.body:
        if "scaler" in script.lines[node.lineno - 1]:
            yield Problem(node, "a scaler")


def fails(_script):
    raise KeyError("oh\nno")


RULE = Rule("HS101", "a-scaler", "error", "", "", (), (), names_the_scaler)
BROKEN = Rule("HS102", "broken-rule", "warning", "", "", (), (), fails)
SOURCE = "from torch.amp import GradScaler\nscaler = GradScaler()\n"


@pytest.fixture
def rules(monkeypatch):
    """The catalogue of these two rules."""
    monkeypatch.setattr(catalogue, "all_rules", lambda: (RULE, BROKEN))
    catalogue.catalogue.cache_clear()
    runner._rules.cache_clear()
    yield
    catalogue.catalogue.cache_clear()
    runner._rules.cache_clear()


def places(findings):
    return [(Path(f.file).name, f.cell, f.line, f.code) for f in findings]


def run(root, codes=("HS101",), **options):
    return lint_files({str(file): codes for file in sorted(root.glob("*.*"))}, **options)


def test_files_are_linted_in_order(tmp_path, rules):
    for name in ("b", "a", "c"):
        (tmp_path / f"{name}.py").write_text("\n" * ord(name) + SOURCE)
    result = run(tmp_path)
    assert places(result.findings) == [(f"{name}.py", None, ord(name) + 2, "HS101") for name in "abc"]
    assert result == Result(result.findings, 3, 0)
    assert lint_files({}) == Result((), 0)
    assert run(tmp_path, codes=()).findings == ()


def test_a_file_that_cannot_be_parsed_is_one_finding_and_the_rest_goes_on(tmp_path, rules):
    for name, content in {
        "a.py": b"for x in y\n    pass\n",
        "b.py": b"# \xe9\n",
        "c.py": b"# coding: no-such-encoding\n",
        "d.py": b"x = 1\nautocast\0\n",
        "e.py": b"autocast = " + b"(" * 5000,
        "f.py": b"x = 1\ny = '\xff'\nz = '\xfe'\n",
        "g.py": SOURCE.encode(),
        "h.ipynb": b"{",
        "i.ipynb": b'{"cells": [], "metadata": {}}',
        "j.py": b"autocast = " + b"-" * 100_000 + b"1",
    }.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "k.py").symlink_to("gone.py")
    findings = run(tmp_path).findings
    codes = {Path(finding.file).name: finding for finding in findings}
    assert len(findings) == len(codes)
    assert [name for name, finding in codes.items() if finding.code != "HS000"] == ["g.py"]
    assert set("abcdefghjk") == {name[0] for name in codes}
    assert all((f.name, f.severity, f.fix) == ("cannot-parse", "error", None) for n, f in codes.items() if n != "g.py")
    assert codes["a.py"].message.endswith("cannot parse it: expected ':'")
    assert (codes["a.py"].line, codes["a.py"].column) == (1, 11)
    assert codes["f.py"].line == 2
    assert "it is not utf-8" in codes["f.py"].message
    assert "no-such-encoding" in codes["c.py"].message
    assert codes["h.ipynb"].message.startswith("it is not JSON: Expecting property name")
    assert codes["k.py"].message == "it cannot be read: No such file or directory"


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"\xef\xbb\xbfx = '\xc3\xa9'\r\n", "x = 'é'\r\n"),
        (b"# -*- coding: latin-1 -*-\nx = '\xe9'\n", "# -*- coding: latin-1 -*-\nx = 'é'\n"),
        (b"#!/usr/bin/python\n# vim: set fileencoding=cp1252 :\nx = '\x80'", None),
        (b"x = '\xc3\xa9'\n", "x = 'é'\n"),
        (b"", ""),
    ],
)
def test_sources_are_decoded_as_python_does(tmp_path, content, text):
    text = content.decode("cp1252") if text is None else text
    assert decode(content, "a.py") == text
    (tmp_path / "a.py").write_bytes(content)
    assert read_source(tmp_path / "a.py") == text


def test_a_notebook_is_utf8_with_or_without_a_mark():
    assert decode(b"\xef\xbb\xbf# coding: latin-1 \xc3\xa9", "a.ipynb") == "# coding: latin-1 é"


def test_findings_in_a_notebook_stand_in_their_cells():
    text = (
        '{"cells": [{"cell_type": "code", "source": "%time\\nx = 1"}, {"cell_type": "markdown", "source": "scaler"},'
        '{"cell_type": "code", "source": ["from torch import amp\\n", "scaler = amp.GradScaler(\\n", ")"]}]}'
    )
    (finding,) = lint_text(text, "a.ipynb", [RULE])
    assert (finding.cell, finding.line, finding.end_line, finding.column) == (2, 2, 3, 1)
    (broken,) = lint_text(text.replace('")"', '"]"'), "a.ipynb", [RULE])
    assert (broken.code, broken.cell, broken.line) == ("HS000", 2, 3)
    assert lint_text('{"cells": [], "metadata": {"language_info": {"name": "R"}}}', "a.ipynb", [RULE]) == []
    assert lint_text('{"cells": []}', "a.ipynb", [BROKEN]) == []


def test_a_comment_silences_a_finding():
    silent = SOURCE.replace("()\n", "()  # noqa: HS101\n")
    assert [finding.code for finding in lint_text(SOURCE, "a.py", [RULE])] == ["HS101"]
    assert lint_text(silent, "a.py", [RULE]) == []


def test_source_that_python_warns_of_is_linted_without_a_word():
    assert [finding.code for finding in lint_python(f"{SOURCE}x = '\\d'\n", "a.py", [RULE])] == ["HS101"]


def test_a_rule_that_fails_is_named_and_the_others_are_heard():
    failed, found = lint_text(SOURCE, "a.py", [BROKEN, RULE])
    assert (failed.code, failed.name, failed.line, failed.severity) == ("HS002", "lint-failed", 1, "error")
    assert failed.message == (
        "HS102 broken-rule failed here (KeyError: 'oh\\nno'), a fault of halfstep: please report it with the file"
    )
    assert found.code == "HS101"


def test_a_failure_outside_of_the_rules_is_reported_too(tmp_path, rules, monkeypatch):
    def fail(*_):
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr(document, "suppress", fail)
    (tmp_path / "a.py").write_text(SOURCE)
    (finding,) = run(tmp_path).findings
    assert finding.code == "HS002"
    assert "the linter failed here (ZeroDivisionError: by zero)" in finding.message


def test_what_is_known_is_not_read_again(tmp_path, rules, monkeypatch):
    (tmp_path / "a.py").write_text(SOURCE)
    (tmp_path / "b.py").write_text("x = 1\n")
    place = tmp_path / "cache"
    first = run(tmp_path, cache=Cache(place))
    assert (first.num_files, first.num_cached) == (2, 0)
    with monkeypatch.context() as patch:
        patch.setattr(runner, "lint_bytes", None)
        second = run(tmp_path, cache=Cache(place))
    assert second == Result(first.findings, 2, 2)
    (tmp_path / "b.py").write_text(SOURCE)
    third = run(tmp_path, cache=Cache(place))
    assert places(third.findings) == [("a.py", None, 2, "HS101"), ("b.py", None, 2, "HS101")]
    assert third.num_cached == 1
    assert run(tmp_path, codes=(), cache=Cache(place)) == Result((), 2, 0)


def test_a_failure_is_not_kept(tmp_path, rules):
    (tmp_path / "a.py").write_text(SOURCE)
    for _ in range(2):
        result = run(tmp_path, codes=("HS102",), cache=Cache(tmp_path / "cache"))
        assert (places(result.findings), result.num_cached) == ([("a.py", None, 1, "HS002")], 0)


# Processes are started anew and read the script that starts them, so what they should do differently stands there.
SCRIPT = """
import os, sys, time
from halfstep.lint import document, runner
from halfstep.lint.runner import lint_files

runner.MIN_PARALLEL_BYTES, runner.BATCH_BYTES = 0, 1
real = document.check_source

def check(text, file, rules):
    open(file + ".pid", "w").write(str(os.getpid()))
    if "sleep" in text:
        time.sleep(60)
    if "crash" in text:
        os._exit(3)
    return real(text, file, rules)

document.check_source = check
"""
MAIN = """
if __name__ == "__main__":
    try:
        result = lint_files(dict.fromkeys(sys.argv[1:], ("HS001",)), processes=2)
    except KeyboardInterrupt:
        sys.exit("interrupted")
    for finding in result.findings:
        print(os.path.basename(finding.file), finding.line, finding.code, finding.message)
"""


@pytest.fixture
def start(tmp_path):
    """Starts the script on files with these sources, in a process group of its own."""
    started = []

    def call(sources, main=MAIN):
        (tmp_path / "script.py").write_text(SCRIPT + textwrap.dedent(main))
        for name, source in sources.items():
            (tmp_path / name).write_text(source)
        command = [sys.executable, tmp_path / "script.py", *(tmp_path / name for name in sources)]
        process = subprocess.Popen(command, stdout=-1, stderr=-1, text=True, start_new_session=True)
        started.append(process)
        return process

    yield call
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def wait_for(condition):
    for _ in range(600):
        if value := condition():
            return value
        time.sleep(0.05)
    raise AssertionError("it did not come in 30 s")


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return " Z " not in Path(f"/proc/{pid}/stat").read_text() if Path("/proc").is_dir() else True


def workers_of(root):
    """The processes that took a file, once there are two of them."""
    pids = {int(text) for file in root.glob("*.pid") if (text := file.read_text())}
    return pids if len(pids) == 2 else None


def test_processes_find_what_one_process_finds(tmp_path, start):
    sources = {f"{number}.py": f"# noqa: HS001\nx = {number}\n" for number in range(8)}
    sources |= {"8.py": "x = (\n", "9.py": "autocast = 1  # noqa: HS001\n"}
    process = start(sources)
    out, err = process.communicate(timeout=60)
    assert err == ""
    here = lint_files({str(tmp_path / name): ("HS001",) for name in sources}, processes=1)
    assert here.findings
    assert out.splitlines() == [
        f"{Path(finding.file).name} {finding.line} {finding.code} {finding.message}" for finding in here.findings
    ]
    assert process.pid not in {int(file.read_text()) for file in tmp_path.glob("*.pid")}


def test_a_file_that_ends_its_process_is_found_and_the_rest_goes_on(start):
    sources = {f"{number}.py": "x = (\n" for number in range(6)} | {"3.py": "crash"}
    out, err = start(sources).communicate(timeout=100)
    assert err == ""
    assert [line.split()[:3] for line in out.splitlines()] == [
        [f"{number}.py", "1", "HS002" if number == 3 else "HS000"] for number in range(6)
    ]
    assert "its process ended" in out


def test_an_interrupt_ends_all_processes_at_once(tmp_path, start):
    process = start({f"{number}.py": "sleep" for number in range(9)})
    workers = wait_for(lambda: workers_of(tmp_path))
    for worker in workers:
        os.kill(worker, signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):  # it is the caller's to handle
        process.wait(0.5)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    out, err = process.communicate(timeout=30)  # each file would take a minute
    assert (process.returncode, out, err) == (1, "", "interrupted\n")
    assert not any(map(is_alive, workers))


def test_no_worker_outlives_a_caller_that_was_killed(tmp_path, start):
    process = start({f"{number}.py": "sleep" for number in range(9)})
    workers = wait_for(lambda: workers_of(tmp_path))
    process.kill()
    wait_for(lambda: not any(map(is_alive, workers)))


def test_a_script_without_a_guard_is_told(start):
    main = """
    from halfstep.errors import HalfstepError
    try:
        lint_files(dict.fromkeys(sys.argv[1:], ()), processes=2)
    except HalfstepError as error:
        print(error)
    """
    out, _ = start({"a.py": "x", "b.py": "y"}, main).communicate(timeout=60)
    assert 'Call lint_files beneath if __name__ == "__main__"' in out
