"""Mutated, random and monstrous source neither breaks nor stalls the linter.

Work is counted in calls, so that a bound means the same on every machine: what grows must grow with the size of the
source, not with the number of ways through it. A stall that never ends is ended with a traceback.
"""

import ast
import faulthandler
import io
import json
import keyword
import random
import sys
import tokenize
import tracemalloc
import warnings
from pathlib import Path

import pytest
from reference.monsters import DOUBLING, GROWING, HEAD, MONSTERS, OTHER_VERSIONS, doubled

from halfstep.lint.document import lint_bytes, lint_text
from halfstep.lint.rules import all_rules

HERE = Path(__file__).parent
FAULTY = sorted(path for path in (HERE / "mistakes").glob("*.py") if not path.stem.endswith(".ok"))
SCRIPTS = sorted((HERE / "mistakes").glob("*.py")) + sorted((HERE / "mistakes" / "sound").glob("*.py"))
OWN = sorted((HERE.parent / "halfstep" / "lint").glob("*.py"))
STALLED_S = 120

WORDS = (
    "scaler optimizer opt loss model net backward step update unscale_ scale zero_grad grad autocast GradScaler amp"
    " torch half float bfloat16 float16 enabled clip_grad_norm_ get_scale state_dict load_state_dict item no_grad self"
    " scheduler i epoch loader x y parameters cuda device dtype finfo masked_fill log exp sum mean"
).split()


