"""HS109: gradients are zeroed between backward and step."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.lint.event import Event, comparable
from halfstep.lint.rule import Problem, Rule
from halfstep.lint.script import Script
from halfstep.lint.step import follow, idents_of, optimizer_of, place
from halfstep.lint.values import Ident, Object, Tensor

_ZEROES = {"optimizer.zero_grad", "module.zero_grad"}


def check(script: Script) -> Iterator[Problem]:
    for path in script.paths:
        backward: Event | None = None
        zeroed: dict[Ident, Event] = {}
        for event, step in follow(path):
            if event.what == "backward":
                backward, zeroed = event, {}
            elif event.what in _ZEROES and backward is not None:
                zeroed |= dict.fromkeys(step.zeroes(event), event)
            elif _may_fill(event):
                backward, zeroed = None, {}
            elif event.what in {"optimizer.step", "scaler.step"}:
                optimizer = optimizer_of(event) if event.what == "scaler.step" else event.receiver
                closure = event.what == "optimizer.step" and bool(event.args or event.keywords)
                zero = zeroed.get(optimizer.ident) if isinstance(optimizer, Object) and not closure else None
                if zero is not None and backward is not None and _in_one_iteration(backward, zero, event):
                    yield Problem(
                        place(zero, event),
                        "this throws away the gradients of the backward pass before the step that should use them; "
                        "zero them before the backward pass or after the step",
                    )
                backward, zeroed = None, {}


def _may_fill(event: Event) -> bool:
    """Whether gradients may come from elsewhere: assigned, or from code that is not seen."""
    if event.what in {"gradient.write", "autograd.grad", "accelerator.backward", "lightning.manual_backward"}:
        return True
    if event.what != "other":
        return False
    losses = any(isinstance(value, Tensor) and value.tags & {"loss", "scaled"} for value in event.args)
    return losses or "backward" in event.name or any(idents_of(value) for value in event.args)


def _in_one_iteration(backward: Event, zero: Event, step: Event) -> bool:
    depth = len(step.loops)
    inside = backward.loops[:depth] == step.loops == zero.loops[:depth]
    inside = inside and (depth > 0 or backward.loops == zero.loops)  # a loop before may have served something else
    return inside and comparable(backward, step) and comparable(zero, step)


RULE = Rule(
    code="HS109",
    name="zero-grad-before-step",
    severity="error",
    summary="Gradients are zeroed between `backward` and `step`.",
    why="""
`zero_grad()` right before the step throws away what `backward` has just computed. With `set_to_none=True`, the
default since torch 2.0, a plain `optimizer.step()` then does nothing and says nothing; `scaler.step` raises "No inf
checks were recorded for this optimizer" (torch 2.13). With `set_to_none=False` neither says a word: the gradients are
0, so that only momentum and weight decay move the weights.
""",
    bad=(
        """\
import torch
from torch import nn


def train(net, loader, opt, scaler):
    for x, y in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            out = net(x)
        scaler.scale(nn.functional.cross_entropy(out.float(), y)).backward()
        opt.zero_grad()  # HS109
        scaler.step(opt)
        scaler.update()
""",
        """\
import torch
from torch import nn


class Job:
    def __init__(self, net):
        self.net = net
        self.optim = torch.optim.AdamW(net.parameters(), lr=1e-3)

    def apply(self):
        self.net.zero_grad(set_to_none=False)  # HS109
        self.optim.step()

    def batch(self, x, y):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            out = self.net(x)
        nn.functional.mse_loss(out.float(), y).backward()
        self.apply()
""",
    ),
    good=(
        """\
import torch
from torch import nn


def train(net, loader, opt, scaler):
    for x, y in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            out = net(x)
        opt.zero_grad()
        scaler.scale(nn.functional.cross_entropy(out.float(), y)).backward()
        scaler.step(opt)
        scaler.update()
""",
        """\
import torch
from torch import nn


def sharpness_aware(net, opt, x, y, rho=0.05):
    nn.functional.mse_loss(net(x), y).backward()
    shifts = [rho * p.grad.sign() for p in net.parameters()]
    with torch.no_grad():
        for p, shift in zip(net.parameters(), shifts):
            p.add_(shift)
    opt.zero_grad()
    nn.functional.mse_loss(net(x), y).backward()
    with torch.no_grad():
        for p, shift in zip(net.parameters(), shifts):
            p.sub_(shift)
    opt.step()
    opt.zero_grad()
""",
    ),
    check=check,
)
