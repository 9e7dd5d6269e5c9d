"""HS107: update() more than once an iteration for one scaler."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.lint.event import Event, Path, comparable
from halfstep.lint.finding import Edit
from halfstep.lint.rule import Problem, Rule
from halfstep.lint.script import Script
from halfstep.lint.step import called_on, is_off, optimizer_of, place
from halfstep.lint.values import Ident, Object


def check(script: Script) -> Iterator[Problem]:
    for path in script.paths:
        earlier: dict[Ident, tuple[Event, frozenset[Ident]]] = {}
        stepped: dict[Ident, list[Ident | None]] = {}
        for event in path:
            scaler = event.receiver
            if not isinstance(scaler, Object) or scaler.kind != "scaler" or is_off(scaler):
                continue
            if event.what == "scaler.step":
                optimizer = optimizer_of(event)
                stepped.setdefault(scaler.ident, []).append(None if optimizer is None else optimizer.ident)
            if event.what != "scaler.update" or event.argument("new_scale", 0) is not None:
                continue
            served = stepped.pop(scaler.ident, [])
            known = frozenset(ident for ident in served if ident is not None)
            first = earlier.pop(scaler.ident, None)
            if len(known) == len(served) and known:
                earlier[scaler.ident] = event, known
            if first is None or not known or len(known) != len(served) or known & first[1]:
                continue
            if comparable(first[0], event) and _in_one_iteration(path, first, event, known):
                yield _problem(script, first[0], event)


def _in_one_iteration(
    path: Path, first: tuple[Event, frozenset[Ident]], second: Event, served: frozenset[Ident]
) -> bool:
    update, optimizers = first
    if update.loops == second.loops:
        return bool(second.loops) or not isinstance(path.root, ast.Module) or update.calls[:1] == second.calls[:1] != ()
    # for opt in optimizers: scaler.step(opt), scaler.update()
    lists = {ident[:-1] for ident in optimizers | served}
    return update.loops[:-1] == second.loops[:-1] and len(lists) == 1 and lists.pop()[-1] == -1


def _problem(script: Script, first: Event, second: Event) -> Problem:
    scaler = called_on(script, first) or "scaler"
    here, there = script.statement(first.node), script.statement(second.node)
    beside = script.parents[here] is script.parents[there] and here is not there and first.calls == second.calls
    edits = (Edit("delete", script.span(here)),) if beside and isinstance(here, ast.Expr) else ()
    return Problem(
        place(first, second),
        f"`{scaler}.update()` is called again in this iteration, for the step of another optimizer, so that the scale "
        "moves twice as often; update once, after the last step",
        edits,
        "unsafe" if edits else None,
    )


RULE = Rule(
    code="HS107",
    name="update-twice",
    severity="warning",
    summary="`scaler.update()` is called more than once an iteration for one scaler.",
    why="""
Each `update()` counts as one iteration. With two optimizers and an update after each, 1000 iterations count as the 2000
of `growth_interval`, and the scale doubles twice as often. An overflow of one network lowers the scale between the two
steps, so that their losses are scaled differently within 1 iteration.

Step every optimizer, then call `update()` 1 time: it lowers the scale when any of them had an Inf or NaN. Networks
whose gradients differ much in size are better served by a scaler each.
""",
    bad=(
        """\
import torch
from torch import nn


def play(gen, disc, opt_g, opt_d, scaler, loader):
    for real in loader:
        opt_d.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            fake = gen(real)
            score = disc(fake.detach())
        scaler.scale(nn.functional.softplus(score.float()).mean()).backward()
        scaler.step(opt_d)
        scaler.update()  # HS107
        opt_g.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            verdict = disc(fake)
        scaler.scale(nn.functional.softplus(-verdict.float()).mean()).backward()
        scaler.step(opt_g)
        scaler.update()
""",
        """\
import torch
from torch import nn

parts = [nn.Linear(8, 8).cuda() for _ in range(3)]
opts = [torch.optim.SGD(part.parameters(), lr=0.1) for part in parts]
gs = torch.amp.GradScaler("cuda")


def step(x, y):
    for opt in opts:
        opt.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        outs = [part(x) for part in parts]
    gs.scale(sum(nn.functional.mse_loss(out.float(), y) for out in outs)).backward()
    for opt in opts:
        gs.step(opt)
        gs.update()  # HS107
""",
    ),
    good=(
        """\
import torch
from torch import nn


def play(gen, disc, opt_g, opt_d, scaler, loader):
    for real in loader:
        opt_d.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            fake = gen(real)
            score = disc(fake.detach())
        scaler.scale(nn.functional.softplus(score.float()).mean()).backward()
        scaler.step(opt_d)
        opt_g.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            verdict = disc(fake)
        scaler.scale(nn.functional.softplus(-verdict.float()).mean()).backward()
        scaler.step(opt_g)
        scaler.update()
""",
        """\
import torch
from torch import nn


def two_rounds(net, opt, scaler, x, y):
    for _ in range(100):
        for half in (x[:8], x[8:]):
            opt.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                out = net(half)
            scaler.scale(nn.functional.mse_loss(out.float(), y)).backward()
            scaler.step(opt)
            scaler.update()
""",
    ),
    check=check,
    fix="unsafe",
    fix_note="It deletes an `update()` that stands in the same block as the later one. The scale then moves once an "
    "iteration, so that a run takes another course.",
)
