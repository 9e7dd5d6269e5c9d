"""``halfstep lint`` end to end: status, output in each format, settings, fixes, standard input, watching."""

import ast
import io
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from halfstep.cli import run
from halfstep.lint import catalogue, runner, to_halfstep
from halfstep.lint.finding import Edit
from halfstep.lint.rule import Problem, Rule
from halfstep.lint.to_halfstep import Conversion

TEXT = "import torch.amp\n\nbad(1)\nworse(2)\nold(3)\nhint(4)\n"
FIXED = TEXT.replace("bad(1)", "good(1)").replace("old(3)", "new(3)")


def fake_rule(code, function, severity, fix, instead):
    """Reports each call of ``function``; its fix calls another one."""

    def check(script):
        for node in ast.walk(script.tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == function:
                edits = (Edit("replace", script.span(node.func), instead),) if fix else ()
                yield Problem(node, f"{function} is called", edits, fix)

    name = f"call-of-{function}"
    return Rule(
        code, name, severity, "Bad.", "So.", (f"{function}(1)\n",), ("good(1)\n",), check, fix, "Calls another."
    )


RULES = (
    fake_rule("HS101", "bad", "error", "safe", "good"),
    fake_rule("HS102", "worse", "warning", "unsafe", "better"),
    fake_rule("HS309", "hint", "note", None, ""),
    fake_rule("HS401", "old", "warning", "safe", "new"),
)


@pytest.fixture(autouse=True)
def _rules(monkeypatch, tmp_path):
    monkeypatch.setattr(catalogue, "all_rules", lambda: RULES)
    monkeypatch.delenv("GITHUB_WORKSPACE", raising=False)
    monkeypatch.chdir(tmp_path)
    catalogue.catalogue.cache_clear()
    runner._rules.cache_clear()
    yield
    catalogue.catalogue.cache_clear()
    runner._rules.cache_clear()


@pytest.fixture
def lint(capsys):
    """Run the command: its status, and what it printed on standard output and standard error."""

    def call(*arguments):
        status = run(["lint", *arguments])
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return call


@pytest.fixture
def train(tmp_path):
    file = tmp_path / "train.py"
    file.write_text(TEXT)
    return file


def codes(lint, *arguments):
    status, out, _ = lint(*arguments, "--json")
    found = [finding["code"] for finding in json.loads(out)]
    assert status == (any(code != "HS309" for code in found))
    return found


def test_text_is_what_is_found_where_and_how_it_is_fixed(lint, train):
    status, out, err = lint()
    assert (status, err) == (1, "")
    assert out.startswith("train.py:3:1: HS101 bad is called\n  |\n1 | import torch.amp\n2 |\n3 | bad(1)\n  | ^^^^^^\n")
    assert out.endswith("1 error, 2 warnings, 1 note in 1 file; can be fixed: 2 with --fix, 1 with --unsafe-fixes\n")
    assert "\x1b" not in out
    assert lint("train.py") == (status, out, err)
    assert lint("--no-cache") == (status, out, err)


def test_nothing_found_is_status_0(lint, train, tmp_path):
    (tmp_path / "empty").mkdir()
    assert lint("empty") == (
        0,
        "nothing found in 0 files\n",
        "halfstep: there is no Python, no notebook and no DeepSpeed configuration in empty\n",
    )
    train.write_text("import torch.amp\n")
    assert lint() == (0, "nothing found in 1 file\n", "")
    train.write_text("import torch.amp\nhint(1)\n")
    assert lint()[0] == 0


def test_formats(lint, train, tmp_path):
    expected = [
        ("train.py", None, 3, 1, 3, "HS101", "call-of-bad", "bad is called", "error", "safe"),
        ("train.py", None, 4, 1, 4, "HS102", "call-of-worse", "worse is called", "warning", "unsafe"),
        ("train.py", None, 5, 1, 5, "HS401", "call-of-old", "old is called", "warning", "safe"),
        ("train.py", None, 6, 1, 6, "HS309", "call-of-hint", "hint is called", "note", None),
    ]
    keys = ["file", "cell", "line", "column", "end_line", "code", "name", "message", "severity", "fix"]
    for arguments in (["--format", "json"], ["--json", "-"], ["--json"]):
        status, out, _ = lint(*arguments)
        assert status == 1
        assert json.loads(out) == [dict(zip(keys, row, strict=True)) for row in expected]
    _, text, _ = lint("--json", "r.json")
    assert text == lint()[1]
    assert (tmp_path / "r.json").read_text() == out
    assert lint("--format", "github")[1].splitlines()[0].startswith("::error file=train.py,line=3,endLine=3,col=1,")
    assert lint("--statistics")[1].splitlines()[2].split() == ["count", "code", "name"]


def test_sarif_has_the_fix_that_would_be_made(lint, train):
    status, out, _ = lint("--format", "sarif")
    results = json.loads(out)["runs"][0]["results"]
    assert (status, [result["ruleId"] for result in results]) == (1, ["HS101", "HS102", "HS401", "HS309"])
    (change,) = results[0]["fixes"][0]["artifactChanges"]
    assert change["replacements"] == [
        {
            "deletedRegion": {"startLine": 3, "startColumn": 1, "endLine": 4, "endColumn": 1},
            "insertedContent": {"text": "good(1)\n"},
        }
    ]
    assert "fixes" not in results[3]


def test_files_are_named_from_the_repository_on_github(lint, train, tmp_path, monkeypatch):
    (tmp_path / "src").mkdir()
    train.rename(tmp_path / "src" / "train.py")
    monkeypatch.chdir(tmp_path / "src")
    monkeypatch.setenv("GITHUB_WORKSPACE", str(tmp_path))
    assert "::error file=src/train.py," in lint("--format", "github")[1]
    assert '"uri": "src/train.py"' in lint("--format", "sarif")[1]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--select", "HS1"], ["HS101", "HS102"]),
        (["--select", "HS101,call-of-old"], ["HS101", "HS401"]),
        (["--ignore", "HS1, HS4"], ["HS309"]),
        (["--select", "HS1", "--ignore", "HS102"], ["HS101"]),
        (["--exclude", "train.py,other"], []),
        (["--exclude", "other"], ["HS101", "HS102", "HS401", "HS309"]),
    ],
)
def test_flags_choose_rules_and_files(lint, train, arguments, expected):
    assert codes(lint, *arguments) == expected


