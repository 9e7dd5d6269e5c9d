"""HS122: what belongs to a window of accumulation happens on every micro-batch."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from halfstep.lint.accumulation import Window, encloses, in_turn, is_step, stepped_by, windows
from halfstep.lint.event import Event
from halfstep.lint.names import last_name
from halfstep.lint.rule import Problem, Rule
from halfstep.lint.script import Script
from halfstep.lint.values import Instance, Object, Tensor, Unknown, Value

_AVERAGE = re.compile(r"(^|_)ema|ema$|averag|polyak|shadow|EMA")
_MOVES = frozenset({"lerp_", "copy_", "add_", "mul_"})
_LOGS = frozenset(
    {"print", "log", "info", "debug", "warning", "add_scalar", "log_metric", "set_postfix", "set_description", "write"}
)


def check(script: Script) -> Iterator[Problem]:
    for window in windows(script):
        length = ast.unparse(window.length)
        for turn in window.idle:
            for event in turn.events:
                message = "" if _is_rare(event, window) else _misplaced(event, window, length)
                if message:
                    yield Problem(in_turn(event, window.loop), message)
        for event in script.sites:
            if event.what == "item" and window.holds(event) and _is_shown(script, event, length):
                yield Problem(
                    event.node,
                    f"the loss was divided by `{length}` for its gradient, so the log shows it `{length}` times too "
                    "small: log it before the division",
                )


def _is_rare(event: Event, window: Window) -> bool:
    """Whether a condition within the turn decides about it."""
    inside = [d for d in event.decisions if window.loop is None or not encloses(d.node, window.loop)]
    return any(not decision.is_mode for decision in inside)


def _misplaced(event: Event, window: Window, length: str) -> str:
    if event.what == "scheduler.step" and not event.args and not event.keywords:
        return (
            f"the schedule advances on every micro-batch, `{length}` times for one step of the optimizer: "
            "step it where the optimizer is stepped"
        )
    if event.what in {"optimizer.zero_grad", "module.zero_grad"} and _of_window(event, window):
        return (
            "the gradients are cleared on every micro-batch, so the step sees those of the last one alone: clear them "
            "after the step"
        )
    if _is_average(event):
        return (
            f"the average is updated on every micro-batch, `{length}` times for one step of the optimizer: update it "
            "where the optimizer is stepped"
        )
    return ""


def _of_window(event: Event, window: Window) -> bool:
    """Whether the gradients that are cleared are those of the window's optimizer."""
    if event.what == "module.zero_grad":
        return True
    stepped = [stepped_by(later) for turn in window.stepping for later in turn.events if is_step(later)]
    return isinstance(event.receiver, Object) and event.receiver in stepped


def _is_average(event: Event) -> bool:
    """Whether weights of another model move towards those of the one in training."""
    if event.what == "module.update_parameters":
        return True
    if event.what.startswith("tensor.") and event.name in _MOVES:
        return any(_other_weights(event.receiver, arg) for arg in event.args)
    if event.what in {"other", "local"} and event.name in {"update", "step", "update_parameters", "__call__"}:
        receiver = event.receiver
        name = receiver.node.name if isinstance(receiver, Instance) else getattr(receiver, "name", "")
        return isinstance(receiver, Instance | Unknown) and bool(_AVERAGE.search(name))
    return False


def _other_weights(first: Value | None, second: Value) -> bool:
    if not (isinstance(first, Tensor) and isinstance(second, Tensor) and {"parameter"} <= first.tags & second.tags):
        return False
    return bool(first.of and second.of) and not first.of & second.of


def _is_shown(script: Script, event: Event, length: str) -> bool:
    """Whether the quotient itself of a division by the length of the window is logged."""
    value = event.receiver
    if not isinstance(value, Tensor) or not value.tags & {"loss", "forward"}:
        return False
    division = value.node
    if isinstance(division, ast.BinOp) and isinstance(division.op, ast.Div):
        divisor: ast.expr = division.right
    elif isinstance(division, ast.AugAssign) and isinstance(division.op, ast.Div):
        divisor = division.value
    else:
        return False
    if ast.unparse(divisor) != length:
        return False
    node = event.node
    while not isinstance(node, ast.stmt | ast.BinOp):
        if isinstance(node, ast.Call) and last_name(node.func) in _LOGS:
            return True
        node = script.parents[node]
    return False


