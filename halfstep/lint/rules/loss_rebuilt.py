"""HS112: the backward pass begins at a loss that was rebuilt from values."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.lint.rule import Problem, Rule
from halfstep.lint.script import Script
from halfstep.lint.values import Tensor

_WITHOUT_GRAPH = {"detached", "rebuilt", "number", "leaf"}


def check(script: Script) -> Iterator[Problem]:
    for path in script.paths:
        for event in path:
            loss = None
            if event.what == "scaler.scale" and event.args:
                loss = event.args[0]
            elif event.what == "backward":
                loss = event.receiver
            if not isinstance(loss, Tensor) or not loss.tags & _WITHOUT_GRAPH or "scaled" in loss.tags:
                continue
            if not loss.tags & {"loss", "forward", "rebuilt"}:
                continue  # whose values these are is not known
            made = loss.node if loss.tags & {"rebuilt", "leaf"} else None
            yield Problem(
                made if made is not None else event.node,
                "this loss is made from the values of another one, so that the backward pass ends here and reaches no "
                "weight; add and scale the losses themselves, and detach only what is logged",
            )


RULE = Rule(
    code="HS112",
    name="loss-rebuilt",
    severity="error",
    summary="The backward pass begins at a loss that was rebuilt from values.",
    why="""
`loss.item()`, `float(loss)`, `loss.detach()` and `torch.tensor(loss)` are values without a graph. A loss that is made
of them, and given `requires_grad` so that `backward()` does not complain, is a new leaf: its gradient is 1 (or the
loss scale), and no weight gets any.

Measured with torch 2.13: after `scaler.scale(torch.tensor(loss.item(), requires_grad=True)).backward()` every `.grad`
is None. `scaler.step` then raises "No inf checks were recorded for this optimizer"; a plain `optimizer.step()` does
nothing at all.
""",
    bad=(
        """\
import torch
from torch import nn


def train(net, loader, opt, scaler):
    for x, y in loader:
        opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            out = net(x)
        loss = nn.functional.cross_entropy(out.float(), y)
        scaler.scale(torch.tensor(loss, requires_grad=True)).backward()  # HS112
        scaler.step(opt)
        scaler.update()
""",
        """\
import torch
from torch import nn


class Job:
    def __init__(self, net):
        self.net = net
        self.opt = torch.optim.AdamW(net.parameters(), lr=1e-3)

    def loss(self, x, y):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            out = self.net(x)
        loss = nn.functional.mse_loss(out.float(), y)
        return loss.detach().requires_grad_()  # HS112

    def batch(self, x, y):
        self.opt.zero_grad()
        self.loss(x, y).backward()
        self.opt.step()
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
        loss = nn.functional.cross_entropy(out.float(), y)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
""",
        """\
import torch
from torch import nn


def train(net, teacher, loader, opt, scaler):
    total = torch.zeros((), device="cuda")
    for x, y in loader:
        opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            out, target = net(x), teacher(x).detach()
        loss = nn.functional.cross_entropy(out.float(), y) + nn.functional.mse_loss(out.float(), target.float())
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        total += loss.detach()
""",
        """\
import torch
from torch import nn


def attack(net, x, y, steps=10):
    delta = torch.zeros_like(x)
    for _ in range(steps):
        delta = delta.detach().requires_grad_()
        loss = nn.functional.cross_entropy(net(x + delta), y) - delta.square().mean()
        loss.backward()
        delta = delta + 0.01 * delta.grad.sign()
    return delta.detach()
""",
    ),
    check=check,
)
