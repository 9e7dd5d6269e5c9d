"""HS160: the loss that is logged is divided by a scale that it was not multiplied by, or still carries it."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.lint.event import Event
from halfstep.lint.finding import Edit
from halfstep.lint.rule import Problem, Rule
from halfstep.lint.script import Script
from halfstep.lint.step import is_off
from halfstep.lint.values import Object, Scale, Tensor

_FINITE = frozenset({"isfinite", "isnan", "isinf"})


def check(script: Script) -> Iterator[Problem]:
    off = {
        event.receiver.ident for event in script.sites if isinstance(event.receiver, Object) and is_off(event.receiver)
    }
    divisions = [event for event in script.sites if _is_by_scale(event)]
    # Under one setting it may be scaled, under another the scaler is off.
    scaled_somewhere = {event.node for event in divisions if "scaled" in _dividend(event).tags}
    for event in divisions:
        yield from _divided(script, event, event.node in scaled_somewhere)
    treated = {id(node) for event in script.sites for node in _treated(event)}
    for event in script.sites:
        loss = event.receiver
        if event.what != "item" or not isinstance(loss, Tensor) or "scaled" not in loss.tags or loss.scaler in off:
            continue
        if not loss.tags & {"loss", "forward"} or loss.tags & {"gradient", "mask", "number"}:
            continue
        if id(event.node) in treated or _is_quotient(loss.node):
            continue
        yield Problem(
            event.node,
            f"`{_text(script, event)}` is the loss times the scale: log the loss that was given to `scale`",
        )


def _is_by_scale(event: Event) -> bool:
    if event.what == "operator" and event.name == "div":
        pass
    elif event.what not in {"tensor.div", "tensor.true_divide"}:
        return False
    divisor = event.args[-1] if event.args else None
    return isinstance(divisor, Scale) and isinstance(event.receiver, Tensor)


def _dividend(event: Event) -> Tensor:
    assert isinstance(event.receiver, Tensor)
    return event.receiver


def _divided(script: Script, event: Event, is_scaled: bool) -> Iterator[Problem]:
    loss, scale = _dividend(event), event.args[-1]
    assert isinstance(scale, Scale)
    if loss.tags & {"gradient", "parameter", "weighted", "mask"} or not loss.tags & {"loss", "forward"}:
        return
    if "scaled" in loss.tags and loss.scaler == scale.scaler and loss.updates != scale.updates:
        yield Problem(
            scale.node or event.node,
            "the scale is read after `update()`, which may have changed it since the loss was multiplied: log the loss "
            "that was given to `scale`",
        )
    elif not is_scaled:
        edits: tuple[Edit, ...] = ()
        name = "the loss"
        if isinstance(event.node, ast.BinOp):
            name = script.source(event.node.left)
            edits = (Edit("replace", script.span(event.node), name),)
        yield Problem(
            event.node,
            f"`{name}` was never multiplied by the scale, since `scale` returns a new tensor: log it as it is, "
            "without the division",
            edits,
            "safe" if edits else None,
        )


def _treated(event: Event) -> Iterator[ast.AST]:
    """The reads of a tensor whose number is divided, multiplied, compared or tested for NaN afterwards."""
    tests = event.what == "call" and event.name.rpartition(".")[2] in _FINITE
    if tests or event.what == "compare" or (event.what == "operator" and event.name in {"div", "mul"}):
        yield from (value.node for value in event.args if isinstance(value, Tensor) and value.node is not None)


def _is_quotient(node: ast.AST | None) -> bool:
    """Whether the last thing that was done to a scaled loss is a division, by what may be the scale."""
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div | ast.Mult)


def _text(script: Script, event: Event) -> str:
    node = event.node
    return script.source(node.value if isinstance(node, ast.FormattedValue) else node)


RULE = Rule(
    code="HS160",
    name="loss-divided-by-scale",
    severity="error",
    summary="The loss that is logged is divided by a scale that it does not carry, or still carries it.",
    why="""
`scaler.scale(loss)` returns a new tensor and leaves `loss` as it is. `loss.item() / scaler.get_scale()` therefore
shows 0.69 as 1.05e-05 with the first scale of 65536, and doubles or halves each time the scale changes. The product,
logged as it is, shows the same loss as 45,000.

Where the product was overwritten onto `loss`, dividing by `get_scale()` is right only before `update()`: afterwards
the scale may be another, and the logged loss is off by a factor of 2 in that step (and `get_scale()` waits for the
device). Keep the loss that was given to `scale`, and log that.
""",
    bad=(
        """\
import torch
from torch import nn


def train(model, loader, optimizer, scaler, log_every=100):
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            out = model(x)
        loss = nn.functional.cross_entropy(out.float(), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if step % log_every == 0:
            print(step, loss.item() / scaler.get_scale())  # HS160
""",
        """\
import torch
from torch import nn


class Fitter:
    def __init__(self, net, writer):
        self.net, self.writer, self.count = net.cuda(), writer, 0
        self.opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
        self.gs = torch.amp.GradScaler("cuda")

    def batch(self, x, y):
        self.opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            out = self.net(x)
        big = self.gs.scale(nn.functional.huber_loss(out.float(), y))
        big.backward()
        self.gs.step(self.opt)
        self.gs.update()
        self.count += 1
        if self.count % 50 == 0:
            self.writer.add_scalar("loss", big.item(), self.count)  # HS160
""",
        """\
import torch
from torch import nn


def train(net, loader, opt, scaler, history):
    for step, (x, y) in enumerate(loader):
        opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            out = net(x)
        loss = scaler.scale(nn.functional.mse_loss(out.float(), y))
        loss.backward()
        scaler.step(opt)
        scaler.update()
        if step % 20 == 0:
            history.append(loss.item() / scaler.get_scale())  # HS160
""",
    ),
    good=(
        """\
import torch
from torch import nn


def train(model, loader, optimizer, scaler, log_every=100):
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            out = model(x)
        loss = nn.functional.cross_entropy(out.float(), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if step % log_every == 0:
            print(step, loss.item())
""",
        """\
import torch
from torch import nn


def train(net, loader, opt, scaler, history):
    for step, (x, y) in enumerate(loader):
        opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            out = net(x)
        loss = scaler.scale(nn.functional.mse_loss(out.float(), y))
        loss.backward()
        if step % 20 == 0:
            history.append(loss.item() / scaler.get_scale())
        scaler.step(opt)
        scaler.update()
""",
    ),
    check=check,
    fix="safe",
    fix_note="It takes the division away from a loss that was never scaled.",
)
