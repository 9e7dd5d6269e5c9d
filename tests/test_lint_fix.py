"""The fixer: each kind of edit on awkward sources, rounds, refusals, and files kept byte for byte."""

import ast
import random
import re
import sys
from pathlib import Path

import pytest
import torch

from halfstep.errors import HalfstepError
from halfstep.lint.finding import Edit, Finding, Span
from halfstep.lint.fix import fix_source
from halfstep.lint.fix_edits import CannotEdit, apply_edits
from halfstep.lint.script import Script


def span_of(text, piece, number=0):
    """The span of the ``number``-th ``piece`` in ``text``."""
    start = [match.start() for match in re.finditer(re.escape(piece), text)][number]
    return Span(*_position(text, start), *_position(text, start + len(piece)))


def _position(text, offset):
    lines = re.split("\r\n|\r|\n", text[:offset])
    return len(lines), len(lines[-1])


def edited(text, *edits):
    """``text`` after edits that are each (action, piece, code)."""
    return apply_edits(text, [Edit(action, span_of(text, piece), code) for action, piece, code in edits])


REPLACED = [
    ("x = f(a)\n", "f(a)", "g(a)", "x = g(a)\n"),
    ("x = (a) * 2\n", "a", "b + c", "x = (b + c) * 2\n"),
    ("x = a * 2\n", "a", "b + c", "x = (b + c) * 2\n"),
    ("f(a).backward()\n", "a", "a / 4", "f(a / 4).backward()\n"),
    ("loss.backward()\n", "loss", "loss / 4", "(loss / 4).backward()\n"),
    ("x = (1, 2)\n", "(1, 2)", "(3, 4)", "x = (3, 4)\n"),
    ("s = 'é', f( a )  ;  t = 1\n", "f( a )", "g()", "s = 'é', g()  ;  t = 1\n"),
    ("x = a + \\\n    b  # c\n", "b", "c(1)", "x = a + \\\n    c(1)  # c\n"),
    ("x = f'{é} {a!r:>{n}}'\n", "a", "b.c", "x = f'{é} {b.c!r:>{n}}'\n"),
    ("@deco(1)  # c\ndef f(): pass\n", "deco(1)", "deco", "@deco  # c\ndef f(): pass\n"),
    (
        "async def f():\n\tasync with z(1) as k: await q\n",
        "z(1)",
        "y",
        "async def f():\n\tasync with y as k: await q\n",
    ),
    ("x = f(\r\n    a,  # why\r\n    b,\r\n)\r\n", "b", "c", "x = f(\r\n    a,  # why\r\n    c,\r\n)\r\n"),
    ("if x:\n    a()  # one\n", "a()", "b = 1", "if x:\n    b = 1  # one\n"),
    ("if x: a(); b()\n", "a()", "y = 1", "if x: y = 1; b()\n"),
    ("a(); b()  # c\n", "b()", "y = 1\nz = 2", "a(); y = 1\nz = 2  # c\n"),
    ("a(); b()\n", "b()", "y = 1  # c", "a()\ny = 1  # c\n"),
    ("a()  # c\n", "a()", "if y:\n    z()", "# c\nif y:\n    z()\n"),
    ("import a, b\nx()\n", "import a, b", "import b", "import b\nx()\n"),
    ("x = 1  # noqa: HS101\n", "# noqa: HS101", "", "x = 1\n"),
    ("if y:\n    # old\n    x = 1", "# old", "# new", "if y:\n    # new\n    x = 1"),
    ("if y:\n    # old\n    x = 1", "# old", "", "if y:\n    x = 1"),
    ("x = (  # old\n    1\n)\n", "# old", "# new", "x = (  # new\n    1\n)\n"),
]


@pytest.mark.parametrize(("text", "piece", "code", "expected"), REPLACED)
def test_replace(text, piece, code, expected):
    assert edited(text, ("replace", piece, code)) == expected


DELETED = [
    ("a()\nb()\nc()\n", "b()", "a()\nc()\n"),
    ("if x:\n    a()  # gone\n", "a()", "if x:\n    pass\n"),
    ("if x: a()\nb()\n", "a()", "if x: pass\nb()\n"),
    ("if x: a(); b()  # c\n", "a()", "if x: b()  # c\n"),
    ("a(); b(); c()  # c\n", "c()", "a(); b()  # c\n"),
    ("a();  b() ;\n", "a()", "b() ;\n"),
    ("def f():\n\t# why\n\ta()\n\n\tb()\n", "a()", "def f():\n\t# why\n\n\tb()\n"),
    ("def f():\n\t# why\n\ta()\n", "a()", "def f():\n\t# why\n\tpass\n"),
    ("a()\n\nb()\n\nc()", "b()", "a()\n\nc()"),
    ("a()\n# kept\nb()\n", "b()", "a()\n# kept\n"),
    ("for x in y:\r\n    a()\r\n    b()\r\nc()\r\n", "b()", "for x in y:\r\n    a()\r\nc()\r\n"),
    ("x()\n@d\ndef f():\n    pass\ny()\n", "def f():\n    pass", "x()\ny()\n"),
    ("from a import b\n", "from a import b", "\n"),
]


