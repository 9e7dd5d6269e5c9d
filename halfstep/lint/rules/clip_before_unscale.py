"""HS101: gradients are clipped while they still carry the loss scale."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.lint.event import Event, Path
from halfstep.lint.finding import Edit
from halfstep.lint.rule import Problem, Rule
from halfstep.lint.script import Script
from halfstep.lint.step import called_on, follow, frame_of, handed, in_helper, place, scaler_name
from halfstep.lint.values import Value


def check(script: Script) -> Iterator[Problem]:
    for path in script.paths:
        for index, (event, step) in enumerate(follow(path)):
            parameters = _clipped(event)
            backward = step.carried_by(event, parameters) if parameters is not None else None
            if backward is None:
                continue
            scaler = scaler_name(script, backward)
            edits = _edits(script, path, index, backward) if step.num_optimizers == 1 else ()
            yield Problem(
                place(event, backward),
                f"these gradients still carry the loss scale of `{scaler}`, so that they are clipped far too small; "
                f"call `{scaler}.unscale_` for their optimizer first",
                edits,
                "safe" if edits else None,
            )


def _clipped(event: Event) -> Value | None:
    """The parameters or the gradient that ``event`` clips."""
    if event.what == "clip":
        return event.argument("parameters", 0)
    if event.what == "module.clip_grad_norm_" or (event.what == "gradient.write" and in_helper(event, "clip")):
        return event.receiver
    return None


def _edits(script: Script, path: Path, index: int, backward: Event) -> tuple[Edit, ...]:
    """``unscale_`` before the statement of the clip, where the step that follows stands beside it."""
    frame = frame_of(path.events[index], backward)
    here = script.statement(place(path.events[index], backward))
    late: Event | None = None
    for event in path.events[index + 1 :]:
        if event.what in {"backward", "again", "end"}:
            break
        if event.what == "scaler.unscale_":
            late = event
        if event.what == "scaler.step":
            if event.calls != frame or not _beside(script, script.statement(event.node), here):
                break
            scaler, optimizer = called_on(script, event), handed(script, event)
            if not scaler or not optimizer:
                break
            unscale = Edit("before", script.span(here), f"{scaler}.unscale_({optimizer})")
            if late is None:
                return (unscale,)
            moved = script.statement(late.node)
            if late.calls == frame and _beside(script, moved, here) and isinstance(moved, ast.Expr):
                return unscale, Edit("delete", script.span(moved))
            break
    return ()


def _beside(script: Script, first: ast.stmt, second: ast.stmt) -> bool:
    return script.parents[first] is script.parents[second]


RULE = Rule(
    code="HS101",
    name="clip-before-unscale",
    severity="error",
    summary="Gradients are clipped while they still carry the loss scale.",
    why="""
After `scaler.scale(loss).backward()` every gradient is multiplied by the loss scale, 65536 at first. `max_norm=1.0`
then clips the true gradient to a norm of 1.0 / 65536 = 1.5e-5: nearly every step is clipped, and how far it goes
depends on the scale. `scaler.step` divides by the scale only afterwards.

Measured with torch 2.13, a linear fit by SGD at `lr=0.1` with `max_norm=1.0`: in 60 steps the weights moved 2.39 and
the loss fell to 0.0003; clipped before `unscale_` they moved 0.0005 and the loss stayed at 10.3. Adam hides it, since
it divides by the size of the gradient, until the scale changes. `scaler.step` does not divide a second time after
`unscale_`.
""",
    bad=(
        """\
import torch
from torch import nn


def train(model, loader, opt, scaler):
    for x, y in loader:
        opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            out = model(x)
        loss = nn.functional.cross_entropy(out.float(), y)
        scaler.scale(loss).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # HS101
        scaler.step(opt)
        scaler.update()
""",
        """\
import torch
from torch import nn


class Trainer:
    def __init__(self, net):
        self.net = net
        self.optim = torch.optim.SGD(net.parameters(), lr=0.1)
        self.amp = torch.amp.GradScaler("cuda")

    def limit(self):
        nn.utils.clip_grad_value_(self.net.parameters(), 0.5)

    def fit_batch(self, x, y):
        self.optim.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            out = self.net(x)
        self.amp.scale(nn.functional.mse_loss(out.float(), y)).backward()
        self.limit()  # HS101
        self.amp.unscale_(self.optim)
        self.amp.step(self.optim)
        self.amp.update()
""",
        """\
import torch
from torch import nn

net = nn.Linear(8, 1).cuda()
opt = torch.optim.Adam(net.parameters(), lr=1e-3)
gs = torch.amp.GradScaler("cuda")


def clip_by_norm(parameters, limit):
    parameters = list(parameters)
    total = torch.stack([p.grad.norm() for p in parameters]).norm()
    for p in parameters:
        p.grad.mul_((limit / (total + 1e-6)).clamp(max=1.0))


for x, y in batches:
    opt.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        out = net(x)
    gs.scale(nn.functional.mse_loss(out.float(), y)).backward()
    clip_by_norm(net.parameters(), 1.0)  # HS101
    gs.step(opt)
    gs.update()
""",
    ),
    good=(
        """\
import torch
from torch import nn


def train(model, loader, opt, scaler):
    for x, y in loader:
        opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            out = model(x)
        loss = nn.functional.cross_entropy(out.float(), y)
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(opt)
        scaler.update()
""",
        """\
import torch
from torch import nn


def train(model, loader, opt, scaler, use_amp):
    for x, y in loader:
        opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16, enabled=use_amp):
            out = model(x)
        loss = nn.functional.cross_entropy(out.float(), y)
        if use_amp:
            scaler.scale(loss).backward()
            scaler.unscale_(opt)
        else:
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if use_amp:
            scaler.step(opt)
            scaler.update()
        else:
            opt.step()
""",
        """\
import torch
from torch import nn

gen, disc = nn.Linear(8, 8).cuda(), nn.Linear(8, 1).cuda()
opt_g, opt_d = torch.optim.Adam(gen.parameters()), torch.optim.Adam(disc.parameters())
gs = torch.amp.GradScaler("cuda")
for x in batches:
    opt_g.zero_grad()
    opt_d.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        score = disc(gen(x))
    gs.scale(score.float().mean()).backward()
    gs.unscale_(opt_d)
    nn.utils.clip_grad_norm_(disc.parameters(), 1.0)
    gs.step(opt_d)
    gs.step(opt_g)
    gs.update()
""",
        """\
import torch
from torch import nn


def step(net, opt, gs, x, y):
    opt.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        out = net(x)
    gs.scale(nn.functional.mse_loss(out.float(), y)).backward()
    nn.utils.clip_grad_norm_(net.parameters(), 1.0 * gs.get_scale())
    gs.step(opt)
    gs.update()
""",
    ),
    check=check,
    fix="safe",
    fix_note=(
        "It writes `unscale_` before the clip, or moves it there, where the source has one optimizer and its step"
        " stands in the same block."
    ),
)
