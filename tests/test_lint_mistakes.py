"""Recall and precision on scripts of our own: each mistake of tests/mistakes is found at its line, and nothing else.

A faulty script marks its line with a trailing ``# HS101``, a configuration in a file ``NAME.expected``; the mark is
taken off before the script is linted. ``NAME.ok.py`` is the same script without the mistake. tests/mistakes/sound holds
correct code that looks wrong.
"""

import json
import re
from pathlib import Path

import pytest

from halfstep.lint.document import lint_text
from halfstep.lint.finding import Finding
from halfstep.lint.rules import all_rules

FOLDER = Path(__file__).parent / "mistakes"
SCRIPTS = sorted(path for path in FOLDER.iterdir() if path.suffix in {".py", ".ipynb", ".json"})
FAULTY = [path for path in SCRIPTS if not path.stem.endswith(".ok")]
SOUND = [path for path in SCRIPTS if path.stem.endswith(".ok")] + sorted((FOLDER / "sound").iterdir())
MARK = re.compile(r"  # (HS\d{3})$", re.MULTILINE)

Place = tuple[int | None, int, str]
"""The number of a notebook's code cell, the line, the code."""


def read(path: Path) -> tuple[str, list[Place]]:
    """A script without its marks, and where they stood."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        notebook = json.loads(text)
        cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
        places: list[Place] = []
        for number, cell in enumerate(cells, 1):
            source = "".join(cell["source"])
            places += [(number, line, code) for line, code in marks(source)]
            cell["source"] = MARK.sub("", source).splitlines(keepends=True)
        return json.dumps(notebook), places
    expected = path.with_suffix(".expected")
    if expected.exists():
        lines = expected.read_text(encoding="utf-8").splitlines()
        return text, [(None, int(line), code) for line, code in map(str.split, lines)]
    return MARK.sub("", text), [(None, line, code) for line, code in marks(text)]


def marks(source: str) -> list[tuple[int, str]]:
    return [(source.count("\n", 0, mark.start()) + 1, mark[1]) for mark in MARK.finditer(source)]


def places_of(findings: list[Finding]) -> list[Place]:
    return [(finding.cell, finding.line, finding.code) for finding in findings]


def name_of(path: Path) -> str:
    return path.relative_to(FOLDER).as_posix()


@pytest.mark.parametrize("path", FAULTY, ids=name_of)
def test_a_mistake_is_found_at_its_line_and_nothing_else(path: Path) -> None:
    text, places = read(path)
    assert len(places) == 1
    findings = lint_text(text, path.name, all_rules())
    assert places_of(findings) == places, [finding.message for finding in findings]


@pytest.mark.parametrize("path", SOUND, ids=name_of)
def test_sound_code_is_left_alone(path: Path) -> None:
    text, places = read(path)
    assert not places
    findings = lint_text(text, path.name, all_rules())
    assert places_of(findings) == [], [finding.message for finding in findings]


def test_every_mistake_has_a_twin_without_it() -> None:
    for path in FAULTY:
        twin = path.with_name(f"{path.stem}.ok{path.suffix}")
        assert read(twin)[0] != read(path)[0], twin.name
    assert len(SOUND) - len(FAULTY) >= 30


def test_every_rule_has_a_mistake_named_after_it() -> None:
    codes = {path: read(path)[1][0][2] for path in FAULTY}
    assert {rule.code for rule in all_rules()} <= set(codes.values())
    names = {rule.code: rule.name for rule in all_rules()}
    for path, code in codes.items():
        assert path.name.startswith(names.get(code, "")), path.name
