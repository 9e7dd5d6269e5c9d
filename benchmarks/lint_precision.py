"""What halfstep lint finds and what it wrongly finds: on tests/mistakes, and in the packages that are installed.

Recall: faulty scripts of tests/mistakes whose mistake is reported at its line, with the right code. Precision: findings
on their sound twins, on tests/mistakes/sound, and elsewhere in the faulty scripts. Then every finding in installed
packages is printed, for a person to read: each is either a fault of the package or a false alarm of ours.

    python benchmarks/lint_precision.py [PACKAGE ...]     (torch accelerate transformers trl peft lightning timm)
"""

from __future__ import annotations

import importlib.util
import sys
import time
from pathlib import Path

from halfstep.lint.catalogue import catalogue
from halfstep.lint.document import lint_text
from halfstep.lint.rules import all_rules
from halfstep.lint.runner import lint_files
from halfstep.lint.tree import find_files

ROOT = Path(__file__).parent.parent
PACKAGES = ("torch", "accelerate", "transformers", "trl", "peft", "lightning", "lightning_fabric", "timm")
sys.path.insert(0, str(ROOT / "tests"))

from test_lint_mistakes import FAULTY, SOUND, places_of, read  # noqa: E402


def scripts() -> None:
    found = missed = elsewhere = 0
    for path in FAULTY:
        text, marks = read(path)
        places = places_of(lint_text(text, path.name, all_rules()))
        found += sum(mark in places for mark in marks)
        missed += sum(mark not in places for mark in marks)
        elsewhere += sum(place not in marks for place in places)
    alarms = sum(len(lint_text(read(path)[0], path.name, all_rules())) for path in SOUND)
    print(f"tests/mistakes: {found} of {found + missed} mistakes found at their line, {elsewhere} findings elsewhere;")
    print(f"{alarms} findings in {len(SOUND)} sound files")


def packages(names: list[str]) -> None:
    for name in names:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            print(f"{name}: not installed")
            continue
        root = Path(spec.origin).parent
        files = list(find_files([root]).files)
        lines = sum(Path(file).read_bytes().count(b"\n") for file in files)
        start = time.perf_counter()
        codes = frozenset(catalogue()) - {"HS000"}  # syntax of a newer Python than this one is no alarm
        result = lint_files(dict.fromkeys(files, codes))
        seconds = time.perf_counter() - start
        print(f"{name}: {len(result.findings)} findings in {lines:,} lines, {lines / seconds:,.0f} lines per second")
        for finding in result.findings:
            print(f"  {Path(finding.file).relative_to(root.parent)}:{finding.line} {finding.code} {finding.message}")


if __name__ == "__main__":
    scripts()
    packages(sys.argv[1:] or list(PACKAGES))
