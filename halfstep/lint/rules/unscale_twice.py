"""HS103: unscale_ twice for one optimizer between two update()."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.lint.event import comparable
from halfstep.lint.finding import Edit
from halfstep.lint.rule import Problem, Rule
from halfstep.lint.script import Script
from halfstep.lint.step import called_on, follow, handed, is_abandoned, pair_of, place, since


def check(script: Script) -> Iterator[Problem]:
    for path in script.paths:
        for index, (event, step) in enumerate(follow(path)):
            pair = pair_of(event) if event.what == "scaler.unscale_" else None
            first = step.unscaled.get(pair) if pair is not None else None
            if first is None or pair is None or pair in step.stepped or not comparable(first, event):
                continue
            backward = step.began.get(pair, first)
            if step.skips(backward, first, "update") or is_abandoned(since(path, first, index), first):
                continue  # an update that is missing is HS106
            scaler, optimizer = called_on(script, event) or "scaler", handed(script, event)
            again = first.node is event.node
            where = "on every micro-batch" if again else "a second time"
            edits: tuple[Edit, ...] = ()
            here, there = script.statement(event.node), script.statement(first.node)
            beside = script.parents[here] is script.parents[there] and first.calls == event.calls
            if not again and beside and isinstance(here, ast.Expr):
                edits = (Edit("delete", script.span(here)),)
            yield Problem(
                place(event, first),
                f"`{scaler}.unscale_({optimizer})` comes {where} before `{scaler}.update()`, which raises; "
                "unscale once, right before the step",
                edits,
                "safe" if edits else None,
            )


RULE = Rule(
    code="HS103",
    name="unscale-twice",
    severity="error",
    summary="`unscale_` is called twice for one optimizer between two `update()`.",
    why="""
`scaler.unscale_(optimizer)` divides the gradients by the scale and notes that it has. A second call before
`scaler.update()` raises "unscale_() has already been called on this optimizer since the last update()" (torch 2.13).

Under accumulation it belongs to the last micro-batch of the window alone. Gradients that are unscaled after the first
of 4 micro-batches and then added to by scaled ones are a mixture of two scales, 1 and 65536.
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
        scaler.scale(nn.functional.mse_loss(out.float(), y)).backward()
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(net.encoder.parameters(), 1.0)
        scaler.unscale_(opt)  # HS103
        nn.utils.clip_grad_norm_(net.head.parameters(), 5.0)
        scaler.step(opt)
        scaler.update()
""",
        """\
import torch
from torch import nn

WINDOW = 4
net = nn.Linear(8, 1).cuda()
opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
gs = torch.amp.GradScaler("cuda")
for i, (x, y) in enumerate(batches):
    with torch.autocast("cuda", dtype=torch.float16):
        out = net(x)
    gs.scale(nn.functional.mse_loss(out.float(), y) / WINDOW).backward()
    gs.unscale_(opt)  # HS103
    if (i + 1) % WINDOW == 0 or i + 1 == len(batches):
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        gs.step(opt)
        gs.update()
        opt.zero_grad()
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
        scaler.scale(nn.functional.mse_loss(out.float(), y)).backward()
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(net.encoder.parameters(), 1.0)
        nn.utils.clip_grad_norm_(net.head.parameters(), 5.0)
        scaler.step(opt)
        scaler.update()
""",
        """\
import torch
from torch import nn

WINDOW = 4
net = nn.Linear(8, 1).cuda()
opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
gs = torch.amp.GradScaler("cuda")
for i, (x, y) in enumerate(batches):
    with torch.autocast("cuda", dtype=torch.float16):
        out = net(x)
    gs.scale(nn.functional.mse_loss(out.float(), y) / WINDOW).backward()
    if (i + 1) % WINDOW == 0 or i + 1 == len(batches):
        gs.unscale_(opt)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        gs.step(opt)
        gs.update()
        opt.zero_grad()
""",
        """\
import torch
from torch import nn


def step(nets, opts, scaler, x, y):
    for opt in opts:
        opt.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        outs = [net(x) for net in nets]
    loss = sum(nn.functional.mse_loss(out.float(), y) for out in outs)
    scaler.scale(loss).backward()
    for opt in opts:
        scaler.unscale_(opt)
        scaler.step(opt)
    scaler.update()
""",
    ),
    check=check,
    fix="safe",
    fix_note="It deletes a second `unscale_` that stands in the same block as the first.",
)
