"""Each rule of the guard has its page, made from the rule, and docs/alerts holds exactly these pages."""

import re
import subprocess
import sys
import tomllib
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from rich.markdown import Markdown

import halfstep.watch.rule_page
from halfstep.watch.entry import RunStart
from halfstep.watch.guard import Guard, all_rules
from halfstep.watch.rule import Rule
from halfstep.watch.rule_page import index_page, pages, rule_page, write
from halfstep.watch.settings import Watch

DOCS = Path(__file__).parent.parent / "docs" / "alerts"
RULES = list(all_rules().values())
NAMES = [rule.name for rule in RULES]
RULE = Rule(
    name="loss-odd",
    severity="note",
    summary="The loss is odd | strange.",
    why="It is 3.\n",
    check=lambda window, limits: None,
    limits={"most": 1.5, "least": 20},
    limit_notes={"most": "times the usual", "least": "steps"},
)


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", page, re.S | re.M)


def test_a_page_has_the_parts_in_order():
    page = rule_page(RULE)
    assert re.findall(r"^#+ .*", page, re.M) == [
        "# loss-odd",
        "## Why",
        "## What to do",
        "## Turn it off, or change it",
    ]
    assert "Severity: note, unless the alert says another. The loss is odd | strange.\n\n## Why\n\nIt is 3.\n\n" in page
    assert page.endswith(
        "| limit | default | what it is |\n|---|---|---|\n"
        "| `most` | 1.5 | times the usual |\n| `least` | 20 | steps |\n\n"
        "```ini\n[rules.loss-odd]\nmost = 3\n```\n\n"
        '```python\nwatch = halfstep.Watch(rules={"loss-odd": {"most": 3}})\n```\n'
    )
    assert "limit" not in rule_page(replace(RULE, limits={}, limit_notes={}))


def test_a_summary_with_a_bar_does_not_end_its_cell(monkeypatch):
    monkeypatch.setattr(halfstep.watch.rule_page, "all_rules", lambda: {"loss-odd": RULE})
    assert index_page().endswith(
        "| rule | severity | what it sees |\n|---|---|---|\n"
        "| [loss-odd](loss-odd.md) | note | The loss is odd \\| strange. |\n"
    )


@pytest.mark.parametrize("rule", RULES, ids=NAMES)
def test_the_page_on_disk_is_the_one_that_is_generated(rule):
    page = rule_page(rule)
    assert (DOCS / f"{rule.name}.md").read_text(encoding="utf-8") == page, (
        "python -m halfstep.watch.rule_page docs/alerts"
    )
    assert "\u2014" not in page
    assert len(rule.why) > 300, "a reason with its numbers"
    assert re.search(r"\d", rule.why)
    console = Console(file=StringIO(), width=100)
    console.print(Markdown(page))
    assert rule.name in console.file.getvalue()
    for link in re.findall(r"\]\(([^)]+)\)", page):
        assert (DOCS / link).exists(), link


@pytest.mark.parametrize("rule", RULES, ids=NAMES)
def test_the_settings_of_a_page_work(rule):
    page, namespace = rule_page(rule), {}
    given = []
    for block in blocks(page, "python"):
        exec(block, namespace)
        given.append(namespace["watch"])
    assert [Watch.of(tomllib.loads(block), "page") for block in blocks(page, "ini")] == given
    assert given[0].rules == {rule.name: False}
    assert len(given) == (2 if rule.limits else 1)
    for watch in given:
        Guard(RunStart(0.0), watch)


def test_the_index_on_disk_is_the_one_that_is_generated():
    assert (DOCS / "index.md").read_text(encoding="utf-8") == index_page()
    assert {file.name for file in DOCS.iterdir()} == pages().keys() == {"index.md", *(f"{name}.md" for name in NAMES)}


def test_the_index_names_every_rule_once():
    index = index_page()
    for rule in RULES:
        assert index.count(f"| [{rule.name}]({rule.name}.md) | {rule.severity} | {rule.summary} |") == 1


def test_writing_makes_the_folder_and_removes_only_pages_of_rules_that_are_gone(tmp_path):
    folder = tmp_path / "docs" / "alerts"
    write(folder)
    (folder / "gone.md").write_text((folder / "stalled.md").read_text(encoding="utf-8"), encoding="utf-8")
    (folder / "mine.md").write_text("kept")
    (folder / "stalled.md").write_text("stale")
    write(folder)
    assert {file.name for file in folder.iterdir()} == {*pages(), "mine.md"}
    assert (folder / "stalled.md").read_text(encoding="utf-8") == rule_page(all_rules()["stalled"])


def test_the_module_writes_the_pages(tmp_path):
    command = [sys.executable, "-m", "halfstep.watch.rule_page", str(tmp_path / "alerts")]
    assert subprocess.run(command, capture_output=True).returncode == 0
    assert {file.name for file in (tmp_path / "alerts").iterdir()} == pages().keys()
