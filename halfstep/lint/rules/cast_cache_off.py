"""HS205: the cache of 16-bit weights is turned off around a training forward."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from halfstep.lint.event import Path
from halfstep.lint.finding import Edit
from halfstep.lint.formats import region_enabled
from halfstep.lint.rule import Problem, Rule
from halfstep.lint.script import Script
from halfstep.lint.values import Const, Object

_REASONS = re.compile(
    r"\bcheckpoint\(|checkpoint_sequential|gradient_checkpointing|cuda\.graph|CUDAGraph|graphed|jit\.trace|functional_call"
    r"|torch\.func\b|vmap\(|no_grad|inference_mode|\.data\b"
)
"""What needs the cache off, or saves memory by it: checkpointing, graphs, weights that change within the region."""


def check(script: Script) -> Iterator[Problem]:
    if _REASONS.search(script.text):
        return
    for path in script.paths:
        for region in _trained_without_cache(path):
            edits = _mended(script, region.node)
            yield Problem(
                region.node,
                "with `cache_enabled=False` a weight is cast again at each use, and each copy is kept for backward: "
                "leave the cache on",
                edits,
                "unsafe" if edits else None,
            )


def _trained_without_cache(path: Path) -> Iterator[Object]:
    """The regions without a cache in which a path computes what it takes the backward of."""
    waiting: dict[ast.AST, Object] = {}
    for event in path:
        region = event.region
        if event.what == "forward" and region is not None and _has_no_cache(region):
            waiting[region.node] = region
        elif event.what == "backward":
            yield from waiting.values()
            waiting.clear()


def _has_no_cache(region: Object) -> bool:
    old = region.type.startswith(("torch.cuda.", "torch.cpu."))
    return region_enabled(region) is not False and region.argument("cache_enabled", 2 if old else 3) == Const(False)


def _mended(script: Script, node: ast.AST) -> tuple[Edit, ...]:
    """The call without its ``cache_enabled=False``."""
    if not isinstance(node, ast.Call) or node.lineno != node.end_lineno:
        return ()
    others = [keyword for keyword in node.keywords if keyword.arg != "cache_enabled"]
    if len(others) == len(node.keywords) or any(keyword.arg is None for keyword in others):
        return ()
    parts = [script.source(arg) for arg in node.args]
    parts += [f"{keyword.arg}={script.source(keyword.value)}" for keyword in others]
    return (Edit("replace", script.span(node), f"{script.source(node.func)}({', '.join(parts)})"),)


RULE = Rule(
    code="HS205",
    name="cast-cache-off",
    severity="warning",
    summary="The cache of 16-bit weights is turned off around a training forward.",
    why="""
Autocast keeps the 16-bit copy of each fp32 weight until the region closes, so that a weight is cast once. Without the
cache it is cast at each use, and under grad each copy stays for backward. Counted with torch 2.13 on a layer of 256 x
256 that is used 50 times, as a recurrent net or shared layer is: 101 casts that write 6.28 MiB, against 3 casts and
0.13 MiB. Where each weight is used once, the cache saves nothing: autograd holds the copy anyway.

It has its reasons with activation checkpointing, CUDA graphs, and weights that change within the region; then this
rule is silent.
""",
    bad=(
        """\
import torch
from torch import nn

cell = nn.GRUCell(32, 64).cuda()
opt = torch.optim.AdamW(cell.parameters(), lr=1e-3)


def step(series, target):
    opt.zero_grad()
    with torch.autocast("cuda", dtype=torch.bfloat16, cache_enabled=False):  # HS205
        hidden = None
        for x in series:
            hidden = cell(x, hidden)
    nn.functional.mse_loss(hidden.float(), target).backward()
    opt.step()
""",
        """\
import torch
from torch import nn


class Trainer:
    def __init__(self, net):
        self.net = net.cuda()
        self.opt = torch.optim.SGD(net.parameters(), lr=0.1)
        self.scaler = torch.amp.GradScaler("cuda")

    def step(self, x, y):
        self.opt.zero_grad()
        with torch.autocast("cuda", torch.float16, True, False):  # HS205
            out = self.net(x)
        self.scaler.scale(nn.functional.cross_entropy(out.float(), y)).backward()
        self.scaler.step(self.opt)
        self.scaler.update()
""",
    ),
    good=(
        """\
import torch
from torch import nn

cell = nn.GRUCell(32, 64).cuda()
opt = torch.optim.AdamW(cell.parameters(), lr=1e-3)


def step(series, target):
    opt.zero_grad()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        hidden = None
        for x in series:
            hidden = cell(x, hidden)
    nn.functional.mse_loss(hidden.float(), target).backward()
    opt.step()
""",
        """\
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


def step(net, opt, x, y):
    opt.zero_grad()
    with torch.autocast("cuda", dtype=torch.bfloat16, cache_enabled=False):
        out = net.head(checkpoint(net.body, x, use_reentrant=False))
    nn.functional.mse_loss(out.float(), y).backward()
    opt.step()
""",
    ),
    check=check,
    fix="unsafe",
    fix_note="It leaves the argument out. Code elsewhere that captures the region in a graph needs it.",
)