@pytest.mark.parametrize(("text", "piece", "expected"), DELETED)
def test_delete(text, piece, expected):
    assert edited(text, ("delete", piece, "")) == expected


INSERTED = [
    ("before", "b()\n", "b()", "a()", "a()\nb()\n"),
    ("after", "b()", "b()", "a()", "b()\na()"),
    ("before", "if x:\n\tb()  # c\n\n", "b()", "a()\nd()", "if x:\n\ta()\n\td()\n\tb()  # c\n\n"),
    ("before", "if x: b()  # c\n", "b()", "a()", "if x:\n    a()\n    b()  # c\n"),
    ("after", "if x: b(); c()\nelse: d()\n", "b()", "a()", "if x:\n    b()\n    a()\n    c()\nelse: d()\n"),
    ("after", "b(); c()  # c\n", "c()", "a()", "b(); c()  # c\na()\n"),
    ("before", "b(); c()  # c\n", "c()", "a()", "b()\na()\nc()  # c\n"),
    ("before", "x()\n\n# of b\nb()\n", "b()", "a()", "x()\n\na()\n# of b\nb()\n"),
    ("before", "\n@d\n# c\ndef f(): pass\n", "def f(): pass", "a()", "\na()\n@d\n# c\ndef f(): pass\n"),
    ("after", "for x in y:\n    b()\n    # end\nc()\n", "for x in y:\n    b()", "a()",
     "for x in y:\n    b()\n    # end\na()\nc()\n"),
    ("after", "while 1:\r\n  b()\r\n  c()\r\n", "b()", "if y:\n    a()",
     "while 1:\r\n  b()\r\n  if y:\r\n    a()\r\n  c()\r\n".replace("\r\n    a", "\r\n    a")),
    ("before", "def f():\n\tb(\n\t)\n", "b(\n\t)", "if y:\n    a()", "def f():\n\tif y:\n\t\ta()\n\tb(\n\t)\n"),
    ("before", "class A:\n    async def f(self): await b()\n", "await b()", "a()",
     "class A:\n    async def f(self):\n        a()\n        await b()\n"),
    ("before", "b()\n", "b()", "# why\na()", "# why\na()\nb()\n"),
]  # fmt: skip


@pytest.mark.parametrize(("action", "text", "piece", "code", "expected"), INSERTED)
def test_insert(action, text, piece, code, expected):
    assert edited(text, (action, piece, code)) == expected


IMPORTED = [
    ("x()\n", "import torch", "import torch\nx()\n"),
    ('"""Doc."""\n\nx()\n', "import torch", '"""Doc."""\nimport torch\n\nx()\n'),
    ("#!/bin/sh\n# licence\n\nx()\n", "import torch", "#!/bin/sh\n# licence\n\nimport torch\nx()\n"),
    ("from __future__ import a\nx()\n", "import torch", "from __future__ import a\nimport torch\nx()\n"),
    ("import os\r\nimport torch\r\n\r\nx()\r\n", "import torch", "import os\r\nimport torch\r\n\r\nx()\r\n"),
    ("import os\nx()\nimport torch\ny()\n", "from torch import amp",
     "import os\nx()\nimport torch\nfrom torch import amp\ny()\n"),
    ("import os\n\nx()", "import torch", "import os\nimport torch\n\nx()"),
    ("from a.b import c  # c\n", "from a.b import d as e", "from a.b import c, d as e  # c\n"),
    ("from a.b import (\n    c,\n)\n", "from a.b import d", "from a.b import (\n    c,\n)\nfrom a.b import d\n"),
    ("from a.b import c, d\n", "from a.b import d", "from a.b import c, d\n"),
    ("from .b import c\n", "from b import d", "from .b import c\nfrom b import d\n"),
    ("from a import b\n", "from a import b, c", "from a import b, c\n"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "code", "expected"), IMPORTED)
def test_import(text, code, expected):
    assert apply_edits(text, [Edit("import", Span(1, 0, 1, 0), code)]) == expected


def test_edits_of_one_place_and_of_several_go_together():
    text = "if x: a(1)\nb()\n"
    edits = [("before", "a(1)", "y()"), ("replace", "a(1)", "a(2)"), ("after", "a(1)", "z()"), ("delete", "b()", "")]
    assert edited(text, *edits) == "if x:\n    y()\n    a(2)\n    z()\n"


