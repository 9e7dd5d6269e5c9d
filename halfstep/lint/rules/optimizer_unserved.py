"""HS108: of the optimizers that share a scaler, one is stepped twice and another not at all."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.lint.event import Event, comparable
from halfstep.lint.rule import Problem, Rule
from halfstep.lint.script import Script
from halfstep.lint.step import called_on, follow, handed, is_managed, optimizer_of, pair_of, place, since
from halfstep.lint.values import Ident, Object

_STEPS = {"scaler.step", "optimizer.step"}


def check(script: Script) -> Iterator[Problem]:
    twice = list(_twice(script))
    yield from twice or _unserved(script)


def _twice(script: Script) -> Iterator[Problem]:
    for path in script.paths:
        for index, (event, step) in enumerate(follow(path)):
            pair = pair_of(event) if event.what == "scaler.step" else None
            first = step.stepped.get(pair) if pair is not None else None
            if first is None or first.loops != event.loops or not comparable(first, event):
                continue
            if step.skips(first, event, "update") or any(e.what == "backward" for e in since(path, first, index)):
                continue  # an update that is missing between two steps is HS106
            yield Problem(
                place(event, first),
                f"`{handed(script, event)}` is stepped a second time before `update()`, which raises; step each "
                "optimizer once",
            )


def _unserved(script: Script) -> Iterator[Problem]:
    """An optimizer whose gradients are zeroed beside those of a stepped one, and that nothing ever steps."""
    if not script.is_complete or not script.has("scaler.step"):
        return
    stepped: set[Ident] = set()
    for path in script.paths:
        for event in path:
            if event.what in _STEPS:
                optimizer = optimizer_of(event) if event.what == "scaler.step" else event.receiver
                if not isinstance(optimizer, Object):
                    return
                stepped.add(optimizer.ident)
            elif event.what in {"other", "call"}:
                passed = [*event.args, *(value for _, value in event.keywords)]
                stepped |= {v.ident for v in passed if isinstance(v, Object) and v.kind == "optimizer"}
    for path in script.paths:
        waiting: dict[Ident, Event] = {}
        for event in path:
            optimizer = event.receiver if event.what == "optimizer.zero_grad" else None
            if isinstance(optimizer, Object) and optimizer.type and optimizer.ident not in stepped:
                waiting |= {} if is_managed(optimizer) else {optimizer.ident: event}
            if event.what != "scaler.step" or pair_of(event) is None or not waiting:
                continue
            beside = [zero for zero in waiting.values() if zero.calls == event.calls and zero.loops == event.loops]
            beside = [zero for zero in beside if zero.decisions == event.decisions]
            for zero in beside:
                del waiting[next(ident for ident, other in waiting.items() if other is zero)]
                name, scaler = called_on(script, zero), called_on(script, event) or "scaler"
                yield Problem(
                    event.node,
                    f"`{name}` is never stepped, only `{handed(script, event)}` is; add `{scaler}.step({name})`",
                )


RULE = Rule(
    code="HS108",
    name="optimizer-unserved",
    severity="error",
    summary="Of the optimizers that share a scaler, one is stepped twice, or one never.",
    why="""
`scaler.step(optimizer)` unscales the gradients of that optimizer alone and steps it. With 2 optimizers it is called 2
times, once for each, and then `update()` 1 time.

A second call for the same optimizer raises "step() has already been called since the last update()" (torch 2.13). An
optimizer that is left out raises nothing: its weights never move, though its `zero_grad()` and its learning rate
schedule run.
""",
    bad=(
        """\
import torch
from torch import nn


def train(a, b, loader):
    opt_a, opt_b = torch.optim.Adam(a.parameters(), lr=1e-3), torch.optim.Adam(b.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler("cuda")
    for x, y in loader:
        opt_a.zero_grad()
        opt_b.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            out = b(a(x))
        scaler.scale(nn.functional.mse_loss(out.float(), y)).backward()
        scaler.step(opt_a)
        scaler.step(opt_a)  # HS108
        scaler.update()
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
        self.gs.step(self.fast)  # HS108
        self.gs.update()
""",
    ),
    good=(
        """\
import torch
from torch import nn


def train(a, b, loader):
    opt_a, opt_b = torch.optim.Adam(a.parameters(), lr=1e-3), torch.optim.Adam(b.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler("cuda")
    for x, y in loader:
        opt_a.zero_grad()
        opt_b.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            out = b(a(x))
        scaler.scale(nn.functional.mse_loss(out.float(), y)).backward()
        scaler.step(opt_a)
        scaler.step(opt_b)
        scaler.update()
""",
        """\
import torch
from torch import nn


class Pair:
    def __init__(self, nets):
        self.nets = nets
        self.opts = {name: torch.optim.SGD(net.parameters(), lr=0.01) for name, net in nets.items()}
        self.gs = torch.amp.GradScaler("cuda")

    def batch(self, x, y):
        for opt in self.opts.values():
            opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            out = self.nets["head"](self.nets["body"](x))
        self.gs.scale(nn.functional.mse_loss(out.float(), y)).backward()
        for name in self.opts:
            self.gs.step(self.opts[name])
        self.gs.update()
""",
    ),
    check=check,
)
