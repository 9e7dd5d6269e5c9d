"""HS106: an iteration ends after unscale_ or scaler.step without scaler.update()."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.lint.event import Event, Path, comparable
from halfstep.lint.finding import Edit
from halfstep.lint.rule import Problem, Rule
from halfstep.lint.script import Script
from halfstep.lint.step import Pair, Step, called_on, calls, follow, is_abandoned, left_early, pair_of, place, since


def check(script: Script) -> Iterator[Problem]:
    for path in script.paths:
        for index, (event, step) in enumerate(follow(path)):
            pair = pair_of(event) if event.what in {"scaler.step", "scaler.unscale_"} else None
            if pair is None:
                continue
            first = step.stepped.get(pair) or step.unscaled.get(pair)
            if first is not None and comparable(first, event):
                between = since(path, first, index)
                renewed = any(other.what == "backward" for other in between)
                abandoned = first.loops[:-1] == event.loops[:-1] and is_abandoned(between, first)
                if renewed and (pair in step.stepped or abandoned):
                    yield from _problem(script, path, step, pair, first, between)
        yield from _at_the_end(script, path, step) if path.events else ()


def _at_the_end(script: Script, path: Path, step: Step) -> Iterator[Problem]:
    """What still waits when the path ends: the next iteration begins with it."""
    for pair, first in {**step.unscaled, **step.stepped}.items():
        between = since(path, first, len(path.events))
        began = step.began.get(pair)
        repeats = began is not None and any(loop in began.loops for loop in first.loops)
        returned = left_early(between, first)
        again = repeats and pair in step.stepped
        if again or (returned is not None and (repeats or _updates(script, path, pair))):
            yield from _problem(script, path, step, pair, first, between)


def _problem(
    script: Script, path: Path, step: Step, pair: Pair, first: Event, between: tuple[Event, ...]
) -> Iterator[Problem]:
    edits: tuple[Edit, ...] = ()
    left = left_early(between, first)
    if any(event.what == "break" for event in between) and left is None:
        return
    backward = step.began.get(pair, first)
    if step.skips(backward, first, "update"):
        return
    if first.what == "scaler.step" and any(_follows(event, first) for event in between):
        return  # the update belongs to the last one
    scaler = called_on(script, first) or "scaler"
    update = f"{scaler}.update()"
    if left is not None:
        if left.calls == first.calls:
            edits = (Edit("before", script.span(left.node), update),)
        message = f"this leaves the iteration after `{scaler}.{first.name}` without `{update}`; call it before"
        yield Problem(left.node, message, edits, "safe" if edits else None)
        return
    skipped = _skipped(path, first)
    statement = script.statement(first.node)
    node = place(first, backward)
    if skipped is not None:
        edits = _moved(script, skipped, update)
        node = node if first.what == "scaler.step" else skipped.test
    elif not script.has("scaler.update") and isinstance(statement, ast.Expr):
        edits = (Edit("after", script.span(statement), update),)
    message = (
        f"the next iteration may begin without `{update}` after `{scaler}.{first.name}`; call it in every iteration"
    )
    yield Problem(node, message, edits, "safe" if edits else None)


def _follows(event: Event, first: Event) -> bool:
    """Whether ``event`` is the step of another optimizer by the same scaler, in the same iteration."""
    return event.what == "scaler.step" and event.receiver == first.receiver and event.loops == first.loops


def _skipped(path: Path, first: Event) -> ast.If | None:
    """The ``if`` after ``first`` whose branch, which the path does not take, holds the update."""
    line = first.node.lineno  # type: ignore[attr-defined]
    for decision in path.decisions:
        branch = decision.node
        if isinstance(branch, ast.If) and branch.lineno > line:
            untaken = branch.orelse if decision.taken else branch.body
            if any(calls(part, "update") for part in untaken):
                return branch
    return None


def _moved(script: Script, branch: ast.If, update: str) -> tuple[Edit, ...]:
    """``update()`` after the ``if`` instead of at the end of its branch."""
    last = branch.body[-1]
    if branch.orelse or not isinstance(last, ast.Expr) or script.source(last) != update or len(branch.body) == 1:
        return ()
    return Edit("delete", script.span(last)), Edit("after", script.span(branch), update)


def _updates(script: Script, path: Path, pair: Pair) -> bool:
    """Whether another way through the same function calls ``update``."""
    return any(
        event.what == "scaler.update" and getattr(event.receiver, "ident", None) == pair[0]
        for other in script.paths
        if other.root is path.root
        for event in other
    )


RULE = Rule(
    code="HS106",
    name="update-missing",
    severity="error",
    summary="An iteration ends after `unscale_` or `scaler.step` without `scaler.update()`.",
    why="""
`scaler.update()` moves the scale and forgets which optimizers were unscaled and stepped. Without it, the next
iteration's `unscale_` or `step` raises "unscale_() has already been called on this optimizer since the last update()"
or "step() has already been called since the last update()" (torch 2.13).

Mostly one branch leaves it out: a batch with a bad norm is skipped by `continue`, after `unscale_`, and the run dies
days later on the first such batch. Call `update()` exactly 1 time in every iteration, also in one whose step is
skipped: then an Inf that was found still lowers the scale.
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
        scaler.scale(nn.functional.cross_entropy(out.float(), y)).backward()
        scaler.step(opt)  # HS106
""",
        """\
import torch
from torch import nn


class Job:
    def __init__(self, net):
        self.net = net
        self.opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
        self.gs = torch.amp.GradScaler("cuda")

    def batch(self, x, y):
        self.opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            out = self.net(x)
        self.gs.scale(nn.functional.mse_loss(out.float(), y)).backward()
        self.gs.unscale_(self.opt)
        norm = nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        if not norm.isfinite():
            return False  # HS106
        self.gs.step(self.opt)
        self.gs.update()
        return True
""",
        """\
import torch
from torch import nn

net = nn.Linear(8, 1).cuda()
opt = torch.optim.SGD(net.parameters(), lr=0.1)
gs = torch.amp.GradScaler("cuda")
for x, y in batches:
    opt.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        out = net(x)
    gs.scale(nn.functional.mse_loss(out.float(), y)).backward()
    gs.unscale_(opt)
    norm = nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    if norm < 100:  # HS106
        gs.step(opt)
        gs.update()
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
        scaler.scale(nn.functional.cross_entropy(out.float(), y)).backward()
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
        scaler.scale(nn.functional.cross_entropy(out.float(), y)).backward()
        scaler.unscale_(opt)
        norm = nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        if norm > 100:
            scaler.update()
            continue
        scaler.step(opt)
        scaler.update()
""",
        """\
import torch
from torch import nn


def train(gen, disc, loader, opts, scaler):
    for x in loader:
        for opt in opts:
            opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            score = disc(gen(x))
        scaler.scale(score.float().mean()).backward()
        for opt in opts:
            scaler.step(opt)
        scaler.update()
""",
    ),
    check=check,
    fix="safe",
    fix_note=(
        "It calls `update()` after the step, before the `continue` or `return` that leaves the iteration, or after the"
        " `if` whose branch held it."
    ),
)
