"""HS204: the backward pass runs inside the autocast region."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.lint.accumulation import is_step
from halfstep.lint.event import Event, Path
from halfstep.lint.finding import Edit
from halfstep.lint.formats import region_enabled
from halfstep.lint.rule import Problem, Rule
from halfstep.lint.script import Script
from halfstep.lint.values import Object


def check(script: Script) -> Iterator[Problem]:
    for path in script.paths:
        for event in path:
            region = event.region
            if event.what != "backward" or region is None or region_enabled(region) is False:
                continue
            if _steps_inside(path, region):
                continue  # the whole step is in there, which is one mistake and not two
            edits = _mended(script, event)
            yield Problem(
                event.node,
                "backward runs inside the region, which casts once more what the forward pass has decided: close the "
                "region after the loss",
                edits,
                "safe" if edits else None,
            )


def _steps_inside(path: Path, region: Object) -> bool:
    return any(is_step(event) and any(context.node is region.node for context in event.contexts) for event in path)


def _mended(script: Script, event: Event) -> tuple[Edit, ...]:
    """Put a backward that ends the block after it."""
    statement = script.statement(event.node)
    block = script.parents[statement]
    if (
        not isinstance(block, ast.With)
        or len(block.items) != 1
        or len(block.body) < 2
        or block.body[-1] is not statement
    ):
        return ()
    if not isinstance(statement, ast.Expr) or block.body[-2].end_lineno == statement.lineno:
        return ()
    region = event.region
    opened = block.items[0].context_expr
    if region is None or (isinstance(opened, ast.Call) and opened is not region.node):
        return ()
    return (
        Edit("delete", script.span(statement)),
        Edit("after", script.span(block), script.source(statement)),
    )


RULE = Rule(
    code="HS204",
    name="backward-inside-region",
    severity="warning",
    summary="The backward pass runs inside the autocast region.",
    why="""
Autograd already runs each backward operation in the format of its forward one. Inside the region autocast applies to
the products of the backward pass as well, and casts those down that the forward pass kept in fp32: measured with
torch 2.13, the weight gradient of a linear layer in an fp32 island comes back rounded to bf16, off by 1.9e-3 of its
norm, and exact when backward runs outside. The 16-bit copies of all weights, 2 bytes a parameter, also live until the
region closes.

Close the region after the loss.
""",
    bad=(
        """\
import torch
from torch import nn


def train(net, loader, opt, scaler):
    for x, y in loader:
        opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = nn.functional.cross_entropy(net(x).float(), y)
            scaler.scale(loss).backward()  # HS204
        scaler.step(opt)
        scaler.update()
""",
        """\
import torch
from torch import nn


class Regressor:
    def __init__(self, net):
        self.net = net.cuda()
        self.adam = torch.optim.Adam(net.parameters(), lr=1e-3)
        self.region = torch.autocast("cuda", dtype=torch.bfloat16)

    def run(self, x, y):
        self.adam.zero_grad()
        with self.region:
            out = self.net(x)
            nn.functional.mse_loss(out.float(), y).backward()  # HS204
        self.adam.step()
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
            loss = nn.functional.cross_entropy(net(x).float(), y)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
""",
        """\
import torch
from torch import nn


def step(net, opt, x, y):
    opt.zero_grad()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out = net(x)
        with torch.autocast("cuda", enabled=False):
            nn.functional.mse_loss(out.float(), y).backward()
    opt.step()
""",
    ),
    check=check,
    fix="safe",
    fix_note="It puts a backward that is the last statement of the region right after it.",
)