@pytest.fixture(autouse=True)
def _no_stall():
    faulthandler.dump_traceback_later(STALLED_S, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


def survive(text, file="source.py"):
    """What is found in ``text``. Fails where the linter breaks, or places a finding where nothing is."""
    findings = lint_text(text, file, all_rules())
    codes = {finding.code for finding in findings}
    assert "HS002" not in codes, findings[0].message
    if file.endswith(".py"):
        assert codes == {"HS000"} if not parses(text) else "HS000" not in codes
        lines = [line.removesuffix("\n") for line in io.StringIO(text, newline=None)] or [""]
        for finding in findings:
            assert 1 <= finding.line <= finding.end_line
            if finding.code != "HS000":
                assert 1 <= finding.column <= len(lines[finding.line - 1]) + 1
                assert 0 <= finding.end_column <= len(lines[finding.end_line - 1])
    return findings


def parses(text):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            ast.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return False
    return True


# Mutated


def mutate_statements(text, rng):
    """Deletes, repeats, turns around, moves and wraps statements."""
    tree = ast.parse(text)
    for _ in range(rng.randint(1, 4)):
        fields = [getattr(node, field, None) for node in ast.walk(tree) for field in ("body", "orelse", "finalbody")]
        bodies = [body for body in fields if isinstance(body, list) and body]
        body, other = rng.choice(bodies), rng.choice(bodies)
        at = rng.randrange(len(body))
        match rng.randrange(6):
            case 0:
                body[at] = ast.Pass()
            case 1:
                body.insert(rng.randrange(len(body) + 1), body[at])
            case 2:
                body.reverse()
            case 3:
                other.insert(rng.randrange(len(other) + 1), ast.parse(ast.unparse(body[at])).body[0])
            case 4:
                body[at] = ast.If(ast.Name(rng.choice(WORDS)), [body[at]], [])
            case _:
                body[at] = ast.While(ast.Constant(True), [body[at], ast.Continue()], [ast.Pass()])
        ast.fix_missing_locations(tree)
    return ast.unparse(tree)


def mutate_names(text, rng):
    """Names of the script and words of the trade take each other's places."""
    tree = ast.parse(text)
    found = sorted({node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} | set(WORDS))
    names = {old: rng.choice(found) for old in rng.sample(found, max(1, len(found) // 6))}
    for node in ast.walk(tree):
        for field in ("id", "attr", "arg", "name", "module"):
            value = getattr(node, field, None)
            if isinstance(value, str):
                setattr(node, field, names.get(value, value))
    return ast.unparse(tree)


def mutate_expressions(text, rng):
    """Calls and names take each other's places."""
    tree = ast.parse(text)
    values = [node for node in ast.walk(tree) if isinstance(node, ast.Call | ast.Name)]
    chosen = {id(node): rng.choice(values) for node in rng.sample(values, min(4, len(values)))}

    class Exchange(ast.NodeTransformer):
        def visit(self, node):
            if id(node) in chosen and isinstance(getattr(node, "ctx", ast.Load()), ast.Load):
                return ast.parse(ast.unparse(chosen[id(node)]), mode="eval").body
            return self.generic_visit(node)

    return ast.unparse(ast.fix_missing_locations(Exchange().visit(tree)))


def mutate_tokens(text, rng):
    """Deletes, repeats, exchanges and replaces tokens; little of what comes out is Python."""
    tokens = [(token.type, token.string) for token in tokenize.generate_tokens(io.StringIO(text).readline)]
    for _ in range(rng.randint(1, 3)):
        at, other = rng.randrange(len(tokens)), rng.randrange(len(tokens))
        match rng.randrange(4):
            case 0:
                del tokens[at]
            case 1:
                tokens.insert(at, tokens[other])
            case 2:
                tokens[at], tokens[other] = tokens[other], tokens[at]
            case _:
                tokens[at] = (tokenize.NAME, rng.choice([*WORDS, *keyword.kwlist]))
    try:
        return tokenize.untokenize(tokens)
    except IndexError:  # more indentation ends than begins
        return " ".join(string for _, string in tokens)


def mutate_text(text, rng):
    """Cuts, repeats and spoils pieces."""
    for _ in range(rng.randint(1, 3)):
        begin = rng.randrange(len(text) + 1)
        end = rng.choice([begin, min(len(text), begin + rng.randrange(1, 60))])
        piece = rng.choice(
            [text[begin:end] * 2, "\x0c", "\u2028", "\xe9\U0001f525", "\r", "\t", " ", "(", '"""', "\\\n"]
        )
        text = text[:begin] + piece + text[end:]
    return text


MUTATIONS = [mutate_statements, mutate_names, mutate_expressions, mutate_tokens, mutate_text]


@pytest.mark.parametrize("mutate", MUTATIONS)
def test_mutated_scripts(mutate):
    rng = random.Random(mutate.__name__)
    sources = [mutate(path.read_text(encoding="utf-8"), rng) for path in rng.sample(SCRIPTS, 110)]
    assert sum(parses(source) for source in sources) > 2  # not all of them die at the parser
    for source in sources:
        survive(source)


@pytest.mark.parametrize("mutate", MUTATIONS)
def test_mutated_sources_of_our_own(mutate):
    rng = random.Random(mutate.__name__)
    for path in rng.sample(OWN, 4):
        survive(mutate(mutate_names(path.read_text(encoding="utf-8"), rng), rng))


def test_one_script_inside_another():
    rng = random.Random(5)
    for _ in range(25):
        outer, inner = (ast.parse(path.read_text(encoding="utf-8")) for path in rng.sample(SCRIPTS, 2))
        holders = [node for node in ast.walk(outer) if isinstance(node, ast.FunctionDef | ast.For | ast.With)]
        rng.choice(holders or [outer]).body[:0] = inner.body
        survive(ast.unparse(ast.fix_missing_locations(outer)))


def test_mutated_notebooks_and_configurations():
    rng = random.Random(3)
    for path in sorted((HERE / "mistakes").glob("*.ipynb")) + sorted((HERE / "mistakes").glob("*.json")):
        whole = path.read_text(encoding="utf-8")
        for _ in range(8):
            survive(mutate_text(whole, rng), path.name)
            content = json.loads(whole)
            spoil(content, rng)
            survive(json.dumps(content), path.name)


def spoil(content, rng):
    """Puts a wrong value somewhere into a JSON tree."""
    while True:
        key = rng.choice(list(content) if isinstance(content, dict) else range(len(content)))
        if not isinstance(content[key], dict | list) or not content[key] or rng.random() < 0.3:
            wrong = [None, True, -1, 1e400, "", "%%bash", [], {}, ["\n", "x = ("], {"enabled": True}, "auto"]
            content[key] = rng.choice(wrong)
            return
        content = content[key]


# Random


def test_random_bytes():
    rng = random.Random(11)
    for size in (0, 1, 2, 7, 60, 400, 3000):
        for name in ("source.py", "book.ipynb", "config.json"):
            findings = lint_bytes(rng.randbytes(size), name, all_rules())
            assert {finding.code for finding in findings} <= {"HS000"}


def test_random_tokens():
    rng = random.Random(13)
    signs = [*"()[]{}:,.=*@;+-/%#'", '"', "\n", "\n    ", "==", "->", ":=", "**", "0", "1e-8", "-1e9", "f'"]
    for _ in range(300):
        survive(" ".join(rng.choice([*WORDS, *keyword.kwlist, *signs]) for _ in range(rng.randrange(40))))


def test_random_programs():
    rng = random.Random(17)
    sources = ["import torch\nfrom torch.amp import GradScaler, autocast\n" + program(rng, 0) for _ in range(150)]
    assert sum(parses(source) for source in sources) > 60
    for source in sources:
        survive(source)


SIMPLE = ("{0} = {2}", "{2}", "{0}.{1} = {2}", "{0}, {1} = {2}, {0}", "{0} += {2}", "assert {2}", "del {0}", "pass")
COMPOUND = (
    "if {2}:",
    "for {0} in {2}:",
    "while {2}:",
    "with {2} as {0}:",
    "def {0}(self, {1}={2}):",
    "class {0}({1}):",
    "async def {0}(*{1}):",
    "try:",
)
EXPRESSIONS = (
    "{2}.{0}",
    "{2}.{0}()",
    "{2}.{0}({3})",
    "{0}({2}, enabled={3})",
    "({2} + {3})",
    "({2} @ {3})",
    "[{2}, {3}]",
    "({2} if {3} else None)",
    "{{'{0}': {2}}}",
    "(lambda {0}: {2})",
    "[{0} for {0} in {2}]",
    "{2}[{3}]",
    "(not {2})",
)


def program(rng, depth):
    """Random statements over the words of the trade."""
    indent, lines = "    " * depth, []
    for _ in range(rng.randint(1, 4)):
        head = rng.choice(SIMPLE if depth > 4 or rng.random() < 0.6 else COMPOUND)
        lines.append(indent + head.format(*rng.sample(WORDS, 2), expression(rng, 0)))
        if head.endswith(":"):
            lines.append(program(rng, depth + 1))
        if head == "try:":
            lines += [f"{indent}finally:", program(rng, depth + 1)]
    return "\n".join(lines)


def expression(rng, depth):
    if depth > 3 or rng.random() < 0.25:
        return rng.choice([rng.choice(WORDS), "1e-8", "-1e9", "0", "torch.float16", "'cuda'", "None"])
    inner = expression(rng, depth + 1), expression(rng, depth + 1)
    return rng.choice(EXPRESSIONS).format(*rng.sample(WORDS, 2), *inner)


# Monstrous


@pytest.mark.parametrize("name", MONSTERS)
def test_monsters(name):
    survive(MONSTERS[name])


@pytest.mark.parametrize("text", OTHER_VERSIONS)
def test_syntax_of_other_versions(text):
    survive(HEAD + text)


@pytest.mark.parametrize("name", GROWING)
def test_work_grows_with_the_source_not_with_its_paths(name):
    num_calls(GROWING[name](1))  # loads what is loaded once
    few, more = num_calls(GROWING[name](6)), num_calls(GROWING[name](18))
    assert more < 20 * few


def num_calls(text):
    """How often linting ``text`` calls anything, Python or C."""
    count = 0

    def tick(_frame, event, _argument):
        nonlocal count
        count += event in {"call", "c_call"}

    sys.setprofile(tick)
    try:
        lint_text(text, "source.py", all_rules())
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("name", DOUBLING)
def test_work_and_memory_grow_with_the_source_not_with_its_values(name):
    few, more = doubled(name, 5), doubled(name, 16)
    peak_bytes(few)  # loads what is loaded once
    assert num_calls(more) < 5 * num_calls(few)
    assert peak_bytes(more) < 5 * peak_bytes(few)


def peak_bytes(text):
    tracemalloc.start()
    try:
        lint_text(text, "source.py", all_rules())
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("separator", ["\x0b", "\x0c", "\x1c", "\x85", "\u2028"])
def test_what_is_no_line_end_to_python_moves_no_finding(separator):
    """str.splitlines() ends a line there, the parser does not."""
    prefix = f"r'''\xe9{separator * 40}'''; "
    num_found = 0
    for path in FAULTY[::5]:
        text = path.read_text(encoding="utf-8")
        plain = [(found.line + 1, found.column, found.code) for found in survive(text)]
        assert [(found.line, found.column, found.code) for found in survive(prefix + "\n" + text)] == plain, path.name
        num_found += len(plain)
    assert num_found > 5
