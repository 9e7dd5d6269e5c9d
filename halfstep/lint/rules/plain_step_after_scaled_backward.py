"""HS105: optimizer.step() on gradients that carry the loss scale."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.lint.event import Event, Path
from halfstep.lint.finding import Edit
from halfstep.lint.rule import Problem, Rule
from halfstep.lint.script import Script
from halfstep.lint.step import Step, called_on, follow, frame_of, is_managed, place, scaled_by, scaler_name
from halfstep.lint.values import Object


def check(script: Script) -> Iterator[Problem]:
    for path in script.paths:
        plain: Event | None = None
        for index, (event, step) in enumerate(follow(path)):
            if event.what == "backward" and step.scaler_of(event) is None:
                plain = event
            if event.what != "optimizer.step" or event.args or event.keywords:
                continue
            optimizer = event.receiver
            if not isinstance(optimizer, Object) or optimizer.kind != "optimizer" or is_managed(optimizer):
                continue
            backward = step.carried(event, optimizer.ident)
            mixed, plain = plain, None
            if backward is None or mixed is not None or step.skips(backward, event, "step"):
                continue
            scaler, name = scaler_name(script, backward), called_on(script, event) or "optimizer"
            edits = _edits(script, path, index, backward, step)
            yield Problem(
                place(event, backward),
                f"`{name}.step()` uses gradients that are multiplied by the loss scale; write `{scaler}.step({name})`"
                f" and, once an iteration, `{scaler}.update()`",
                edits,
                "safe" if edits else None,
            )


def _edits(script: Script, path: Path, index: int, backward: Event, step: Step) -> tuple[Edit, ...]:
    """``scaler.step(optimizer)`` in its place, with an ``update`` where the path has none."""
    event, scaled = path.events[index], scaled_by(backward)
    statement = script.statement(event.node)
    if scaled is None or not isinstance(statement, ast.Expr) or not called_on(script, event):
        return ()
    if not event.calls == backward.calls == frame_of(event, backward):
        return ()
    ident = step.scaler_of(backward)
    updated = any(
        other.what == "scaler.update" and isinstance(other.receiver, Object) and other.receiver.ident == ident
        for other in path
    )
    if not updated and step.num_optimizers != 1:
        return ()
    scaler = script.source(scaled)
    replaced = Edit("replace", script.span(event.node), f"{scaler}.step({called_on(script, event)})")
    update = Edit("after", script.span(statement), f"{scaler}.update()")
    return (replaced,) if updated else (replaced, update)


RULE = Rule(
    code="HS105",
    name="plain-step-after-scaled-backward",
    severity="error",
    summary="`optimizer.step()` uses gradients that are multiplied by the loss scale.",
    why="""
`scaler.scale(loss).backward()` leaves gradients that are 65536 times too large, and a plain `optimizer.step()` uses
them as they are. It takes an Inf or NaN as well, which `scaler.step` would have skipped, and without
`scaler.update()` the scale never moves.

Measured with torch 2.13, a linear fit by SGD at `lr=1e-3`: the loss is NaN after one step. Adam divides by the size
of the gradient and seems to learn, with `eps` and clipping off by that factor, until the first overflow makes its
weights NaN.
""",
    bad=(
        """\
import torch
from torch import nn


def train(net, loader, opt):
    scaler = torch.amp.GradScaler("cuda")
    for x, y in loader:
        opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            out = net(x)
        scaler.scale(nn.functional.cross_entropy(out.float(), y)).backward()
        opt.step()  # HS105
""",
        """\
import torch
from torch import nn


class Pair:
    def __init__(self, body, head):
        self.body, self.head = body, head
        self.slow = torch.optim.SGD(body.parameters(), lr=0.01)
        self.fast = torch.optim.AdamW(head.parameters(), lr=1e-3)
        self.gs = torch.amp.GradScaler("cuda")

    def batch(self, x, y):
        self.slow.zero_grad()
        self.fast.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            out = self.head(self.body(x))
        self.gs.scale(nn.functional.mse_loss(out.float(), y)).backward()
        self.gs.step(self.fast)
        self.slow.step()  # HS105
        self.gs.update()
""",
    ),
    good=(
        """\
import torch
from torch import nn


def train(net, loader, opt):
    scaler = torch.amp.GradScaler("cuda")
    for x, y in loader:
        opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            out = net(x)
        scaler.scale(nn.functional.cross_entropy(out.float(), y)).backward()
        scaler.step(opt)
        scaler.update()
""",
        """\
import torch
from torch import nn


def train(net, loader, opt, use_amp):
    scaler = torch.amp.GradScaler("cuda", enabled=use_amp)
    for x, y in loader:
        opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16, enabled=use_amp):
            out = net(x)
        scaler.scale(nn.functional.cross_entropy(out.float(), y)).backward()
        if use_amp:
            scaler.step(opt)
            scaler.update()
        else:
            opt.step()
""",
        """\
import torch
from torch import nn

body, head = nn.Linear(8, 8).cuda(), nn.Linear(8, 1).cuda()
slow, fast = torch.optim.SGD(body.parameters(), lr=0.01), torch.optim.AdamW(head.parameters(), lr=1e-3)
gs = torch.amp.GradScaler("cuda")
for x, y in batches:
    slow.zero_grad()
    fast.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        out = head(body(x))
    gs.scale(nn.functional.mse_loss(out.float(), y)).backward()
    gs.step(slow)
    gs.step(fast)
    gs.update()
""",
    ),
    check=check,
    fix="safe",
    fix_note=(
        "It hands the step to the scaler that scaled the loss in the same function, and adds `update()` where the"
        " source has one optimizer and no update."
    ),
)