def test_settings_hold_and_flags_win(lint, train, tmp_path):
    (tmp_path / "pyproject.toml").write_text(
        "[tool.halfstep.lint]\nselect = ['HS1', 'HS4']\nignore = ['HS102']\nexclude = ['old/']\n"
        "per-file-ignores = {'test_*.py' = ['HS401']}\n"
    )
    (tmp_path / "old").mkdir()
    for name in ("old/a.py", "test_a.py"):
        (tmp_path / name).write_text(TEXT)
    assert codes(lint) == ["HS101", "HS101", "HS401"]
    assert codes(lint, "test_a.py") == ["HS101"]
    assert codes(lint, "train.py", "--select", "HS102", "--ignore", "") == ["HS102"]
    assert codes(lint, "--exclude", "test_a.py", "old") == ["HS101", "HS401"]
    assert codes(lint, "--select", "HS309", "--exclude", "none") == ["HS309"] * 3


def test_each_path_has_its_own_settings(lint, tmp_path):
    for name, selected in (("one", "HS101"), ("two", "HS102")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "pyproject.toml").write_text(f"[tool.halfstep.lint]\nselect = ['{selected}']\n")
        (tmp_path / name / "a.py").write_text(TEXT)
    assert codes(lint, "two", "one/a.py") == ["HS101", "HS102"]


def test_noqa_and_what_it_leaves(lint, train):
    train.write_text("import torch.amp\nbad(1)  # noqa: HS101\nbad(2)  # noqa: HS102\n")
    assert codes(lint) == ["HS101", "HS001"]
    assert codes(lint, "--select", "HS101") == ["HS101"]
    assert lint("--fix")[0] == 0
    assert train.read_text() == "import torch.amp\nbad(1)  # noqa: HS101\ngood(2)\n"


def test_a_broken_file_is_found_and_the_rest_goes_on(lint, train, tmp_path):
    (tmp_path / "broken.py").write_text("for x in\n")
    assert codes(lint, "--select", "HS101") == ["HS000", "HS101"]
    assert codes(lint, "--select", "HS101", "--ignore", "HS000") == ["HS101"]
    status, out, _ = lint("--fix", "--select", "HS101")
    assert (status, out.splitlines()[0][:18]) == (1, "broken.py:1:9: HS0")
    assert (tmp_path / "broken.py").read_text() == "for x in\n"
    assert train.read_text() == TEXT.replace("bad", "good")