REFUSED = [
    ("x = 1\n", [("replace", " 1", "2")], "stands at line 1"),
    ("if x: a()\nelif y: b()\n", [("delete", "elif y: b()", "")], "no statement can stand there"),
    ("x = a + b\n", [("replace", "a + b", "c"), ("replace", "a", "d")], "overlap"),
    ("x = a\n", [("before", "x = a", "if")], "not Python"),
    ("\fx = a\n", [("replace", "a", "b")], "does not give this file back"),
    ("x = a\n\x1a", [("replace", "a", "b")], "cannot read this file"),
]


@pytest.mark.parametrize(("text", "edits", "why"), REFUSED)
def test_edits_that_fit_nowhere_are_refused(text, edits, why):
    with pytest.raises(CannotEdit, match=why):
        edited(text, *edits)


# Rounds, and what is refused.


def linter(*patterns):
    """A lint that finds each pattern (code, regular expression, edits of a match or None)."""

    def lint(text, file):
        ast.parse(text)
        found = []
        for code, pattern, edits in patterns:
            for match in re.finditer(pattern, text, re.MULTILINE):
                line, column = _position(text, match.start())
                span = Span(line, column, *_position(text, match.end()))
                made = () if edits is None else tuple(Edit(action, span, new) for action, new in edits)
                fix = "unsafe" if code == "HS999" else "safe"
                found.append(
                    Finding(
                        file,
                        line,
                        column + 1,
                        line,
                        0,
                        code,
                        "name",
                        "what",
                        "error",
                        fix if made else None,
                        None,
                        made,
                    )
                )
        return found

    return lint


def test_fixes_are_applied_together_and_fixing_again_changes_nothing():
    lint = linter(("HS001", r"old\(\)", [("replace", "new()"), ("import", "import new")]))
    fixed = fix_source("x = old()\ny = old()  # c\n", "a.py", lint)
    assert fixed.text == "import new\nx = new()\ny = new()  # c\n"
    assert [finding.line for finding in fixed.applied] == [1, 2]
    assert fix_source(fixed.text, "a.py", lint) == type(fixed)(fixed.text)


def test_fixes_that_touch_each_other_take_a_round_each():
    lint = linter(
        ("HS001", r"f\(.*\)", [("replace", "g(old)")]),
        ("HS002", r"old", [("replace", "new")]),
        ("HS003", r"^x = .*$", [("before", "pass"), ("replace", "y = g(new)")]),
    )
    fixed = fix_source("x = f(old)\n", "a.py", lint)
    assert fixed.text == "pass\ny = g(new)\n"
    assert fixed.applied[0].code == "HS001"
    assert not fixed.refused


REFUSALS = [
    ([("replace", "bad()")], "it would bring HS002 name in line 1: what"),
    ([("replace", "old() + 1")], "HS001 would still be found"),
    ([("replace", "old()")], "it changes nothing"),
    ([("replace", "a b")], "the fix is not Python: a b"),
    ([("before", "return 1 if")], "the fix is not Python: return 1 if"),
    ([("delete", ""), ("before", "import z; raise")], None),
]


@pytest.mark.parametrize(("edits", "why"), REFUSALS)
def test_a_fix_that_does_not_mend_is_taken_back(edits, why):
    lint = linter(("HS001", r"old\(\)", edits), ("HS002", "bad", None))
    text = "old()  # c\nx = 1\n"
    fixed = fix_source(text, "a.py", lint)
    if why is None:
        assert fixed.text == "import z; raise  # c\nx = 1\n"
    else:
        assert (fixed.text, fixed.applied, [reason for _, reason in fixed.refused]) == (text, [], [why])


def test_a_bad_fix_does_not_hold_up_the_good_ones():
    lint = linter(
        ("HS001", r"old\d", [("replace", "new")]), ("HS002", r"worse", [("replace", "bad")]), ("HS003", r"bad", None)
    )
    text = "".join(f"x = old{i}\n" for i in range(5)) + "y = worse\n" + "z = old9\n"
    fixed = fix_source(text, "a.py", lint)
    assert fixed.text == "x = new\n" * 5 + "y = worse\nz = new\n"
    assert len(fixed.applied) == 6
    assert [(finding.code, finding.line) for finding, _ in fixed.refused] == [("HS002", 6)]


def test_fixes_that_are_bad_together_are_applied_one_at_a_time():
    def lint(text, file):
        old = [
            Finding(file, n, 1, n, 4, "HS001", "name", "what", "error", "safe", None, (Edit("delete", span, ""),))
            for n, span in ((n, Span(n, 0, n, 3)) for n in (1, 2))
            if text.splitlines()[n - 1 : n] == ["old"]
        ]
        return old if text.strip() else [Finding(file, 1, 1, 1, 1, "HS002", "name", "empty", "error")]

    fixed = fix_source("old\nold\n", "a.py", lint)
    assert (fixed.text, len(fixed.applied)) == ("old\n", 1)
    assert [why for _, why in fixed.refused] == ["it would bring HS002 name in line 1: empty"]