RULE = Rule(
    code="HS122",
    name="every-micro-batch",
    severity="warning",
    summary="What belongs to a window of accumulation happens on every micro-batch.",
    why="""
A window of 8 micro-batches is one step of the optimizer. A schedule that is stepped on each of them runs 8 times too
fast: a cosine meant for 1,000 steps is at its end after 125. An average of the weights with decay 0.999 that is
updated 8 times for one step has the decay 0.999^8 = 0.992, and remembers 125 steps instead of 1,000. `zero_grad` on
each micro-batch throws 7 of 8 gradients away, and the loss divided by 8 for its gradient is logged 8 times too small.

Do all of it where the optimizer is stepped.
""",
    bad=(
        """\
import torch
from torch import nn


def train(model, loader, optimizer, accumulation=8):
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1000)
    for i, (x, y) in enumerate(loader):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            out = model(x.cuda())
        loss = nn.functional.l1_loss(out.float(), y.cuda()) / accumulation
        loss.backward()
        if (i + 1) % accumulation == 0 or i + 1 == len(loader):
            optimizer.step()
            optimizer.zero_grad()
        schedule.step()  # HS122
""",
        """\
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel


class Job:
    def __init__(self, net, window):
        self.net, self.window = net.cuda(), window
        self.average = AveragedModel(self.net)
        self.opt = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.scaler = torch.amp.GradScaler("cuda")

    def batch(self, i, x, y):
        with torch.autocast("cuda", dtype=torch.float16):
            out = self.net(x)
        loss = nn.functional.mse_loss(out.float(), y)
        self.scaler.scale(loss / self.window).backward()
        self.average.update_parameters(self.net)  # HS122
        if (i + 1) % self.window == 0:
            self.scaler.step(self.opt)
            self.scaler.update()
            self.opt.zero_grad()
""",
        """\
import torch
from torch import nn


def train(net, loader, opt, scaler, n):
    for i, (x, y) in enumerate(loader):
        opt.zero_grad()  # HS122
        with torch.autocast("cuda", dtype=torch.float16):
            loss = nn.functional.mse_loss(net(x).float(), y) / n
        scaler.scale(loss).backward()
        if i % 100 == 0:
            print(i, loss.item())  # HS122
        if (i + 1) % n == 0 or i + 1 == len(loader):
            scaler.step(opt)
            scaler.update()
""",
    ),
    good=(
        """\
import torch
from torch import nn


def train(model, loader, optimizer, accumulation=8):
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1000)
    for i, (x, y) in enumerate(loader):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            out = model(x.cuda())
        loss = nn.functional.l1_loss(out.float(), y.cuda()) / accumulation
        loss.backward()
        if (i + 1) % accumulation == 0 or i + 1 == len(loader):
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
""",
        """\
import torch
from torch import nn


def train(model, loader, optimizer, accumulation=8):
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1000)
    for i, (x, y) in enumerate(loader):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            out = model(x.cuda())
        loss = nn.functional.l1_loss(out.float(), y.cuda())
        (loss / accumulation).backward()
        if (i + 1) % accumulation == 0 or i + 1 == len(loader):
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            if i % 100 < accumulation:
                print(i, loss.item())
""",
        """\
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel


class Job:
    def __init__(self, net, window):
        self.net, self.window = net.cuda(), window
        self.average = AveragedModel(self.net)
        self.opt = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.scaler = torch.amp.GradScaler("cuda")

    def batch(self, i, x, y):
        if i % self.window == 0:
            self.opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            out = self.net(x)
        loss = nn.functional.mse_loss(out.float(), y)
        self.scaler.scale(loss / self.window).backward()
        if (i + 1) % self.window != 0:
            return
        self.scaler.step(self.opt)
        self.scaler.update()
        self.average.update_parameters(self.net)
""",
    ),
    check=check,
)
