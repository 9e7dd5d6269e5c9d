"""A plain training loop rewritten to a Stepper, where every step of it is understood.

The loop keeps its shape: ``with autocast(...)`` becomes ``with stepper.forward()``, and what follows the loss, from
``scaler.scale(loss).backward()`` to ``zero_grad``, becomes ``stepper.backward(loss)``. It trains as before: the same
weights to the bit in fp32, to the rounding of one division where gradients are clipped or accumulated, and with CUDA's
lists of operations in 16 bit. On purpose four things are different: a step whose gradient is not finite is skipped in
every format, the scheduler waits for a step that was applied, BatchNorm's statistics of a skipped one are put back, and
a short window is divided by what it holds.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from halfstep.lint.finding import Edit, Span
from halfstep.lint.fix import edited
from halfstep.lint.loop_parts import (
    FORWARD,
    REGIONS,
    SCALERS,
    Loop,
    NotUnderstood,
    called_on,
    find_parts,
    is_wrapped,
)
from halfstep.lint.loop_policy import policy_of
from halfstep.lint.loop_shape import LoopShape, read_loop
from halfstep.lint.names import canonical
from halfstep.lint.script import Script

SUPERFLUOUS = {*REGIONS, *SCALERS, "torch.cuda.amp", "torch.cpu.amp", "torch.amp", "torch.nn.utils.clip_grad_norm_"}
"""Imports that go with their last use."""


@dataclass(frozen=True)
class Conversion:
    """A text after its loops were rewritten. refused: for each training loop that stays, a line of it, and why."""

    text: str
    num_converted: int = 0
    refused: tuple[tuple[int, str], ...] = ()


def to_halfstep(text: str, file: str) -> Conversion:
    """Rewrite each training loop in ``text`` that is understood. A text that Python cannot parse stays as it is.

    Raises HalfstepError when libcst, which edits, is not installed.
    """
    num_converted = 0
    while True:
        try:
            script = Script(text, file)
        except (SyntaxError, ValueError, RecursionError):
            return Conversion(text, num_converted)
        refused = []
        for place in _places(script):
            try:
                if not isinstance(place, Loop):
                    raise NotUnderstood(place, "the backward pass is not in a loop of its own function")
                text = _converted(script, place)
                num_converted += 1
                break
            except NotUnderstood as error:
                line = getattr(error.node, "lineno", place.lineno)
                refused.append((line, f"the training loop stays as it is: {error.why}"))
        else:
            return Conversion(text, num_converted, tuple(dict.fromkeys(refused)))


def _places(script: Script) -> Iterator[Loop | ast.Call]:
    """The innermost loop around each backward pass of a loss, or the call itself where there is none."""
    seen: set[ast.AST] = set()
    for call in ast.walk(script.tree):
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "backward"):
            continue
        if called_on(call, ("stepper",), "backward"):
            continue
        place: Loop | ast.Call = call
        for around in script.ancestors(call):
            if isinstance(around, Loop):
                place = around
            if isinstance(around, Loop | ast.FunctionDef | ast.AsyncFunctionDef):
                break
        if place not in seen:
            seen.add(place)
            yield place


def _converted(script: Script, loop: Loop) -> str:
    parts = find_parts(script, loop)
    shape = read_loop(script, loop, parts)
    policy = policy_of(parts, shape.region)
    if shape.region is None:
        wrapped = Script(_wrapped(script, shape), script.file)
        loops = [node for node in ast.walk(wrapped.tree) if isinstance(node, Loop) and node.lineno == loop.lineno]
        return _converted(wrapped, loops[0])
    text, why = edited(script.text, list(_edits(script, shape, policy)))
    if why is not None:
        raise NotUnderstood(loop, why)
    return _without_imports(script, text)


def _wrapped(script: Script, shape: LoopShape) -> str:
    """The text with the forward pass of a loop without a region in ``with stepper.forward():``."""
    lines = re.findall(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+", script.text)
    first, last = shape.forward[0], shape.forward[-1]
    for statement in shape.forward:
        span = script.span(statement)
        before, after = lines[span.line - 1][: span.column], lines[span.end_line - 1][span.end_column :].strip()
        if before.strip() or (after and not after.startswith("#")):
            raise NotUnderstood(statement, "it shares a line with another statement")
        for node in ast.walk(statement):
            if isinstance(node, ast.Constant | ast.JoinedStr) and node.lineno != node.end_lineno:
                raise NotUnderstood(node, "a string over several lines would have to be indented")
    indent = lines[first.lineno - 1][: script.span(first).column]
    loop_line = lines[shape.loop.lineno - 1]
    unit = indent[len(loop_line) - len(loop_line.lstrip()) :]
    newline = lines[first.lineno - 1][len(lines[first.lineno - 1].rstrip("\r\n")) :] or "\n"
    end = last.end_lineno or last.lineno
    inside = [f"{unit}{line}" if line.strip() else line for line in lines[first.lineno - 1 : end]]
    before, after = lines[: first.lineno - 1], lines[end:]
    return "".join([*before, f"{indent}with {FORWARD}:{newline}", *inside, *after])


def _edits(script: Script, shape: LoopShape, policy: str) -> Iterator[Edit]:
    parts, region = shape.parts, shape.region
    assert region is not None
    assert shape.backward is not None
    yield Edit("import", Span(1, 0, 1, 0), "import halfstep")
    yield from _creation(script, shape, policy)
    if not is_wrapped(region):
        yield Edit("replace", script.span(region.items[0].context_expr), FORWARD)
    report = "report = " if shape.left_in_window else ""
    yield Edit("replace", script.span(shape.backward), f"{report}stepper.backward({shape.loss})")
    if shape.window is not None:
        if shape.left_in_window:
            yield Edit("replace", script.span(shape.window.test), "report is not None")
        else:
            yield Edit("delete", script.span(shape.window))
    for statement in shape.removed:
        if shape.left_in_window or shape.window is None or statement not in shape.window.body:
            yield Edit("delete", script.span(statement))
    if shape.ends_short:
        yield Edit("after", script.span(shape.loop), "stepper.flush()")
    inside = set(ast.walk(shape.loop))
    for node in ast.walk(parts.scope):
        if isinstance(node, ast.Expr) and node not in inside and isinstance(node.value, ast.Call):
            if called_on(node.value, (parts.optimizer,), "zero_grad"):
                yield Edit("delete", script.span(node))
        elif (
            isinstance(node, ast.Name)
            and node.id == parts.scaler
            and isinstance(node.ctx, ast.Load)
            and node not in inside
        ):
            yield Edit("replace", script.span(node), "stepper")


def _creation(script: Script, shape: LoopShape, policy: str) -> Iterator[Edit]:
    """The Stepper, made where the last thing that it needs is made; it takes the place of a scaler."""
    parts = shape.parts
    arguments = [parts.model, parts.optimizer, policy]
    for name, value in (
        ("accumulate", shape.accumulate),
        ("max_norm", shape.max_norm),
        ("scheduler", parts.scheduler),
    ):
        arguments += [f"{name}={value}"] if value is not None else []
    code = f"stepper = halfstep.Stepper({', '.join(arguments)})"
    creation, scaler = parts.creation, parts.definitions.get("scaler")
    if creation is scaler:
        yield Edit("replace", script.span(creation), code)
        return
    yield Edit("after", script.span(creation), code)
    if scaler is not None:
        yield Edit("delete", script.span(scaler))


def _without_imports(before: Script, text: str) -> str:
    """``text`` without the imports of autocast, GradScaler and so on that were used in ``before`` and no longer are."""
    after = Script(text, before.file)
    used_before, used = ({n.id for n in s.walk(ast.Name) if isinstance(n, ast.Name)} for s in (before, after))
    edits = []
    for statement in after.walk(ast.ImportFrom, ast.Import):
        assert isinstance(statement, ast.ImportFrom | ast.Import)
        home = f"{statement.module}." if isinstance(statement, ast.ImportFrom) else ""
        gone = [
            alias
            for alias in statement.names
            if canonical(home + alias.name) in SUPERFLUOUS
            and (local := alias.asname or alias.name) in used_before
            and local not in used
        ]
        left = [alias for alias in statement.names if alias not in gone]
        if gone and left and "#" not in after.source(statement):
            names = ", ".join(f"{a.name} as {a.asname}" if a.asname else a.name for a in left)
            start = f"from {statement.module} import" if isinstance(statement, ast.ImportFrom) else "import"
            edits.append(Edit("replace", after.span(statement), f"{start} {names}"))
        elif gone and not left:
            edits.append(Edit("delete", after.span(statement)))
    return edited(text, edits)[0] if edits else text
