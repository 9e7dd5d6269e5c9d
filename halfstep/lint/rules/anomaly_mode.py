"""HS203: autograd's anomaly mode is left on in a script that scales its loss."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.lint.event import Event
from halfstep.lint.finding import Edit
from halfstep.lint.rule import Problem, Rule
from halfstep.lint.scaling import used_scaler
from halfstep.lint.script import Script
from halfstep.lint.values import Const, Object


def check(script: Script) -> Iterator[Problem]:
    if not any(used_scaler(event) is not None for event in script.sites):
        return
    for event in script.sites:
        if not _turns_on(event) or _depends(script, event.node):
            continue
        statement = script.statement(event.node)
        edits = (Edit("delete", script.span(statement)),) if isinstance(statement, ast.Expr) else ()
        yield Problem(
            event.node,
            "anomaly mode stops at the first NaN that the scaler would have skipped, and makes every step slower: "
            "leave it out once the fault is found",
            edits,
            "unsafe" if edits else None,
        )


def _turns_on(event: Event) -> bool:
    made = event.result
    if event.what != "make" or not isinstance(made, Object) or made.kind != "anomaly":
        return False
    return made.type.endswith("detect_anomaly") and (
        not made.type.endswith("set_detect_anomaly") or made.argument("mode", 0) == Const(True)
    )


def _depends(script: Script, node: ast.AST) -> bool:
    """Whether a switch decides about it."""
    for around in script.ancestors(node):
        if isinstance(around, ast.If | ast.IfExp):
            return "__name__" not in ast.unparse(around.test)
        if isinstance(around, ast.FunctionDef | ast.AsyncFunctionDef):
            break
    return False


RULE = Rule(
    code="HS203",
    name="anomaly-mode",
    severity="warning",
    summary="Autograd's anomaly mode is left on in a script that scales its loss.",
    why="""
A scaler finds its scale by going too high now and then: the gradients overflow, the step is skipped and the scale is
halved. Anomaly mode raises `RuntimeError: Function 'AddmmBackward0' returned nan values` at exactly such a step, so
that a healthy run stops. It also keeps a stack trace for every operation and tests each gradient for NaN, which reads
one number from the device for each: measured with torch 2.13 on a small CPU model, a step takes 3 to 4 times as long.

Turn it on to find a fault, behind a switch, and with `enabled=False` for the scaler.
""",
    bad=(
        """\
import torch
from torch import nn

torch.autograd.set_detect_anomaly(True)  # HS203


def train(net, loader, opt, scaler):
    for x, y in loader:
        opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            out = net(x)
        scaler.scale(nn.functional.mse_loss(out.float(), y)).backward()
        scaler.step(opt)
        scaler.update()
""",
        """\
import torch
from torch import nn


class Job:
    def __init__(self, net):
        self.net = net.cuda()
        self.opt = torch.optim.Adam(net.parameters(), lr=2e-4)
        self.scaler = torch.amp.GradScaler("cuda")

    def step(self, x, y):
        self.opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            out = self.net(x)
        with torch.autograd.detect_anomaly():  # HS203
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
    for x, y in loader:
        opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            out = net(x)
        scaler.scale(nn.functional.mse_loss(out.float(), y)).backward()
        scaler.step(opt)
        scaler.update()
""",
        """\
import torch
from torch import nn


def train(net, loader, opt, scaler, debug=False):
    if debug:
        torch.autograd.set_detect_anomaly(True)
    for x, y in loader:
        opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            out = net(x)
        scaler.scale(nn.functional.mse_loss(out.float(), y)).backward()
        scaler.step(opt)
        scaler.update()
""",
        """\
import torch
from torch import nn

torch.autograd.set_detect_anomaly(True)


def train(net, loader, opt):
    for x, y in loader:
        opt.zero_grad()
        nn.functional.mse_loss(net(x), y).backward()
        opt.step()
""",
    ),
    check=check,
    fix="unsafe",
    fix_note="It removes the statement. A run that was meant to stop at the first NaN goes on then.",
)