def test_fix_mends_what_is_safe_and_reports_the_rest(lint, train):
    status, out, err = lint("--fix")
    assert (status, err) == (1, "")
    assert train.read_text() == FIXED
    assert out.splitlines()[-1] == ("1 warning, 1 note in 1 file, 2 fixed; can be fixed: 1 with --unsafe-fixes")
    assert "3 | good(1)" in out
    assert lint("--fix")[1].splitlines()[-1].startswith("1 warning, 1 note in 1 file; can be")
    assert lint("--unsafe-fixes")[0] == 0
    assert train.read_text() == FIXED.replace("worse", "better")


def test_unsafe_fixes_include_the_safe_ones(lint, train):
    assert lint("--unsafe-fixes")[0] == 0
    assert train.read_text() == FIXED.replace("worse", "better")


def test_a_file_that_may_not_be_written_is_said_before_any_is(lint, train, tmp_path, monkeypatch):
    (tmp_path / "locked.py").write_text(TEXT)
    (tmp_path / "a.py").write_text(TEXT)
    monkeypatch.setattr(os, "access", lambda path, mode: os.path.basename(path) != "locked.py")
    status, out, err = lint("--fix")
    assert (status, out) == (2, "")
    assert err.startswith("halfstep: locked.py: it may not be written, and nothing was changed. ")
    assert {(tmp_path / name).read_text() for name in ("a.py", "train.py", "locked.py")} == {TEXT}


def test_migrate_rewrites_deprecated_names_alone(lint, train):
    assert lint("--migrate") == (0, "nothing found in 1 file, 1 fixed\n", "")
    assert train.read_text() == TEXT.replace("old", "new")


def test_diff_shows_and_changes_nothing(lint, train, tmp_path):
    for flags in ([], ["--fix"]):
        status, out, err = lint("--diff", *flags)
        assert (status, train.read_text()) == (1, TEXT)
        assert out == (
            "--- train.py\n+++ train.py\n@@ -1,6 +1,6 @@\n import torch.amp\n \n-bad(1)\n+good(1)\n worse(2)\n-old(3)\n"
            "+new(3)\n hint(4)\n"
        )
        assert err == "halfstep: 1 file would change; 2 of 4 findings would be fixed\n"
    assert lint("--diff", "--migrate")[1].count("\n+") == 2
    train.write_text("import torch.amp")
    assert lint("--diff")[:2] == (0, "")


def test_a_loop_is_rewritten_to_a_stepper_and_what_stays_is_said(lint, tmp_path, monkeypatch):
    """The rewriting itself has tests of its own."""
    conversions = {
        "a.py": Conversion("import halfstep\nbad(1)\n", 1),
        "b.py": Conversion("x = 1\n", 0, ((1, "this loop stays"),)),
    }
    monkeypatch.setattr(to_halfstep, "to_halfstep", lambda text, file: conversions[file])
    for name in conversions:
        (tmp_path / name).write_text("x = 1\n")
    status, out, err = lint("--to-halfstep", "--diff")
    assert (status, out.count("+import halfstep")) == (1, 1)
    assert (tmp_path / "a.py").read_text() == "x = 1\n"
    said = "halfstep: a.py: --to-halfstep rewrites 1 loop\nhalfstep: b.py:1: this loop stays\n"
    assert err == f"{said}halfstep: 1 file would change\n"
    status, out, err = lint("--to-halfstep", "--ignore", "HS101")
    assert (status, out, err) == (0, "nothing found in 2 files\n", said)
    assert (tmp_path / "a.py").read_text() == "import halfstep\nbad(1)\n"


def test_a_difference_without_a_last_line_end_is_one_that_patch_reads(lint, tmp_path):
    (tmp_path / "a.py").write_bytes(b"import torch.amp\r\nbad(1)")
    _, out, _ = lint("--diff")
    (tmp_path / "p.diff").write_bytes(out.encode())
    subprocess.run(["patch", "--binary", "-p0", "-i", "p.diff"], cwd=tmp_path, check=True, capture_output=True)
    assert (tmp_path / "a.py").read_bytes() == b"import torch.amp\r\ngood(1)"


