"""HS115: an fp16 region is trained without a loss scale."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.lint.event import Event, Path, comparable
from halfstep.lint.rule import Problem, Rule
from halfstep.lint.script import Script
from halfstep.lint.step import is_managed
from halfstep.lint.values import Const, Name, Object, Scale, Tensor, Value


def check(script: Script) -> Iterator[Problem]:
    scaling = {path.root for path in script.paths if any(_scales(event) for event in path)}
    inside = _forwards(script)
    for path in script.paths:
        if path.root in scaling or not any(event.what == "optimizer.step" for event in path):
            continue
        forwards: list[tuple[Event, Object]] = []
        backward: Event | None = None
        used: Object | None = None
        for event in path:
            if event.what == "forward":
                region = event.region if event.region is not None else inside.get(event.node)
                if region is not None and _is_fp16(region) and not event.in_no_grad:
                    forwards.append((event, region))
            elif event.what == "backward" and _is_plain(path, event):
                used = next((region for forward, region in forwards if comparable(forward, event)), None)
                backward = event
            elif event.what == "optimizer.step" and backward is not None and used is not None:
                if not comparable(backward, event) or (
                    isinstance(event.receiver, Object) and is_managed(event.receiver)
                ):
                    continue
                yield Problem(
                    used.node,
                    "this region computes in fp16 and its gradients are used without a loss scale, so that the small "
                    "ones are 0; scale the loss with a GradScaler, or take torch.bfloat16",
                )
                forwards, backward, used = [], None, None


def _scales(event: Event) -> bool:
    """Whether a scaler, or something that may scale the loss or drive the step, takes part."""
    if event.what.startswith(("scaler.", "accelerator.", "fabric.", "lightning.", "stepper.")):
        return True
    handed = (event.receiver, event.result, *event.args)
    if any(isinstance(value, Object) and value.kind in {"scaler", "accelerator", "fabric"} for value in handed):
        return True
    if event.what in {"gradient.write", "data"}:
        return True
    return event.what in {"other", "call"} and any(word in event.name.lower() for word in ("scale", "backward"))


def _is_fp16(region: Object) -> bool:
    """Whether a region is on, and in fp16 without a doubt."""
    position = {"torch.amp.autocast": (1, 2), "torch.cuda.amp.autocast": (1, 0), "torch.cpu.amp.autocast": (1, 0)}
    dtype, enabled = position.get(region.type, (1, 2))
    on = region.argument("enabled", enabled)
    return region.argument("dtype", dtype) == Name("torch.float16") and on in (None, Const(True))


def _forwards(script: Script) -> dict[ast.AST, Object]:
    """The regions that a module of this source opens in its own forward, by the calls that lead there."""
    found: dict[ast.AST, Object] = {}
    for event in script.sites:
        if event.what == "forward" and event.region is not None and not event.in_no_grad:
            for call in event.calls:
                found.setdefault(call, event.region)
    return found


def _is_plain(path: Path, event: Event) -> bool:
    """Whether a backward pass surely begins at a loss of a model that nothing multiplied by a factor."""
    loss = event.receiver
    if not isinstance(loss, Tensor) or not loss.tags & {"loss", "forward"} or loss.tags & {"scaled", "weighted"}:
        return False
    # The loss times a constant above 1 is a static loss scale.
    product = next((other for other in path if other.what == "operator" and other.node is loss.node), None)
    if product is None or product.name != "mul":
        return True
    return not any(isinstance(value, Scale) or _is_above_one(value) for value in product.args)


def _is_above_one(value: Value) -> bool:
    return isinstance(value, Const) and isinstance(value.value, int | float) and value.value > 1


RULE = Rule(
    code="HS115",
    name="fp16-without-scaler",
    severity="error",
    summary="An fp16 region is trained without a loss scale.",
    why="""
The gradients of fp16 activations are fp16 too. Numbers under 6.1e-5 lose bits there and those under 3.0e-8 are 0:
weights whose gradients are that small stop learning, and nothing raises. A `GradScaler` multiplies the loss by
65536 first, lifts the gradients into the range, and skips the steps that overflow.

bf16 has the range of fp32 and needs no scaler, on cards of compute capability 8.0 and up.
""",
    bad=(
        """\
import torch
from torch import nn


def train(net, loader):
    opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
    for x, y in loader:
        opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):  # HS115
            out = net(x)
        nn.functional.cross_entropy(out.float(), y).backward()
        opt.step()
""",
        """\
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 1)

    @torch.autocast("cuda", dtype=torch.float16)  # HS115
    def forward(self, x):
        return self.body(x)


net = Net().cuda()
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for x, y in batches:
    opt.zero_grad()
    nn.functional.mse_loss(net(x).float(), y).backward()
    opt.step()
""",
    ),
    good=(
        """\
import torch
from torch import nn


def train(net, loader):
    opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
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


def train(net, loader, scaler=None):
    opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
    for x, y in loader:
        opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16, enabled=scaler is not None):
            out = net(x)
        loss = nn.functional.cross_entropy(out.float(), y)
        if scaler is None:
            loss.backward()
            opt.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
""",
        """\
import torch
from torch import nn

net, teacher = nn.Linear(8, 1).cuda(), nn.Linear(8, 1).cuda()
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for x in batches:
    opt.zero_grad()
    with torch.no_grad(), torch.autocast("cuda", dtype=torch.float16):
        target = teacher(x)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out = net(x)
    nn.functional.mse_loss(out.float(), target.float()).backward()
    opt.step()
""",
    ),
    check=check,
)
