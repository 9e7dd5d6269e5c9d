"""HS201: a loss scaler around regions that compute in bf16, which needs none."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.lint.event import Path
from halfstep.lint.finding import Edit
from halfstep.lint.formats import region_enabled, region_formats
from halfstep.lint.rule import Problem, Rule
from halfstep.lint.scaling import is_on, used_scaler
from halfstep.lint.script import Script
from halfstep.lint.values import Object


def check(script: Script) -> Iterator[Problem]:
    formats: dict[Object, set[frozenset[str]]] = {}
    for path in script.paths:
        computed = _formats(path)
        for event in path:
            scaler = used_scaler(event)
            if scaler is not None and is_on(scaler):
                formats.setdefault(scaler, set()).update(computed)
    for scaler, computed in formats.items():
        if computed == {frozenset({"bf16"})}:
            edits = _mended(script, scaler.node)
            yield Problem(
                scaler.node,
                "bf16 reaches as far as fp32, so its gradients need no scale: leave the scaler out, or pass "
                "`enabled=dtype is torch.float16`",
                edits,
                "unsafe" if edits else None,
            )


def _formats(path: Path) -> set[frozenset[str]]:
    """In what the regions of a path compute, one entry for each kind; an empty one for a region that is not known."""
    regions = {context for event in path for context in event.contexts if context.kind == "region"}
    return {region_formats(region) for region in regions if region_enabled(region) is not False}


def _mended(script: Script, node: ast.AST) -> tuple[Edit, ...]:
    text = script.source(node)
    if not isinstance(node, ast.Call) or not text.endswith(")") or "\n" in text:
        return ()
    if any(keyword.arg in {"enabled", None} for keyword in node.keywords):
        return ()
    comma = ", " if node.args or node.keywords else ""
    return (Edit("replace", script.span(node), f"{text[:-1].rstrip(', ')}{comma}enabled=False)"),)


RULE = Rule(
    code="HS201",
    name="scaler-with-bf16",
    severity="warning",
    summary="A loss scaler around regions that compute in bf16, which needs none.",
    why="""
A loss scale keeps small gradients above 6.0e-8, the smallest number of fp16. bf16 has the range of fp32, down to
1.2e-38, so there is nothing to lift. The scaler still reads and writes every gradient once in `unscale_`, 8 bytes a
parameter and step, and `step` of an optimizer that is not fused waits for the device once.

What it also does is to skip a step whose gradients are not finite. Without it, test the norm that `clip_grad_norm_`
gives, and step only when it is finite.
""",
    bad=(
        """\
import torch
from torch import nn


class Pretraining:
    def __init__(self, net):
        self.net = net.cuda()
        self.opt = torch.optim.AdamW(net.parameters(), lr=3e-4)
        self.scaler = torch.amp.GradScaler("cuda")  # HS201

    def step(self, tokens, target):
        self.opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = self.net(tokens)
        loss = nn.functional.cross_entropy(logits.float(), target)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.opt)
        self.scaler.update()
""",
        """\
import torch
from torch import nn
from torch.amp import GradScaler, autocast

net = nn.Linear(30, 5).cuda()
opt = torch.optim.SGD(net.parameters(), lr=1e-3)
gs = GradScaler()  # HS201
for _ in range(100):
    x, y = torch.randn(64, 30, device="cuda"), torch.randint(0, 5, (64,), device="cuda")
    opt.zero_grad()
    with autocast("cuda", torch.bfloat16):
        out = net(x)
    gs.scale(nn.functional.cross_entropy(out.float(), y)).backward()
    gs.step(opt)
    gs.update()
""",
    ),
    good=(
        """\
import torch
from torch import nn


class Pretraining:
    def __init__(self, net):
        self.net = net.cuda()
        self.opt = torch.optim.AdamW(net.parameters(), lr=3e-4)

    def step(self, tokens, target):
        self.opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = self.net(tokens)
        loss = nn.functional.cross_entropy(logits.float(), target)
        loss.backward()
        self.opt.step()
""",
        """\
import torch
from torch import nn


def train(net, opt, loader, precision):
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[precision]
    scaler = torch.amp.GradScaler("cuda", enabled=dtype is torch.float16)
    for x, y in loader:
        opt.zero_grad()
        with torch.autocast("cuda", dtype=dtype):
            out = net(x)
        scaler.scale(nn.functional.mse_loss(out.float(), y)).backward()
        scaler.step(opt)
        scaler.update()
""",
        """\
import torch
from torch import nn


def train(net, opt, loader):
    for x, y in loader:
        opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            out = net(x)
        nn.functional.mse_loss(out.float(), y).backward()
        norm = nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        if torch.isfinite(norm):
            opt.step()
""",
    ),
    check=check,
    fix="unsafe",
    fix_note="It passes `enabled=False`. Steps whose gradients are not finite are no longer skipped then.",
)
