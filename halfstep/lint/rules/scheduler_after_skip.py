"""HS303: the schedule advances although the scaler may have skipped the step."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import replace

from halfstep.lint.accumulation import windows
from halfstep.lint.event import Event, Path, comparable
from halfstep.lint.finding import Edit
from halfstep.lint.rule import Problem, Rule
from halfstep.lint.scaling import used_scaler
from halfstep.lint.script import Script
from halfstep.lint.step import optimizer_of
from halfstep.lint.values import Object, Scale

_FINITE = re.compile(
    r"isfinite|isnan|isinf|(?<![a-z])(inf|nan)(?![a-z])|(?<!max_)(?<!clip_)(?<!max_grad_)(?<!clip_grad_)norm(?!al|_clip)",
    re.I,
)
"""A question about the gradients; ``max_grad_norm > 0`` is one about a setting."""
_SKIP = re.compile(r"skip|over_?flow|applied|stepped|found_inf|success", re.I)


def check(script: Script) -> Iterator[Problem]:
    if not (script.has("scheduler.step") and script.has("scaler.step")):
        return
    # One that is stepped on every micro-batch is another mistake, HS122.
    too_often = {
        e.node for window in windows(script) for turn in window.idle for e in turn.events if e.what == "scheduler.step"
    }
    for path in script.paths:
        if _knows_of_skips(path):
            continue
        stepped: list[Event] = []
        for event in path:
            if event.what == "scaler.step" and used_scaler(event) is not None:
                stepped.append(event)
            elif event.what == "scheduler.step" and event.node not in too_often:
                step = _step_before(event, stepped)
                if step is not None:
                    edits = _mended(script, path, step, event)
                    yield Problem(
                        event.node,
                        "the schedule advances also when the scaler has skipped the step: advance it only after an "
                        "applied one, when `get_scale()` is not lower than before `update()`",
                        edits,
                        "unsafe" if edits else None,
                    )


def _knows_of_skips(path: Path) -> bool:
    """Whether a path compares scales, or leaves a step whose gradients are not finite before the scaler does."""
    if any(event.what == "compare" and any(isinstance(value, Scale) for value in event.args) for event in path):
        return True
    return any(not decision.is_mode and _FINITE.search(decision.text) for decision in path.decisions)


def _step_before(event: Event, stepped: list[Event]) -> Event | None:
    """The ``scaler.step`` of the same turn that the schedule follows without asking; None when it asks."""
    if event.args or event.keywords:
        return None  # it is told where it stands
    event, schedule = _without_presence(event), event.receiver
    optimizer = schedule.argument("optimizer", 0) if isinstance(schedule, Object) else None
    for step in reversed(stepped):
        if step.loops != event.loops[: len(step.loops)] or not comparable(step, event):
            continue
        if isinstance(optimizer, Object) and optimizer_of(step) not in (None, optimizer):
            continue
        asked = set(event.decisions) - set(step.decisions)
        return step if all(decision.is_mode and not _SKIP.search(decision.text) for decision in asked) else None
    return None


def _without_presence(event: Event) -> Event:
    """``event`` without the question whether there is a schedule at all: ``if scheduler is not None``."""
    owner = ast.unparse(event.node.func.value)  # type: ignore[attr-defined]
    decisions = tuple(d for d in event.decisions if d.text not in {owner, f"{owner} is not None"})
    return replace(event, decisions=decisions)


def _mended(script: Script, path: Path, step: Event, event: Event) -> tuple[Edit, ...]:
    """Read the scale before the step, and advance only when it has not fallen."""
    first, last = script.statement(step.node), script.statement(event.node)
    if (
        not isinstance(first, ast.Expr)
        or not isinstance(last, ast.Expr)
        or script.parents[first] is not script.parents[last]
    ):
        return ()
    updated = [
        other
        for other in path
        if other.what == "scaler.update"
        and other.receiver == step.receiver
        and _line(first) < _line(other.node) < _line(last)
    ]
    if not updated or not isinstance(step.node, ast.Call) or not isinstance(step.node.func, ast.Attribute):
        return ()
    if "scale_before" in script.text or any(_line(node) == _line(last) for node in _siblings(script, last)):
        return ()
    scaler = script.source(step.node.func.value)
    return (
        Edit("before", script.span(first), f"scale_before = {scaler}.get_scale()"),
        Edit(
            "replace",
            script.span(last),
            f"if {scaler}.get_scale() >= scale_before:\n    {script.source(last)}",
        ),
    )


def _siblings(script: Script, statement: ast.stmt) -> list[ast.AST]:
    return [
        node
        for node in ast.iter_child_nodes(script.parents[statement])
        if isinstance(node, ast.stmt) and node is not statement
    ]


def _line(node: ast.AST) -> int:
    return node.lineno  # type: ignore[attr-defined, no-any-return]


RULE = Rule(
    code="HS303",
    name="scheduler-after-skip",
    severity="warning",
    summary="The schedule advances although the scaler may have skipped the step.",
    why="""