def test_an_unsafe_fix_is_applied_on_demand_alone():
    lint = linter(("HS999", r"old\(\)", [("replace", "new()")]))
    assert fix_source("old()\n", "a.py", lint) == type(fix_source("", "a.py", lint))("old()\n")
    assert fix_source("old()\n", "a.py", lint, unsafe=True).text == "new()\n"


def test_one_fix_for_several_findings_counts_for_all():
    def lint(text, file):
        if "old" not in text:
            return []
        edits = (Edit("replace", span_of(text, "old", 0), "new"), Edit("replace", span_of(text, "old", 1), "new"))
        return [Finding(file, n, 1, n, 4, "HS001", "name", "what", "error", "safe", None, edits) for n in (1, 2)]

    fixed = fix_source("old\nold\n", "a.py", lint)
    assert (fixed.text, len(fixed.applied)) == ("new\nnew\n", 2)


def test_fixes_without_end_stop():
    def lint(text, file):
        edits = [(Edit("after", Span(1, 0, 1, 1), f"y{i}"),) for i in range(20 - text.count("y"))]
        return [Finding(file, 1, 1, 1, 2, "HS001", "name", "what", "error", "safe", None, made) for made in edits]

    fixed = fix_source("x\n", "a.py", lint)
    assert (len(fixed.applied), len(fixed.refused)) == (10, 10)
    assert {why for _, why in fixed.refused} == {"more than 10 rounds of fixes"}


def test_a_missing_libcst_names_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "libcst", None)
    monkeypatch.delitem(sys.modules, "halfstep.lint.fix_edits")
    with pytest.raises(HalfstepError, match=re.escape("Run: pip install 'halfstep[lint]'")):
        fix_source("old()\n", "a.py", linter(("HS001", "old", [("replace", "new")])))


# Real files.

TORCH = Path(torch.__file__).parent
SAMPLE = [path for path in sorted(TORCH.rglob("*.py")) if 2_000 < path.stat().st_size < 20_000]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_edits_of_real_files_leave_every_other_byte(seed, newline):
    chance = random.Random(seed)
    text = chance.choice(SAMPLE).read_text(encoding="utf-8").replace("\n", newline)
    script = Script(text, "a.py")
    lines = text.split(newline)
    starts = [sum(len(line) + len(newline) for line in lines[:number]) for number in range(len(lines))]
    splices, edits = [], []
    nodes = list(ast.walk(script.tree))
    chance.shuffle(nodes)
    for node in nodes:
        if not isinstance(node, ast.Call | ast.stmt) or len(edits) == 12:
            continue
        span = script.span(node)
        start, end = starts[span.line - 1] + span.column, starts[span.end_line - 1] + span.end_column
        if getattr(node, "decorator_list", []) or text.startswith("elif", start):
            continue
        action = chance.choice(["before", "after", "delete"]) if isinstance(node, ast.stmt) else "replace"
        splice = _spliced(action, text, start, end, newline)
        if splice is None or any(splice[0] <= other[1] and other[0] <= splice[1] for other in splices):
            continue
        if action == "delete" and (span.end_line == len(lines) or not _has_neighbour(node, nodes)):
            continue
        splices.append(splice)
        edits.append(Edit(action, span, "" if action == "delete" else "é(1)"))
    expected = text
    for start, end, new in sorted(splices, reverse=True):
        expected = expected[:start] + new + expected[end:]
    assert len(edits) > 5
    assert apply_edits(text, edits) == expected


def _spliced(action, text, start, end, newline):
    """Begin, end and new text of what an edit does to the text; None where a line holds more than the statement."""
    if action == "replace":
        return start, end, "é(1)"
    first, last = text.rfind("\n", 0, start) + 1, text.find(newline, end)
    indent = text[first:start]
    if indent.strip() or text[end:last].strip() or last < 0 or text[:first].rstrip(" \t").endswith("\\" + newline):
        return None
    if text[:first].rstrip().rpartition("\n")[2].lstrip().startswith("#"):  # below a comment
        return None
    if action == "before":
        return first, first, f"{indent}é(1){newline}"
    if action == "after":
        return end, last + len(newline), text[end:last] + f"{newline}{indent}é(1){newline}"
    blank = re.compile(rf"(?:[ \t]*{newline})*")
    if blank.match(text, last + len(newline)).end() > last + len(newline):
        # A blank line on both sides: the one above stays.
        return None
    return first, last + len(newline), ""


def _has_neighbour(node, nodes):
    for parent in nodes:
        for block in ("body", "orelse", "finalbody"):
            statements = getattr(parent, block, None)
            if isinstance(statements, list) and node in statements:
                return len(statements) > 1 and statements[-1] is not node
    return False