def test_a_mended_file_keeps_encoding_line_ends_rights_and_link(lint, tmp_path):
    content = "# coding: latin-1\r\nimport torch.amp\r\nbad('\xe9')\r\n".encode("latin-1")
    (tmp_path / "real").mkdir()
    real = tmp_path / "real" / "a.py"
    real.write_bytes(content)
    real.chmod(0o750)
    (tmp_path / "link.py").symlink_to(real)
    assert lint("link.py", "--fix")[0] == 0
    assert (tmp_path / "link.py").is_symlink()
    assert real.read_bytes() == content.replace(b"bad", b"good")
    assert real.stat().st_mode & 0o777 == 0o750


def notebook(*cells):
    cells = [{"cell_type": "code", "metadata": {}, "outputs": [], "source": cell} for cell in cells]
    return json.dumps({"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5})


def test_a_notebook_is_shown_by_cell_and_fixed_in_place(lint, tmp_path):
    file = tmp_path / "a.ipynb"
    file.write_text(notebook("import torch.amp", "x = 1\n\nbad(x)\nworse(x)"))
    status, out, _ = lint("--fix")
    assert status == 1
    assert out.startswith(
        "a.ipynb:cell 2:4:1: HS102 worse is called\n  |\n3 | good(x)\n4 | worse(x)\n  | ^^^^^^^^\n  = fix: unsafe"
    )
    assert file.read_text() == notebook("import torch.amp", "x = 1\n\ngood(x)\nworse(x)")


@pytest.fixture
def stdin(monkeypatch):
    return lambda text: monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))


def test_standard_input_is_linted_under_its_name(lint, stdin, tmp_path):
    stdin(TEXT)
    status, out, _ = lint("-")
    assert (status, out.split(": ")[0]) == (1, "<stdin>:3:1")
    assert "3 | bad(1)" in out
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "pyproject.toml").write_text(
        "[tool.halfstep.lint]\nper-file-ignores = {'a.py' = ['HS1', 'HS4']}\n"
    )
    stdin(TEXT)
    assert lint("-", "--stdin-filename", "src/a.py")[0] == 0
    stdin(notebook("import torch.amp\nbad(1)"))
    assert lint("-", "--stdin-filename", "a.ipynb")[1].startswith("a.ipynb:cell 1:2:1: HS101")


def test_standard_input_is_fixed_to_standard_output(lint, stdin):
    stdin(TEXT)
    status, out, err = lint("-", "--fix")
    assert (status, out) == (1, FIXED)
    assert err.startswith("<stdin>:4:1: HS102")
    stdin(TEXT)
    status, out, err = lint("-", "--diff")
    assert (status, out.splitlines()[:2]) == (1, ["--- <stdin>", "+++ <stdin>"])
    for untouched in ("import torch.amp\n", "for x in\n"):
        stdin(untouched)
        assert lint("-", "--fix")[1] == untouched


def test_a_terminal_without_the_characters_of_the_source_gets_their_codes(lint, train, monkeypatch):
    train.write_text("import torch.amp  # ä\nbad(1)\n")
    out = io.TextIOWrapper(io.BytesIO(), "ascii", write_through=True)
    monkeypatch.setattr("sys.stdout", out)
    lint()
    lint("--diff")
    assert out.buffer.getvalue().decode("ascii").count("# \\xe4") == 2
    source = "# coding: latin-1\nimport torch.amp  # ä\nbad(1)\n".encode("latin-1")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(source)))
    lint("-", "--fix")
    assert out.buffer.getvalue().endswith(source.replace(b"bad", b"good"))


