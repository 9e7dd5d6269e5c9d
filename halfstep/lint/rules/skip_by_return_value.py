"""HS124: a skipped step is told from what ``scaler.step`` returns, or from hooks of a fused optimizer."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.lint.event import Event
from halfstep.lint.rule import Problem, Rule
from halfstep.lint.script import Script
from halfstep.lint.values import Const, Object

_HOOKS = frozenset({"optimizer.register_step_post_hook", "optimizer.register_step_pre_hook"})


def check(script: Script) -> Iterator[Problem]:
    steps = [event for event in script.sites if event.what == "scaler.step"]
    for event in steps:
        for node in _tests(script, event):
            yield Problem(
                node,
                f"`{script.source(event.node)}` returns None for an applied step as well, since the optimizer returns "
                "nothing: compare the scale before and after `update()` with `<`",
            )
    stepped = {event.args[0] for event in steps if event.args and isinstance(event.args[0], Object)}
    for event in script.sites:
        optimizer = event.receiver
        if event.what not in _HOOKS or not isinstance(optimizer, Object) or optimizer not in stepped:
            continue
        if optimizer.argument("fused") == Const(True):
            yield Problem(
                event.node,
                "the hooks of a fused optimizer run for a skipped step too, since its kernel does the skipping: "
                "compare the scale before and after `update()` with `<`",
            )


def _tests(script: Script, event: Event) -> Iterator[ast.AST]:
    """Where the returned value of a ``scaler.step`` without a closure decides something."""
    node = event.node
    if len(event.args) != 1 or event.keywords or not isinstance(node, ast.Call):
        return
    tested = _tested(script, node)
    if tested is not None:
        yield tested
        return
    statement = script.parents[node]
    if not (isinstance(statement, ast.Assign) and len(statement.targets) == 1):
        return
    name, function = ast.unparse(statement.targets[0]), script.function(node)
    for use in script.walk(ast.Name, ast.Attribute):
        if isinstance(getattr(use, "ctx", None), ast.Load) and ast.unparse(use) == name:
            tested = _tested(script, use)
            if tested is not None and script.function(use) is function:
                yield tested


def _tested(script: Script, node: ast.AST) -> ast.AST | None:
    """The condition on ``node``: a comparison with None, or its truth."""
    parent = script.parents[node]
    if isinstance(parent, ast.Compare):
        others = [part for part in (parent.left, *parent.comparators) if part is not node]
        return parent if all(isinstance(part, ast.Constant) and part.value is None for part in others) else None
    if isinstance(parent, ast.UnaryOp) and isinstance(parent.op, ast.Not):
        return parent
    return node if isinstance(parent, ast.If | ast.IfExp | ast.While) and parent.test is node else None


RULE = Rule(
    code="HS124",
    name="skip-by-return-value",
    severity="warning",
    summary="A skipped step is told from what scaler.step returns, or from hooks of a fused optimizer.",
    why="""
`scaler.step(optimizer)` returns what `optimizer.step()` returns, and None when it skips. Without a closure every
optimizer of torch returns None: measured with torch 2.13, SGD, AdamW and AdamW with `fused=True` give None for 1
applied step and for 1 skipped step, so every step counts as skipped.

A fused optimizer takes the overflow flag itself. Its `step` is called and its hooks run for a skipped step too: the
kernel then leaves all weights as they are. With `fused=False` they do not run. Compare the scale instead:
`skipped = scaler.get_scale() < before`, read before `step` and after `update`.
""",
    bad=(
        """\
import torch
from torch import nn


def train(net, loader, opt, scaler):
    num_skipped = 0
    for x, y in loader:
        opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            out = net(x)
        scaler.scale(nn.functional.mse_loss(out.float(), y)).backward()
        result = scaler.step(opt)
        scaler.update()
        if result is None:  # HS124
            num_skipped += 1
    return num_skipped
""",
        """\
import torch
from torch import nn


class Counted:
    def __init__(self, net):
        self.net, self.num_applied = net.cuda(), 0
        self.opt = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)
        self.opt.register_step_post_hook(self.count)  # HS124
        self.scaler = torch.amp.GradScaler("cuda")

    def count(self, *_):
        self.num_applied += 1

    def step(self, x, y):
        self.opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            out = self.net(x)
        self.scaler.scale(nn.functional.mse_loss(out.float(), y)).backward()
        self.scaler.step(self.opt)
        self.scaler.update()
""",
    ),
    good=(
        """\
import torch
from torch import nn


def train(net, loader, opt, scaler):
    num_skipped = 0
    for x, y in loader:
        opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            out = net(x)
        scaler.scale(nn.functional.mse_loss(out.float(), y)).backward()
        before = scaler.get_scale()
        scaler.step(opt)
        scaler.update()
        if scaler.get_scale() < before:
            num_skipped += 1
    return num_skipped
""",
        """\
import torch
from torch import nn


def train(net, loader, opt, scaler):
    num_skipped = 0
    for x, y in loader:
        opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            out = net(x)
        scaler.scale(nn.functional.mse_loss(out.float(), y)).backward()
        before = scaler.get_scale()
        scaler.step(opt)
        scaler.update()
        num_skipped += scaler.get_scale() < before
    return num_skipped
""",
        """\
import torch
from torch import nn


class Counted:
    def __init__(self, net):
        self.net, self.num_applied = net.cuda(), 0
        self.opt = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=False)
        self.opt.register_step_post_hook(self.count)
        self.scaler = torch.amp.GradScaler("cuda")

    def count(self, *_):
        self.num_applied += 1

    def step(self, x, y):
        self.opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            out = self.net(x)
        self.scaler.scale(nn.functional.mse_loss(out.float(), y)).backward()
        self.scaler.step(self.opt)
        self.scaler.update()
""",
    ),
    check=check,
)
