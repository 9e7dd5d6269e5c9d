"""HS104: scaler.step on gradients of a loss that was never scaled."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.lint.event import Event, Path, comparable
from halfstep.lint.finding import Edit
from halfstep.lint.rule import Problem, Rule
from halfstep.lint.script import Script
from halfstep.lint.step import called_on, follow, frame_of, pair_of, place
from halfstep.lint.values import Tensor


def check(script: Script) -> Iterator[Problem]:
    for path in script.paths:
        plain: list[Event] = []
        for index, (event, step) in enumerate(follow(path)):
            if event.what == "backward":
                plain += [event] if _is_plain(event) else []
            elif event.what == "optimizer.step" or (event.what == "optimizer.zero_grad" and step.num_optimizers == 1):
                plain = []
            elif event.what in {"scaler.step", "scaler.unscale_"}:
                served = pair_of(event) is not None and not _stepped_plainly(path, index)
                for backward in plain if served else []:
                    sure = comparable(backward, event) and not step.skips(backward, event, "scale")
                    if sure and not step.by_hand:
                        yield _problem(script, backward, event)
                plain = []


def _is_plain(event: Event) -> bool:
    """Whether a backward pass surely begins at a loss that was not scaled."""
    loss = event.receiver
    return isinstance(loss, Tensor) and "loss" in loss.tags and "scaled" not in loss.tags


def _stepped_plainly(path: Path, index: int) -> bool:
    """Whether another optimizer, which has no scaler, takes the gradients of a plain backward pass."""
    for event in path.events[index + 1 :]:
        if event.what in {"backward", "again", "end"}:
            return False
        if event.what == "optimizer.step":
            return True
    return False


def _problem(script: Script, backward: Event, step: Event) -> Problem:
    scaler = called_on(script, step) or "scaler"
    edits: tuple[Edit, ...] = ()
    call, beside = backward.node, backward.calls == frame_of(step, backward) == step.calls
    if beside and called_on(script, step) and backward.name == "backward" and isinstance(call, ast.Call):
        loss = called_on(script, backward)
        arguments = [script.source(part) for part in call.args]
        arguments += [f"{part.arg}={script.source(part.value)}" for part in call.keywords if part.arg]
        scaled = f"{scaler}.scale({loss}).backward({', '.join(arguments)})"
        edits = (Edit("replace", script.span(call), scaled),)
    return Problem(
        place(backward, step),
        f"this loss is never scaled, but `{scaler}.{step.name}` divides its gradients by the scale; "
        f"write `{scaler}.scale(loss).backward()`",
        edits,
        "safe" if edits else None,
    )


RULE = Rule(
    code="HS104",
    name="backward-forgets-scale",
    severity="error",
    summary="`scaler.step` takes gradients of a loss that was never scaled.",
    why="""
`scaler.step` and `unscale_` divide the gradients by the scale, 65536 at first, whether the loss was multiplied by it
or not. When no loss was, torch 2.13 raises "Attempted step but _scale is None". When one of two losses was, nothing
raises: the gradients of the other are 65536 times too small, so that it is hardly trained at all, and in fp16 they
have underflowed before that, since nothing lifted them.
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
        loss = nn.functional.cross_entropy(out.float(), y)
        loss.backward()  # HS104
        scaler.step(opt)
        scaler.update()
""",
        """\
import torch
from torch import nn


class TwoLosses:
    def __init__(self, net):
        self.net = net
        self.opt = torch.optim.SGD(net.parameters(), lr=0.1)
        self.gs = torch.amp.GradScaler("cuda")

    def batch(self, x, label, age):
        self.opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            scores, years = self.net(x)
        which = nn.functional.cross_entropy(scores.float(), label)
        old = nn.functional.l1_loss(years.float(), age)
        self.gs.scale(which).backward(retain_graph=True)
        old.backward()  # HS104
        self.gs.unscale_(self.opt)
        nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        self.gs.step(self.opt)
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
        loss = nn.functional.cross_entropy(out.float(), y)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
""",
        """\
import torch
from torch import nn


def train(net, loader, opt):
    scaler = torch.amp.GradScaler("cuda")
    for x, y in loader:
        opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            out = net(x)
        loss = nn.functional.cross_entropy(out.float(), y)
        loss = scaler.scale(loss)
        loss.backward()
        scaler.step(opt)
        scaler.update()
""",
        """\
import torch
from torch import nn


def play(gen, disc, opt_g, opt_d, scaler, real):
    with torch.autocast("cuda", dtype=torch.float16):
        fake = gen(real)
    opt_d.zero_grad()
    d_loss = nn.functional.softplus(disc(fake.detach().float())).mean() + nn.functional.mse_loss(disc(real), real)
    d_loss.backward()
    opt_d.step()
    opt_g.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        verdict = disc(fake)
    scaler.scale(nn.functional.mse_loss(verdict.float(), real)).backward()
    scaler.step(opt_g)
    scaler.update()
""",
    ),
    check=check,
    fix="safe",
    fix_note="It scales the loss of the backward pass where the scaler's step stands in the same function.",
)