def test_explain_prints_the_page(lint):
    status, out, err = lint("--explain", "HS101")
    assert (status, err) == (0, "")
    assert out.startswith("# call-of-bad (HS101)\n")
    assert lint("--explain", "call-of-bad")[1] == out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--select", "HS9"], "--select HS9: no rule has this code"),
        (["--select", "HS9"], "Use a code, from HS101 to HS"),
        (["--select", "hs101"], "Did you mean HS101?"),
        (["--select", ""], "--select '': no rule has this code"),
        (["--ignore", "call-of-bed"], "Did you mean call-of-bad?"),
        (["missing.py"], "path missing.py: there is no such file"),
        (["--explain", "HS9"], "--explain HS9: no rule has this code or name"),
        (["--format", "xml"], "--format xml: there is no such format. Use text, json, sarif, github."),
        (["--json", "no/such/r.json"], "no directory"),
        (["-", "train.py"], "path -: it is standard input, and other paths"),
        (["--stdin-filename", "a.py"], "--stdin-filename: nothing is read from standard input"),
        (["--watch", "--fix"], "--watch: it only shows text"),
        (["--watch", "-"], "--watch: it only shows text"),
        (["--watch", "--json"], "--watch: it only shows text"),
        (["--diff", "--statistics"], "--diff: it shows what would change"),
        (["--migrate", "--select", "HS1"], "--migrate: it selects HS401"),
        (["--json", "-", "--format", "sarif"], "--json -: --format sarif is printed there too"),
        (["--slect", "HS1"], "--slect"),
    ],
)
def test_a_wrong_call_is_one_line_and_status_2(lint, train, arguments, message):
    status, out, err = lint(*arguments)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("halfstep: ")
    assert message in err
    assert train.read_text() == TEXT


def test_a_wrong_setting_is_status_2(lint, train, tmp_path):
    (tmp_path / "pyproject.toml").write_text("[tool.halfstep.lint]\nslect = []\n")
    status, out, err = lint()
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "slect: there is no such setting" in err


def test_what_could_not_be_read_is_said(lint, tmp_path):
    (tmp_path / "a.py").symlink_to(tmp_path / "nowhere.py")
    status, _, err = lint()
    assert (status, err.count("\n")) == (0, 1)
    assert err.startswith("halfstep: a.py")


def test_lint_loads_neither_torch_nor_numpy_nor_libcst(tmp_path):
    (tmp_path / "a.py").write_text("import torch.amp\nx = torch.amp.autocast('cuda')\n")
    program = (
        "import sys\nfrom halfstep.cli import run\nrun(['lint', 'a.py', '--no-cache'])\n"
        "sys.exit(', '.join({'torch', 'numpy', 'libcst', 'pathspec'} & sys.modules.keys()) or 0)"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert " in 1 file" in done.stdout


def test_watch_shows_changes_and_ends_by_an_interrupt(tmp_path):
    """A real process, a real change, a real SIGINT. Only HS000 is looked for, which needs no rule."""
    file = tmp_path / "a.py"
    file.write_text("for x in\n")
    command = [sys.executable, "-u", "-m", "halfstep", "lint", "--watch", "--select", "HS000", "a.py"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    read = []

    def until(words):
        while True:
            line = process.stdout.readline()
            assert line, process.communicate()
            read.append(line)
            if words in line:
                return

    until("1 error in 1 file")
    settings = tmp_path / "pyproject.toml"
    settings.write_text("[tool.halfstep.lint]\nignore = ['HS000']\n")
    until("gone: a.py:1:9: HS000")
    until("nothing found in 1 file")
    settings.write_text("[tool.halfstep.lint\n")
    assert "it is not TOML" in process.stderr.readline()
    settings.unlink()
    until("1 error in 1 file")
    file.write_text("for x in y: pass\n")
    os.utime(file, ns=(1, 1))
    until("gone: a.py:1:9: HS000")
    until("nothing found in 1 file")
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert err.startswith("halfstep: interrupted")
    assert err.count("\n") == 1
    assert read[0].startswith("a.py:1:9: HS000")


def test_the_pre_commit_hook_names_the_command():
    import yaml

    root = os.path.join(os.path.dirname(__file__), "..")
    with open(os.path.join(root, ".pre-commit-hooks.yaml")) as file:
        (hook,) = yaml.safe_load(file)
    assert hook["id"] == "halfstep-lint"
    assert hook["entry"] == "halfstep lint"
    assert hook["types_or"] == ["python", "pyi", "jupyter"]
    with open(os.path.join(root, "docs", "lint.md")) as file:
        (repository,) = yaml.safe_load(file.read().split("```yaml\n")[1].split("```")[0])["repos"]
    (local,) = repository["hooks"]
    assert (repository["repo"], local["language"]) == ("local", "system")
    assert {key: local[key] for key in ("id", "name", "entry", "types_or", "require_serial")} == {
        key: hook[key] for key in ("id", "name", "entry", "types_or", "require_serial")
    }
