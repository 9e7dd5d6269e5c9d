"""Each rule has its page, made from the rule, and docs/rules holds exactly these pages."""

import subprocess
import sys
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from rich.markdown import Markdown

import halfstep.lint.rule_page
from halfstep.errors import HalfstepError
from halfstep.lint.catalogue import catalogue
from halfstep.lint.rule import Rule
from halfstep.lint.rule_page import find_rule, index_page, pages, rule_page, write

DOCS = Path(__file__).parent.parent / "docs" / "rules"
RULES = list(catalogue().values())
RULE = Rule(
    "HS101",
    "clip-before-unscale",
    "error",
    "Gradients are clipped | before they are unscaled.",
    "The limit is 65536 times too low.\n",
    ("clip()  # HS101\n", "other()  # HS101\n"),
    ("unscale()\nclip()\n",),
    lambda _: iter(()),
    "unsafe",
    "It inserts a call.",
)


def test_a_page_has_the_parts_in_order():
    assert rule_page(RULE) == (
        "# clip-before-unscale (HS101)\n\n"
        "Severity: error. Its fix is unsafe: `halfstep lint --unsafe-fixes` applies it.\n\n"
        "## What it does\n\nGradients are clipped | before they are unscaled.\n\n"
        "## Why is this bad\n\nThe limit is 65536 times too low.\n\n"
        "## Example\n\n```python\nclip()  # HS101\n```\n\n"
        "## Use instead\n\n```python\nunscale()\nclip()\n```\n\n"
        "## Fix safety\n\nIt inserts a call.\n"
    )


def test_a_configuration_is_shown_as_json():
    rule = replace(RULE, reads="deepspeed", bad=('{"fp16": {}}\n',), good=("config = {}\n",))
    page = rule_page(rule)
    assert '## Example\n\n```json\n{"fp16": {}}\n```' in page
    assert "## Use instead\n\n```python\nconfig = {}\n```" in page
    assert '```python\n{"fp16": {}}\n```' in rule_page(replace(rule, reads="python"))


def test_a_summary_with_a_bar_does_not_end_its_cell(monkeypatch):
    monkeypatch.setattr(
        halfstep.lint.rule_page, "catalogue", lambda: {"HS101": replace(RULE, summary="Clips | scaled.")}
    )
    assert index_page().endswith(
        "## HS1: The result is wrong\n\n"
        "| code | name | severity | fix | what it finds |\n|---|---|---|---|---|\n"
        "| [HS101](HS101.md) | clip-before-unscale | error | unsafe | Clips \\| scaled. |\n"
    )


@pytest.mark.parametrize("rule", RULES, ids=[rule.code for rule in RULES])
def test_the_page_on_disk_is_the_one_that_is_generated(rule):
    page = rule_page(rule)
    assert (DOCS / f"{rule.code}.md").read_text(encoding="utf-8") == page, (
        "python -m halfstep.lint.rule_page docs/rules"
    )
    assert page.count("```") % 2 == 0
    assert "\u2014" not in page
    assert ("## Fix safety" in page) == (rule.fix is not None)
    console = Console(file=StringIO(), width=100)
    console.print(Markdown(page))
    assert rule.name in console.file.getvalue()


def test_the_index_on_disk_is_the_one_that_is_generated():
    assert (DOCS / "index.md").read_text(encoding="utf-8") == index_page()
    assert {file.name for file in DOCS.iterdir()} == pages().keys()


def test_the_index_names_every_rule_once():
    index = index_page()
    for rule in RULES:
        assert index.count(f"[{rule.code}]({rule.code}.md) | {rule.name} |") == 1
    assert [line[3:6] for line in index.splitlines() if line.startswith("## ")] == sorted({c[:3] for c in catalogue()})


def test_writing_makes_the_folder_and_removes_pages_of_rules_that_are_gone(tmp_path):
    folder = tmp_path / "docs" / "rules"
    write(folder)
    (folder / "HS999.md").write_text("old")
    (folder / "mine.md").write_text("kept")
    (folder / "HS001.md").write_text("stale")
    write(folder)
    assert {file.name for file in folder.iterdir()} == {*pages(), "mine.md"}
    assert (folder / "HS001.md").read_text(encoding="utf-8") == rule_page(find_rule("unused-noqa"))


def test_the_module_writes_the_pages(tmp_path):
    command = [sys.executable, "-m", "halfstep.lint.rule_page", str(tmp_path / "rules")]
    assert subprocess.run(command, capture_output=True).returncode == 0
    assert {file.name for file in (tmp_path / "rules").iterdir()} == pages().keys()


def test_a_rule_is_found_by_code_and_name():
    assert find_rule("HS001") is find_rule("hs001") is find_rule("unused-noqa")
    with pytest.raises(HalfstepError, match=r"^--explain unused-noq: no rule.*Did you mean unused-noqa\?"):
        find_rule("unused-noq")
