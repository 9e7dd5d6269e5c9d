"""HS121: the last, incomplete accumulation window of an epoch is never stepped."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.lint.accumulation import LoopNode, Period, Periods, Window, encloses, is_step, windows
from halfstep.lint.finding import Edit
from halfstep.lint.rule import Problem, Rule
from halfstep.lint.script import Script


def check(script: Script) -> Iterator[Problem]:
    if not script.is_complete:
        return  # a step after the loop might be on a path that was not followed
    found = windows(script)
    periods = Periods(script)
    for window in found:
        loop, period = window.loop, window.period
        if not isinstance(loop, ast.For) or period is None or window.ends is None or period.has_rest:
            continue
        if any(other is not window and other.loop is loop for other in found) or _steps_after(script, loop):
            continue
        if not _counts_from_the_start(script, period, loop, periods) or not _has_rest(script, loop, period):
            continue
        length = ast.unparse(period.length)
        edits = _mended(script, window)
        yield Problem(
            window.ends,
            f"up to `{length} - 1` micro-batches at the end of the loop are never stepped and leak into the next "
            "epoch: end the last window too, and divide by what it holds",
            edits,
            "unsafe" if edits else None,
        )


def _steps_after(script: Script, loop: LoopNode) -> bool:
    """Whether a step follows the loop, for what is left."""
    for path in script.paths:
        ended = None
        for event in path:
            if event.what == "end" and event.node is loop:
                ended = event
            elif ended is not None and is_step(event) and event.loops == ended.loops:
                return True
    return False


def _counts_from_the_start(script: Script, period: Period, loop: ast.For, periods: Periods) -> bool:
    """Whether the count begins again with the loop. One that goes on through all epochs loses nothing between them."""
    targets = {node.id for node in ast.walk(loop.target) if isinstance(node, ast.Name)}
    names = {node.id for node in ast.walk(period.index) if isinstance(node, ast.Name)}
    if len(names) != 1:
        return False
    (name,) = names
    if name in targets:
        return True
    function = script.function(loop)
    starts = [node for node in periods.zeroed(name) if script.function(node) is function and not encloses(loop, node)]
    outer = [
        node
        for node in periods.loops
        if script.function(node) is function and node is not loop and encloses(node, loop)
    ]
    return bool(starts) and all(encloses(node, starts[-1]) for node in outer)


def _has_rest(script: Script, loop: ast.For, period: Period) -> bool:
    """Whether the loop may end within a window, as far as its iterable tells."""
    text = script.source(loop.iter)
    if "//" in text or "cycle(" in text or "islice(" in text:
        return False
    call = loop.iter
    if not (isinstance(call, ast.Call) and getattr(call.func, "id", "") == "range"):
        return True
    if len(call.args) == 1 and isinstance(call.args[0], ast.Call):
        return getattr(call.args[0].func, "id", "") == "len"
    number, length = (getattr(node, "value", None) for node in (call.args[-1], period.length))
    return isinstance(number, int) and isinstance(length, int) and length > 0 and number % length != 0


def _mended(script: Script, window: Window) -> tuple[Edit, ...]:
    """``or i + 1 == len(loader)``, where the loop enumerates a loader."""
    loop, ends = window.loop, window.ends
    assert isinstance(loop, ast.For)
    assert ends is not None
    assert window.period is not None
    call, target = loop.iter, loop.target
    if not (isinstance(call, ast.Call) and getattr(call.func, "id", "") == "enumerate" and window.period.at_end):
        return ()
    if (
        not isinstance(target, ast.Tuple)
        or not isinstance(target.elts[0], ast.Name)
        or not isinstance(call.args[0], ast.Name)
    ):
        return ()
    start = next((k.value for k in call.keywords if k.arg == "start"), call.args[1] if len(call.args) > 1 else None)
    index = {None: f"{target.elts[0].id} + 1", 0: f"{target.elts[0].id} + 1", 1: target.elts[0].id}
    first = getattr(start, "value", None)
    if (
        first not in index
        or (start is not None and not isinstance(start, ast.Constant))
        or isinstance(ends.test, ast.BoolOp)
    ):
        return ()
    test = f"{script.source(ends.test)} or {index[first]} == len({call.args[0].id})"
    return (Edit("replace", script.span(ends.test), test),)


RULE = Rule(
    code="HS121",
    name="last-window-lost",
    severity="warning",
    summary="The last, incomplete accumulation window of an epoch is never stepped.",
    why="""
