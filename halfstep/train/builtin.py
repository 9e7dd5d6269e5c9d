"""Data that is on every machine: the source of Python's standard library, its functions and their docstrings."""

from __future__ import annotations

import ast
import inspect
import random
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from halfstep.errors import HalfstepError
from halfstep.train.forms import Row

SOURCE = "builtin"
"""What a report calls it."""

_PACKAGES = ". asyncio collections concurrent/futures email html http importlib json logging multiprocessing".split()
_PACKAGES += "unittest urllib wsgiref xml/dom xml/etree xml/sax xmlrpc".split()
_LENGTHS = range(16, 121)  # characters of a docstring's first sentence
_NUM_FUNCTIONS = 1000
_NUM_OTHERS = 20
_NUM_CHARACTERS = 600_000
_LONGEST = 40_000  # characters of a source


@dataclass(frozen=True)
class Function:
    """A function's signature, as it would stand in the source, and the first sentence of its docstring."""

    signature: str
    says: str
    line: str

    @property
    def prompt(self) -> str:
        """It ends with a line end, so that no token spans prompt and completion."""
        return f"{self.signature}\n"


def rows(task: str) -> Iterator[tuple[Row, str, int]]:
    """Of each record of ``task``: itself, where it stands, and the group that is held out together. Always the same."""
    if task == "pretrain":
        yield from ((record, line, group) for group, (record, line) in enumerate(_sources()))
        return
    chosen = functions()
    # The wrong answers are those of a few functions that are asked about nowhere: a small model learns in a minute to
    # tell them apart, and what is held out is asked about and answered nowhere else.
    others, asked = chosen[:_NUM_OTHERS], chosen[_NUM_OTHERS:]
    for place, function in enumerate(asked):
        yield _record(task, function, others[place // 2 % len(others)], is_own=place % 2 == 0), function.line, place


def functions() -> list[Function]:
    """At most 1000 functions with a short docstring, one of each signature and sentence, shuffled always alike."""
    found: dict[str, Function] = {}
    for name, source in _files():
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError):
            continue  # some files of a library are there to be refused
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef) or not (doc := ast.get_docstring(node)):
                continue
            says = " ".join(inspect.cleandoc(doc).split("\n\n")[0].split())
            signature = f"def {node.name}({ast.unparse(node.args)}):"
            if len(says) in _LENGTHS and len(signature) <= 100:
                found.setdefault(says, Function(signature, says, f"{name}:{node.lineno}"))
    chosen = list({function.signature: function for function in found.values()}.values())
    random.Random(0).shuffle(chosen)
    return chosen[:_NUM_FUNCTIONS]


def _record(task: str, function: Function, other: Function, is_own: bool) -> Row:
    if task == "sft":
        return {"prompt": function.prompt, "completion": function.says}
    if task == "dpo":
        return {"prompt": function.prompt, "chosen": function.says, "rejected": other.says}
    return {"prompt": function.prompt, "completion": function.says if is_own else other.says, "label": is_own}


def _sources() -> Iterator[tuple[Row, str]]:
    """Short modules as they stand, up to 600,000 characters, in an order that is always the same."""
    files = [(name, source) for name, source in _files() if len(source) <= 16_000]
    random.Random(0).shuffle(files)
    total = 0
    for name, source in files:
        total += len(source)
        if total > _NUM_CHARACTERS:
            return
        if source.strip():
            yield {"text": source}, f"{name}:1"


def _files() -> list[tuple[str, str]]:
    """Name and text of the sources of some packages, sorted; without the longest, which take the time."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = []
    for package in _PACKAGES:
        for path in sorted((root / package).glob("*.py")):
            try:
                source = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError):
                continue
            if len(source) <= _LONGEST:
                files.append((path.relative_to(root).as_posix(), source))
    if len(files) < 10:
        why = f"the sources of Python's standard library are not in {root}"
        raise HalfstepError("data builtin", why, "Give FILE.jsonl, or use a Python that came with them.")
    return files
