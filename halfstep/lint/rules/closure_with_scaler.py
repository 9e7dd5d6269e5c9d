"""HS113: a closure under a scaler."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.lint.event import Event, Path
from halfstep.lint.rule import Problem, Rule
from halfstep.lint.script import Script
from halfstep.lint.step import called_on, follow, is_off
from halfstep.lint.values import NONE, Object


def check(script: Script) -> Iterator[Problem]:
    for path in script.paths:
        for index, (event, step) in enumerate(follow(path)):
            if event.what == "scaler.step" and isinstance(event.receiver, Object) and not is_off(event.receiver):
                if event.argument("closure", 1) not in (None, NONE):
                    yield Problem(
                        event.node,
                        f"`{called_on(script, event) or 'scaler'}.step` takes no closure, whose gradients would be "
                        "used scaled; run the backward pass before it, with an optimizer that needs none",
                    )
            elif event.what == "optimizer.step" and (event.args or event.keywords):
                backward = _inside(path, index)
                if backward is not None and step.scaler_of(backward) is not None:
                    yield Problem(
                        event.node,
                        "this closure scales its loss, and the optimizer uses the scaled gradients; let it run in "
                        "fp32 or bf16, without a scaler",
                    )


def _inside(path: Path, index: int) -> Event | None:
    """The backward pass that the closure of a step runs."""
    node = path.events[index].node
    for event in path.events[index + 1 :]:
        if event.node is not node and node not in event.calls:
            return None
        if event.what == "backward":
            return event
    return None


RULE = Rule(
    code="HS113",
    name="closure-with-scaler",
    severity="error",
    summary="An optimizer is given a closure under a scaler.",
    why="""
An optimizer that takes a closure, such as LBFGS, computes the gradients anew inside its step, up to 25 times. The
scaler unscales and checks once, before the step, so that what the closure computes is still multiplied by the scale,
65536 at first, and is used without a look for Inf and NaN.

`scaler.step(optimizer, closure=closure)` raises "Closure use is not currently supported if GradScaler is enabled"
(torch 2.13); passed by position it slips through: with a scale of 256, SGD at `lr=0.01` moved a weight by 22.96
instead of 0.09. bf16 needs no scaler and so takes closures.
""",
    bad=(
        """\
import torch
from torch import nn


def fit(net, opt, scaler, x, y):
    def closure():
        opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            out = net(x)
        loss = nn.functional.mse_loss(out.float(), y)
        scaler.scale(loss).backward()
        return loss

    for _ in range(20):
        scaler.step(opt, closure)  # HS113
        scaler.update()
""",
        """\
import torch
from torch import nn

net = nn.Linear(8, 1).cuda()
solver = torch.optim.LBFGS(net.parameters(), lr=0.5)
gs = torch.amp.GradScaler("cuda")


def evaluate():
    solver.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        out = net(x)
    loss = nn.functional.mse_loss(out.float(), y)
    gs.scale(loss).backward()
    return loss


for x, y in batches:
    solver.step(evaluate)  # HS113
    gs.update()
""",
    ),
    good=(
        """\
import torch
from torch import nn


def fit(net, opt, x, y):
    def closure():
        opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            out = net(x)
        loss = nn.functional.mse_loss(out.float(), y)
        loss.backward()
        return loss

    for _ in range(20):
        opt.step(closure)
""",
        """\
import torch
from torch import nn


def fit(net, opt, x, y, use_amp):
    scaler = torch.amp.GradScaler("cuda", enabled=False)
    for _ in range(20):
        opt.zero_grad()
        loss = nn.functional.mse_loss(net(x), y)
        scaler.scale(loss).backward()
        scaler.step(opt, lambda: loss)
        scaler.update()
""",
    ),
    check=check,
)
