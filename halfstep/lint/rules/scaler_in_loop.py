"""HS111: a GradScaler is built in the training loop."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.lint.event import Event
from halfstep.lint.rule import Problem, Rule
from halfstep.lint.script import Script
from halfstep.lint.step import is_off, optimizer_of
from halfstep.lint.values import Ident, Object


def check(script: Script) -> Iterator[Problem]:
    for path in script.paths:
        made: dict[Ident, Event] = {}
        restored: set[Ident] = set()
        for event in path:
            if event.what == "make" and isinstance(event.result, Object):
                made[event.result.ident] = event
            elif event.what == "scaler.load_state_dict" and isinstance(event.receiver, Object):
                restored.add(event.receiver.ident)
            elif event.what == "scaler.step" and isinstance(event.receiver, Object):
                scaler, optimizer = made.get(event.receiver.ident), optimizer_of(event)
                if scaler is None or optimizer is None or is_off(event.receiver) or event.receiver.ident in restored:
                    continue
                each = "turn of the loop" if _outlives(made.get(optimizer.ident), optimizer, scaler) else ""
                if not each and _is_passed_each_epoch(optimizer, scaler):
                    each = "epoch"
                if each:
                    yield Problem(
                        scaler.node,
                        f"this scaler is built anew in every {each}, so that its scale and its growth count start "
                        "again while the optimizer goes on; build it once, before the loop",
                    )


def _outlives(made: Event | None, optimizer: Object, scaler: Event) -> bool:
    """Whether an optimizer lives on when the loop around its scaler builds another one."""
    if not scaler.loops or (made is None and optimizer.type):
        return False
    loop = scaler.loops[-1].node
    return made is None or all(other.node is not loop for other in made.loops)


def _is_passed_each_epoch(optimizer: Object, scaler: Event) -> bool:
    """Whether the function that builds the scaler is handed the optimizer and the number of the present epoch."""
    function = scaler.function
    if not isinstance(function, ast.FunctionDef):
        return False
    named = {arg.arg: arg for arg in (*function.args.args, *function.args.kwonlyargs)}
    return "epoch" in named and optimizer.node in named.values() and not _is_counted("epoch", function)


def _is_counted(name: str, function: ast.FunctionDef) -> bool:
    """Whether a parameter is how many there are, as in ``range(epoch)``."""
    return any(
        isinstance(part, ast.Name) and part.id == name
        for loop in ast.walk(function)
        if isinstance(loop, ast.For)
        for part in ast.walk(loop.iter)
    )


RULE = Rule(
    code="HS111",
    name="scaler-in-loop",
    severity="warning",
    summary="A `GradScaler` is built inside the training loop.",
    why="""
A scaler learns: it halves its scale after an overflow and doubles it after 2000 steps without one. Built in the loop,
it begins at 65536 again in every epoch, or in every step, and forgets both. A model that needs a scale of 1024 then
loses the first 6 steps of each epoch to overflows; built in each step, every step of it is skipped, for ever, without
an error. In epochs of fewer than 2000 steps the scale never grows.
""",
    bad=(
        """\
import torch
from torch import nn


def train(net, loader, opt, num_epochs):
    for _ in range(num_epochs):
        scaler = torch.amp.GradScaler("cuda")  # HS111
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

net = nn.Linear(8, 1).cuda()
opt = torch.optim.SGD(net.parameters(), lr=0.1)


def step(x, y):
    gs = torch.amp.GradScaler("cuda")  # HS111
    opt.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        out = net(x)
    gs.scale(nn.functional.mse_loss(out.float(), y)).backward()
    gs.step(opt)
    gs.update()


for x, y in batches:
    step(x, y)
""",
    ),
    good=(
        """\
import torch
from torch import nn


def train(net, loader, opt, num_epochs):
    scaler = torch.amp.GradScaler("cuda")
    for _ in range(num_epochs):
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

for seed in range(5):
    torch.manual_seed(seed)
    net = nn.Linear(8, 1).cuda()
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    gs = torch.amp.GradScaler("cuda")
    for x, y in batches:
        opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            out = net(x)
        gs.scale(nn.functional.mse_loss(out.float(), y)).backward()
        gs.step(opt)
        gs.update()
""",
    ),
    check=check,
)