A scaler that begins at 65536 skips its first steps until the gradients fit, 7 of them when the run settles at 512. A
schedule that is advanced on each of them is 7 steps ahead of the optimizer: of a warm-up over 100 steps the first 7
values are never used, `OneCycleLR` ends 7 steps early, and a resumed run is on another schedule than one that was
never stopped. torch warns only when the very first step was skipped.

Advance the schedule after applied steps alone. `get_scale()` waits for the device twice a step; a fused optimizer and
a flag that stays there avoid it, as `halfstep.Stepper` does.
""",
    bad=(
        """\
import torch
from torch import nn


class Trainer:
    def __init__(self, net, steps):
        self.net = net.cuda()
        self.opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(self.opt, max_lr=1e-2, total_steps=steps)
        self.scaler = torch.amp.GradScaler("cuda")

    def step(self, x, y):
        self.opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            out = self.net(x)
        self.scaler.scale(nn.functional.cross_entropy(out.float(), y)).backward()
        self.scaler.step(self.opt)
        self.scaler.update()
        self.schedule.step()  # HS303
""",
        """\
import torch
from torch import nn


def train(net, loader, opt, lr_scheduler, gs, accumulate):
    for i, (x, y) in enumerate(loader):
        with torch.autocast("cuda", dtype=torch.float16):
            out = net(x)
        loss = nn.functional.mse_loss(out.float(), y)
        gs.scale(loss / accumulate).backward()
        if (i + 1) % accumulate == 0 or i + 1 == len(loader):
            gs.step(opt)
            gs.update()
            opt.zero_grad()
            lr_scheduler.step()  # HS303
""",
    ),
    good=(
        """\
import torch
from torch import nn


class Trainer:
    def __init__(self, net, steps):
        self.net = net.cuda()
        self.opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(self.opt, max_lr=1e-2, total_steps=steps)
        self.scaler = torch.amp.GradScaler("cuda")

    def step(self, x, y):
        self.opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            out = self.net(x)
        self.scaler.scale(nn.functional.cross_entropy(out.float(), y)).backward()
        scale_before = self.scaler.get_scale()
        self.scaler.step(self.opt)
        self.scaler.update()
        if self.scaler.get_scale() >= scale_before:
            self.schedule.step()
""",
        """\
import torch
from torch import nn


def train(net, loader, opt, lr_scheduler, gs):
    for x, y in loader:
        opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            out = net(x)
        gs.scale(nn.functional.mse_loss(out.float(), y)).backward()
        before = gs.get_scale()
        gs.step(opt)
        gs.update()
        if gs.get_scale() >= before:
            lr_scheduler.step()
""",
        """\
import torch
from torch import nn


def train(net, loader, opt, gs, num_epochs):
    decay = torch.optim.lr_scheduler.StepLR(opt, step_size=30)
    for _ in range(num_epochs):
        for x, y in loader:
            opt.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                out = net(x)
            gs.scale(nn.functional.mse_loss(out.float(), y)).backward()
            gs.step(opt)
            gs.update()
        decay.step()
""",
    ),
    check=check,
    fix="unsafe",
    fix_note="It reads the scale before the step and advances only when it has not fallen. The schedule then ends "
    "later, and each step waits for the device twice.",
)
