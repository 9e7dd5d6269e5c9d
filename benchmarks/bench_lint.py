"""100,000 lines of real source through halfstep lint: cold and warm, with one process and with two.

The lines are those of the installed torch package. To reach: 100,000 lines in 10 s, cold, on two cores. The bound is
what ``ast.parse`` alone costs, which reads the same files in one process: with two, a half of it.
"""

from __future__ import annotations

import ast
import importlib.util
import random
import statistics
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

from interleave import Contender, measure, report

from halfstep.lint.cache import Cache
from halfstep.lint.catalogue import catalogue
from halfstep.lint.runner import lint_files
from halfstep.lint.tree import find_files

NUM_LINES = 100_000
ROUNDS = 5


def collect(root: Path) -> list[str]:
    """Files of torch with NUM_LINES lines in all, drawn by chance, copied beneath ``root``."""
    torch = importlib.util.find_spec("torch")
    assert torch is not None
    assert torch.origin is not None
    package = Path(torch.origin).parent
    files = sorted(package.rglob("*.py"))
    random.Random(0).shuffle(files)
    num_lines = 0
    for number, file in enumerate(files):
        content = file.read_bytes()
        if file.name == "py312_intrinsics.py" or num_lines >= NUM_LINES:  # Python 3.11 does not parse that one
            continue
        num_lines += content.count(b"\n")
        copy = root / f"{number % 50}" / f"{number}_{file.name}"
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(content)
    return list(find_files([root]).files)


def parse(files: list[str]) -> None:
    for file in files:
        ast.parse(Path(file).read_bytes(), file)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        files = collect(Path(folder, "tree"))
        lines = sum(Path(file).read_bytes().count(b"\n") for file in files)
        codes = dict.fromkeys(files, frozenset(catalogue()))
        warm = Cache(Path(folder, "cache"))
        found = lint_files(codes, warm)
        print(f"{lines:,} lines in {len(files)} files, {len(catalogue())} rules, {len(found.findings)} findings")

        def lint(processes: int, cold: bool) -> Callable[[], object]:
            return lambda: lint_files(codes, None if cold else Cache(warm.directory), processes)

        times = measure(
            {
                "ast.parse": Contender(lambda: parse(files)),
                "cold, 1 process": Contender(lint(1, cold=True)),
                "cold, 2 processes": Contender(lint(2, cold=True)),
                "warm": Contender(lint(1, cold=False)),
            },
            ROUNDS,
            warm_up=1,
        )
    for name, values in times.items():
        median = statistics.median(values) / 1e3
        print(f"  {name}: {median:.2f} s, {lines / median:,.0f} lines per second")
    goal = 10.0 * lines / NUM_LINES / (statistics.median(times["ast.parse"]) / 1e3)
    report(times, "cold, 1 process", "ast.parse", "bound 1")
    report(times, "cold, 2 processes", "ast.parse", f"bound 0.5; to reach {goal:.1f}, which is 10 s for 100,000 lines")
    report(times, "warm", "ast.parse", "what a run costs when nothing changed")


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # ast.parse warns of escapes in torch's source
    print(__doc__.splitlines()[0])
    main()
