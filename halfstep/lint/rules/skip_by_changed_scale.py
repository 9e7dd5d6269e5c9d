"""HS123: a skipped step is told from a scale that is another than before, which growth makes too."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from halfstep.lint.finding import Edit
from halfstep.lint.names import last_name
from halfstep.lint.rule import Problem, Rule
from halfstep.lint.script import Script
from halfstep.lint.values import Scale

_LOGS = frozenset({"print", "log", "info", "debug", "warning", "warn", "error", "add_scalar", "log_metric", "append"})
_SKIP = re.compile(r"skip|over_?flow|inf|nan|applied|stepped|took|taken|success|ok\b", re.I)


def check(script: Script) -> Iterator[Problem]:
    for event in script.sites:
        node = event.node
        if (
            event.what != "compare"
            or event.name not in {"Eq", "NotEq", "Is", "IsNot"}
            or not isinstance(node, ast.Compare)
        ):
            continue
        first, second = event.args[:2]
        if not (isinstance(first, Scale) and isinstance(second, Scale)) or first.scaler != second.scaler:
            continue
        if first.updates == second.updates or _only_logs(script, node):
            continue
        is_later_first = first.updates > second.updates
        is_equal = event.name in {"Eq", "Is"}
        operator = (">=" if is_equal else "<") if is_later_first else ("<=" if is_equal else ">")
        left, right = script.source(node.left), script.source(node.comparators[0])
        after, before = (left, right) if is_later_first else (right, left)
        yield Problem(
            node,
            f"`{after}` is another than `{before}` after a growth of the scale too, so a good step is taken for a "
            f"skipped one: a skip is `{after} < {before}`",
            (Edit("replace", script.span(node), f"{left} {operator} {right}"),),
            "safe" if _decides_about_a_skip(script, node) else "unsafe",
        )


def _only_logs(script: Script, node: ast.Compare) -> bool:
    """Whether the comparison only decides that a change of the scale is written somewhere."""
    parent = script.parents[node]
    if not isinstance(parent, ast.If) or parent.orelse:
        return False
    return all(
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Call)
        and last_name(statement.value.func) in _LOGS
        for statement in parent.body
    )


def _decides_about_a_skip(script: Script, node: ast.Compare) -> bool:
    """Whether the names around it, or a schedule that it decides about, say that it asks for a skip."""
    statement = script.statement(node)
    if isinstance(statement, ast.If):
        return any(
            isinstance(inner, ast.Attribute) and inner.attr == "step"
            for part in statement.body
            for inner in ast.walk(part)
        )
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    return any(target is not None and _SKIP.search(ast.unparse(target)) for target in targets)


RULE = Rule(
    code="HS123",
    name="skip-by-changed-scale",
    severity="error",
    summary="A skipped step is told from a changed scale, and a growth of the scale changes it too.",
    why="""
After a skipped step the scale is lower than before. After `growth_interval` good steps, 2,000 by default, it is
higher: the step was applied, and `get_scale() != before` takes it for a skipped one. Measured with torch 2.13: 10,000
good steps count as 9,995 applied and 5 skipped, and with `growth_interval=5` every fifth step is lost to the
schedule.

Compare with `<`: `skipped = scaler.get_scale() < before`. (A scale that is at 0 already cannot fall further.)
""",
    bad=(
        """\
import torch
from torch import nn


class Runner:
    def __init__(self, net):
        self.net = net.cuda()
        self.optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1000)
        self.scaler = torch.amp.GradScaler("cuda")

    def step(self, loss):
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        before = self.scaler.get_scale()
        self.scaler.update()
        skipped = self.scaler.get_scale() != before  # HS123
        if not skipped:
            self.schedule.step()
""",
        """\
import torch
from torch import nn


def train(net, loader, opt, decay, gs):
    for x, y in loader:
        opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            out = net(x)
        gs.scale(nn.functional.mse_loss(out.float(), y)).backward()
        scale = gs.get_scale()
        gs.step(opt)
        gs.update()
        if scale == gs.get_scale():  # HS123
            decay.step()
""",
        """\
import torch


def train(losses, opt, gs):
    num_lost = 0
    for loss in losses:
        opt.zero_grad()
        gs.scale(loss).backward()
        before = gs.get_scale()
        gs.step(opt)
        gs.update()
        num_lost += gs.get_scale() != before  # HS123
    return num_lost
""",
    ),
    good=(
        """\
import torch
from torch import nn


class Runner:
    def __init__(self, net):
        self.net = net.cuda()
        self.optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1000)
        self.scaler = torch.amp.GradScaler("cuda")

    def step(self, loss):
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        before = self.scaler.get_scale()
        self.scaler.update()
        skipped = self.scaler.get_scale() < before
        if not skipped:
            self.schedule.step()
""",
        """\
import torch
from torch import nn


def train(net, loader, opt, decay, gs):
    for x, y in loader:
        opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            out = net(x)
        gs.scale(nn.functional.mse_loss(out.float(), y)).backward()
        scale = gs.get_scale()
        gs.step(opt)
        gs.update()
        if scale <= gs.get_scale():
            decay.step()
""",
        """\
import torch
from torch import nn


def train(net, loader, opt, gs, log):
    for x, y in loader:
        opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            out = net(x)
        gs.scale(nn.functional.mse_loss(out.float(), y)).backward()
        scale = gs.get_scale()
        gs.step(opt)
        gs.update()
        if gs.get_scale() != scale:
            log.info("the scale has changed")
""",
    ),
    check=check,
    fix="unsafe",
    fix_note="It compares with `<` or `>=`. Where a schedule or the name of the result says that a skip is asked for, "
    "the fix is safe; elsewhere a growth may have been meant as well.",
)
