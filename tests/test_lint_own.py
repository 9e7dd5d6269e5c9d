"""What we tell others holds for us: our code, examples, benchmarks and documentation pass our own lint."""

import re
from pathlib import Path

import pytest

from halfstep.cli import run
from halfstep.lint.document import lint_text
from halfstep.lint.rules import all_rules

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_repository_passes(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    status = run(["lint", ".", "--no-cache"])
    assert status == 0, capsys.readouterr().out


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_of_a_page_passes(page):
    # The blocks of a page are one program, as tests/test_docs.py runs them.
    text = "\n".join(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.S | re.M))
    found = [(f.code, f"{f.line} {f.message}") for f in lint_text(text, f"{page.stem}.py", all_rules())]
    # The loop that one comes from has two of the usual mistakes; what it leaves behind is what HS101 sees afterwards.
    known = ["HS121", "HS303", "HS101"] if page.name == "migration.md" else []
    assert [code for code, _ in found] == known, found


def test_the_finding_of_the_readme_is_one(capsys, monkeypatch, tmp_path):
    (rule,) = [rule for rule in all_rules() if rule.code == "HS101"]
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(rule.bad[0].replace("  # HS101", ""))
    assert run(["lint", "train.py"]) == 1
    printed = {line.strip() for line in capsys.readouterr().out.splitlines()}
    (shown,) = re.findall(r"^```output\n(.*?)^```", (ROOT / "README.md").read_text(), re.S | re.M)
    assert {line.strip() for line in shown.splitlines()} <= printed
