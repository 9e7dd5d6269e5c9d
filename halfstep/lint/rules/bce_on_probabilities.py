"""HS148: binary cross-entropy of probabilities inside an autocast region."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.lint.event import Event
from halfstep.lint.finding import Edit
from halfstep.lint.formats import region_devices, region_formats
from halfstep.lint.rule import Problem, Rule
from halfstep.lint.script import Script
from halfstep.lint.values import Object, Tensor

_FUNCTION, _CLASS = "torch.nn.functional.binary_cross_entropy", "torch.nn.BCELoss"


def check(script: Script) -> Iterator[Problem]:
    losses = [event for event in script.sites if _is_bce(event)]
    for event in losses:
        if not region_formats(event.region) or event.region is None:
            continue
        first = event.args[0] if event.args else None
        if region_devices(event.region) == {"cpu"} and not (isinstance(first, Tensor) and first.is_16_bit):
            continue
        alone = len({id(other.node) for other in losses if other.receiver == event.receiver}) == 1
        edits = _edits(script, event, alone)
        yield Problem(
            event.node,
            "binary cross-entropy of probabilities raises in a CUDA region, and in 16 bit a probability near 1 is 1; "
            "pass logits to binary_cross_entropy_with_logits",
            edits,
            "unsafe" if edits else None,
        )


def _is_bce(event: Event) -> bool:
    if event.what == "call":
        return event.name == _FUNCTION
    return event.what == "forward" and isinstance(event.receiver, Object) and event.receiver.type == _CLASS


def _edits(script: Script, event: Event, alone: bool) -> tuple[Edit, ...]:
    """Where the sigmoid stands in the call, the loss takes its argument, and the loss its form for logits."""
    node = event.node
    if not isinstance(node, ast.Call) or not node.args or isinstance(node.args[0], ast.Starred):
        return ()
    logits = _under_sigmoid(script, node.args[0])
    name = node.func if event.what == "call" else _made(event)
    if logits is None or not isinstance(name, ast.Attribute) or not (alone or event.what == "call"):
        return ()
    better = "binary_cross_entropy_with_logits" if event.what == "call" else "BCEWithLogitsLoss"
    return (
        Edit("replace", script.span(node.args[0]), script.source(logits)),
        Edit("replace", script.span(name), f"{script.source(name.value)}.{better}"),
    )


def _under_sigmoid(script: Script, node: ast.expr) -> ast.expr | None:
    if not isinstance(node, ast.Call) or node.keywords:
        return None
    if script.names.qualified(node.func) in {"torch.sigmoid", "torch.nn.functional.sigmoid"} and len(node.args) == 1:
        return node.args[0]
    is_method = isinstance(node.func, ast.Attribute) and node.func.attr == "sigmoid" and not node.args
    return node.func.value if is_method and isinstance(node.func, ast.Attribute) else None


def _made(event: Event) -> ast.expr | None:
    made = event.receiver.node if isinstance(event.receiver, Object) else None
    return made.func if isinstance(made, ast.Call) else None


RULE = Rule(
    code="HS148",
    name="bce-on-probabilities",
    severity="error",
    summary="binary_cross_entropy or BCELoss is used inside an autocast region.",
    why="""
In a CUDA region `binary_cross_entropy` and `nn.BCELoss` raise `binary_cross_entropy and torch.nn.BCELoss are unsafe to
autocast`, whatever they are given. A CPU region takes them to fp32, but the sigmoid before was rounded to 16 bit: in
bf16 every probability above 1 - 1.95e-3 is 1. The loss of a wrong one with a logit of 7 is then 100, where torch cuts
it off, instead of 7.0.

`binary_cross_entropy_with_logits` and `nn.BCEWithLogitsLoss` take the logits, are computed in fp32 in both regions,
and are exact where the sigmoid saturates. Leave the sigmoid out of the model, and take it where probabilities are
wanted.
""",
    bad=(
        """\
import torch
import torch.nn.functional as F
from torch import nn

net = nn.Linear(20, 1).cuda()


@torch.inference_mode()
def evaluate(x, y):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        return F.binary_cross_entropy(torch.sigmoid(net(x)), y)  # HS148
""",
        """\
import torch
from torch import nn


def train(net, loader):
    criterion = nn.BCELoss()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            p = net(x.cuda()).sigmoid()
            loss = criterion(p, y.cuda())  # HS148
        loss.backward()
        optimizer.step()
""",
        """\
import torch
from torch import nn

net = nn.Linear(20, 1)
x, y = torch.randn(8, 20), torch.ones(8, 1)
with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
    print(nn.BCELoss()(net(x).sigmoid(), y))  # HS148
""",
    ),
    good=(
        """\
import torch
import torch.nn.functional as F
from torch import nn

net = nn.Linear(20, 1).cuda()


@torch.inference_mode()
def evaluate(x, y):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        return F.binary_cross_entropy_with_logits(net(x), y)
""",
        """\
import torch
from torch import nn


def train(net, loader):
    criterion = nn.BCELoss()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = net(x.cuda())
        loss = criterion(logits.float().sigmoid(), y.cuda())
        loss.backward()
        optimizer.step()
""",
    ),
    check=check,
    fix="unsafe",
    fix_note=(
        "Where the sigmoid stands in the call, it is left out and the loss takes logits. The value of the loss changes"
        " in the last digits, and where a probability had saturated."
    ),
)