With `(i + 1) % 4 == 0` alone and 10 batches, the optimizer steps after batch 4 and 8. The gradients of the last 2
stay in `.grad`: at the end of training 20% of the data of that epoch are lost, and before another epoch they leak
into its first window, which then holds 6 micro-batches, each divided by 4. Under a scaler they carry the scale of
their time: after a growth or a halving in between they count half or double.

Step for the rest as well (`or i + 1 == len(loader)`, or once more after the loop), and divide each loss by the number
of micro-batches that its own window holds: dividing the 2 by 4 makes their gradient half of what it should be.
""",
    bad=(
        """\
import torch
from torch import nn


def train(model, loader, optimizer, scaler, num_epochs, accumulate=4):
    for epoch in range(num_epochs):
        for i, (x, y) in enumerate(loader):
            with torch.autocast("cuda", dtype=torch.float16):
                loss = nn.functional.cross_entropy(model(x).float(), y) / accumulate
            scaler.scale(loss).backward()
            if (i + 1) % accumulate == 0:  # HS121
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
""",
        """\
import torch
from torch import nn


class Ranker:
    def __init__(self, encoder, args):
        self.encoder, self.args = encoder.cuda(), args
        self.opt = torch.optim.AdamW(encoder.parameters(), lr=2e-5)

    def epoch(self, loader):
        pending = 0
        for query, label in loader:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                score = self.encoder(query)
            loss = nn.functional.mse_loss(score.float(), label)
            (loss / self.args.accum).backward()
            pending += 1
            if pending == self.args.accum:  # HS121
                self.opt.step()
                self.opt.zero_grad()
                pending = 0
""",
    ),
    good=(
        """\
import torch
from torch import nn


def train(model, loader, optimizer, scaler, num_epochs, accumulate=4):
    rest = len(loader) % accumulate or accumulate
    for epoch in range(num_epochs):
        for i, (x, y) in enumerate(loader):
            window = rest if i >= len(loader) - rest else accumulate
            with torch.autocast("cuda", dtype=torch.float16):
                loss = nn.functional.cross_entropy(model(x).float(), y) / window
            scaler.scale(loss).backward()
            if (i + 1) % accumulate == 0 or i + 1 == len(loader):
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
""",
        """\
import torch
from torch import nn


def train(model, loader, optimizer, scaler, accumulate=4):
    rest = len(loader) % accumulate or accumulate
    for i, (x, y) in enumerate(loader):
        window = rest if i >= len(loader) - rest else accumulate
        with torch.autocast("cuda", dtype=torch.float16):
            loss = nn.functional.cross_entropy(model(x).float(), y) / window
        scaler.scale(loss).backward()
        if (i + 1) % accumulate == 0 or i + 1 == len(loader):
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
""",
        """\
import torch
from torch import nn


def epoch(encoder, loader, opt, accum):
    for i, (query, label) in enumerate(loader):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            score = encoder(query)
        (nn.functional.mse_loss(score.float(), label) / accum).backward()
        if i % accum == accum - 1:
            opt.step()
            opt.zero_grad()
    if len(loader) % accum:
        opt.step()
        opt.zero_grad()
""",
    ),
    check=check,
    fix="unsafe",
    fix_note="It ends a window at the last batch too. That needs a loader with a length, and the loss of a short "
    "window is still divided by the full number.",
)
