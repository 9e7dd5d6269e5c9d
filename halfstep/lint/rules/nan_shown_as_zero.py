"""HS161: a loss that is not finite is logged as zero."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from halfstep.lint.event import Event
from halfstep.lint.names import last_name
from halfstep.lint.rule import Problem, Rule
from halfstep.lint.script import Script
from halfstep.lint.values import Const, Tensor, Value

_TESTS = {"isfinite": True, "isnan": False, "isinf": False}
"""What the truth of a test says: True that the loss is finite."""
_ZEROS = frozenset({"zeros", "zeros_like", "new_zeros"})
_LOSS = re.compile(r"loss", re.I)


def check(script: Script) -> Iterator[Problem]:
    for event in script.sites:
        last = event.name.rpartition(".")[2]
        if event.what != "call" and not event.what.startswith("tensor."):
            continue
        if last in _TESTS:
            value, node = _asked(event)
            if node is not None and _is_loss(script, value, node):
                for place in _replaced(script, event.node, script.source(node), _TESTS[last], _is_read(value)):
                    yield Problem(place, _message(script.source(node)))
        elif last in {"nan_to_num", "nan_to_num_"}:
            value, node = _asked(event)
            position = 1 if event.what == "call" else 0
            if event.argument("nan", position) not in (None, Const(0), Const(0.0)) or node is None:
                continue
            if _is_read(value) and _is_loss(script, value, node):
                yield Problem(event.node, _message(script.source(node)))


def _message(name: str) -> str:
    return f"a `{name}` that is not finite is counted as 0, the best loss there is: count such steps instead"


def _asked(event: Event) -> tuple[Value | None, ast.expr | None]:
    """What is tested or replaced, and its expression."""
    node = event.node
    if not isinstance(node, ast.Call):
        return None, None
    if event.what == "call":
        return (event.args[0], node.args[0]) if event.args and node.args else (None, None)
    return event.receiver, node.func.value if isinstance(node.func, ast.Attribute) else None


def _is_loss(script: Script, value: Value | None, node: ast.expr) -> bool:
    if isinstance(value, Tensor) and value.tags & {"gradient", "parameter", "gradient norm"}:
        return False
    return (isinstance(value, Tensor) and "loss" in value.tags) or bool(_LOSS.search(script.source(node)))


def _is_read(value: Value | None) -> bool:
    """Whether it takes no part in the backward pass any more."""
    return isinstance(value, Tensor) and bool(value.tags & {"detached", "number"})


def _replaced(script: Script, node: ast.AST, name: str, finite: bool, is_read: bool) -> Iterator[ast.AST]:
    """Where the test at ``node`` puts a zero in the place of ``name``."""
    child, parent = node, script.parents[node]
    while isinstance(parent, ast.UnaryOp | ast.Attribute) or (isinstance(parent, ast.Call) and child is parent.func):
        if isinstance(parent, ast.UnaryOp) and isinstance(parent.op, ast.Not | ast.Invert):
            finite = not finite
        child, parent = parent, script.parents[parent]
    if isinstance(parent, ast.IfExp) and parent.test is child:
        other, kept = (parent.orelse, parent.body) if finite else (parent.body, parent.orelse)
        if _is_zero(other, is_read) and not _is_zero(kept, True):
            yield parent
    elif isinstance(parent, ast.If) and parent.test is child:
        for statement in parent.orelse if finite else parent.body:
            names = [ast.unparse(target) for target in getattr(statement, "targets", ())]
            if isinstance(statement, ast.Assign) and name in names and _is_zero(statement.value, is_read):
                yield statement
    elif isinstance(parent, ast.Call) and getattr(parent.func, "attr", "") == "where" and is_read:
        others = parent.args[2 if finite else 1 :][:1] if len(parent.args) == 3 and parent.args[0] is child else []
        yield from (parent for other in others if _is_zero(other, True))


def _is_zero(node: ast.expr, or_tensor: bool) -> bool:
    """Whether an expression is the number 0, or a tensor of it."""
    if isinstance(node, ast.Constant):
        return node.value == 0 and not isinstance(node.value, bool)
    if not isinstance(node, ast.Call) or not or_tensor:
        return False
    name = last_name(node.func)
    return name in _ZEROS or (name in {"tensor", "float"} and bool(node.args) and _is_zero(node.args[0], False))


RULE = Rule(
    code="HS161",
    name="nan-shown-as-zero",
    severity="warning",
    summary="A loss that is not finite is logged as zero.",
    why="""
When activations pass 65504 in fp16, the loss becomes Inf or NaN and stays so. A log that counts it as 0 then shows
the best loss of the whole run instead of an alarm: in a small run whose weights were spoilt after step 10, the mean
went from 2.11 to 0.00 while the scaler skipped every step and its scale fell from 256 to 0.0002.

Count the losses that are not finite and show their number beside the mean of the others, or let the NaN stand.
""",
    bad=(
        """\
import math


class LossLog:
    def __init__(self):
        self.total, self.count = 0.0, 0

    def add(self, loss):
        self.total += loss if math.isfinite(loss) else 0.0  # HS161
        self.count += 1


def backward(loss, scaler, log):
    scaler.scale(loss).backward()
    log.add(loss.item())
""",
        """\
import torch
from torch import nn


def train(net, loader, opt):
    total = torch.zeros((), device="cuda")
    for x, y in loader:
        opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            out = net(x.cuda())
        loss = nn.functional.cross_entropy(out.float(), y.cuda())
        loss.backward()
        opt.step()
        total += torch.nan_to_num(loss.detach())  # HS161
    return (total / len(loader)).item()
""",
        """\
import torch
from torch import nn


def validate(net, batches):
    losses = []
    for x, y in batches:
        with torch.no_grad(), torch.autocast("cuda", dtype=torch.float16):
            out = net(x)
        value = nn.functional.mse_loss(out.float(), y).item()
        if value != value or not torch.isfinite(out).all():
            print("not finite")
        losses.append(value)
    mean = torch.tensor(losses).mean().item()
    val_loss = torch.tensor(losses).sum().item()
    if not torch.isfinite(torch.tensor(val_loss)):
        mean = float("nan")
    if torch.isnan(val_loss):
        val_loss = 0.0  # HS161
    return mean, val_loss
""",
    ),
    good=(
        """\
import math


class LossLog:
    def __init__(self):
        self.total, self.count, self.num_bad = 0.0, 0, 0

    def add(self, loss):
        if math.isfinite(loss):
            self.total += loss
            self.count += 1
        else:
            self.num_bad += 1


def backward(loss, scaler, log):
    scaler.scale(loss).backward()
    log.add(loss.item())
""",
        """\
import torch
from torch import nn


def train(net, loader, opt, max_norm):
    for x, y in loader:
        opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            out = net(x.cuda())
        nn.functional.cross_entropy(out.float(), y.cuda()).backward()
        norm = nn.utils.clip_grad_norm_(net.parameters(), max_norm)
        shown = norm if torch.isfinite(norm) else 0.0
        if torch.isfinite(norm):
            opt.step()
    return shown
""",
    ),
    check=check,
)
