"""HS133: a cast to float32 that the next operation undoes, because the region casts its inputs down."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.lint import vocabulary
from halfstep.lint.cast import spelled_format
from halfstep.lint.event import Event
from halfstep.lint.formats import region_formats
from halfstep.lint.operation import operations
from halfstep.lint.rule import Problem, Rule
from halfstep.lint.script import Script
from halfstep.lint.values import Object, Tensor, Value

_SHAPES = {"T", "mT", "transpose", "view", "reshape", "permute", "t", "flatten", "contiguous", "unsqueeze", "squeeze"}
_16_BIT = {"fp16", "bf16", "16 bit"}


def check(script: Script) -> Iterator[Problem]:
    casts = {event.node: event for event in script.sites if event.what == "cast" and _is_to_float(event)}
    done: set[ast.AST] = set()
    for event, nodes, values in _products(script):
        for node, value in zip(nodes, values, strict=False):
            source = _source_of(script, event, node, value)
            cast = casts.get(source) if source is not None else None
            if cast is None or cast.region != event.region or event.node in done:
                continue
            done.add(event.node)
            formats = " or ".join(sorted(region_formats(event.region)))
            yield Problem(
                cast.node,
                f"the region casts this back to {formats} for the product that follows: to compute it in float32, open "
                "torch.autocast(device_type, enabled=False) around it",
            )


def _is_to_float(event: Event) -> bool:
    """Whether a cast takes something to float32 that came out of a model or is 16 bit; an image of bytes needs it."""
    receiver = event.receiver
    is_computed = isinstance(receiver, Tensor) and ("forward" in receiver.tags or receiver.is_16_bit)
    return is_computed and spelled_format(event) == "fp32" and bool(region_formats(event.region) & _16_BIT)


def _products(script: Script) -> Iterator[tuple[Event, tuple[ast.expr, ...], tuple[Value, ...]]]:
    """Every operation that a region runs in 16 bit: the expressions that it is given, and what they are worth."""
    for operation in operations(script, vocabulary.LOWER_PRECISION):
        yield operation.event, operation.nodes, operation.operands
    for event in script.sites:
        layer = event.receiver.type.rpartition(".")[2] if isinstance(event.receiver, Object) else ""
        if event.what == "forward" and layer in vocabulary.LOWER_PRECISION_CLASSES and isinstance(event.node, ast.Call):
            yield event, tuple(event.node.args), event.args


def _source_of(script: Script, product: Event, node: ast.expr, value: Value) -> ast.AST | None:
    """Where an operand was computed: in the expression itself, or in the statement right before."""
    while True:
        if isinstance(node, ast.Attribute) and node.attr in _SHAPES:
            node = node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _SHAPES:
            node = node.func.value
        else:
            break
    if not isinstance(node, ast.Name) or not isinstance(value, Tensor) or value.node is None:
        return node
    here = script.statement(product.node)
    around = script.parents[here]
    for block in (getattr(around, name, []) for name in ("body", "orelse", "finalbody")):
        if here in block[1:] and script.statement(value.node) is block[block.index(here) - 1]:
            return value.node
    return None


RULE = Rule(
    code="HS133",
    name="float-undone",
    severity="warning",
    summary="A .float() inside a region right before a product, which the region casts down again.",
    why="""
In a region, products (linear, conv, matmul, einsum, attention) take their inputs in the region's format whatever format
they have. `self.head(h.float())` computes in 16 bit exactly as `self.head(h)` does and answers in 16 bit; the cast only
costs a copy. On torch 2.13, `a.float() @ a.float()` under bf16 has an error of 3.9e-3 of the largest entry for two
512 x 512 matrices of normal values. In fp32 it is 4.2e-7.

Where the product should be exact, turn autocast off around it and cast inside:
`with torch.autocast(h.device.type, enabled=False): logits = self.head(h.float())`. Otherwise take the cast away.
""",
    bad=(
        """\
import torch
from torch import nn


class Classifier(nn.Module):
    def __init__(self, width, classes):
        super().__init__()
        self.body, self.head = nn.Linear(width, 128), nn.Linear(128, classes)

    def forward(self, x):
        h = self.body(x).relu()
        h = h.float()  # HS133
        return self.head(h)


net = Classifier(20, 4).cuda()
with torch.inference_mode(), torch.autocast("cuda", dtype=torch.bfloat16):
    print(net(torch.randn(2, 20, device="cuda")).argmax(-1))
""",
        """\
import torch
from torch import nn
from torch.nn import functional as F

encoder, table = nn.Linear(32, 16).cuda(), nn.Parameter(torch.randn(1000, 16, device="cuda"))
opt = torch.optim.Adam([*encoder.parameters(), table], lr=1e-3)


def step(x, target):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        code = encoder(x)
        scores = F.linear(code.to(torch.float32), table)  # HS133
    loss = F.cross_entropy(scores.float(), target)
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
    ),
    good=(
        """\
import torch
from torch import nn


class Classifier(nn.Module):
    def __init__(self, width, classes):
        super().__init__()
        self.body, self.head = nn.Linear(width, 128), nn.Linear(128, classes)

    def forward(self, x):
        h = self.body(x).relu()
        with torch.autocast(h.device.type, enabled=False):
            return self.head(h.float())


net = Classifier(20, 4).cuda()
with torch.inference_mode(), torch.autocast("cuda", dtype=torch.bfloat16):
    print(net(torch.randn(2, 20, device="cuda")).argmax(-1))
""",
        """\
import torch
from torch import nn

body, head = nn.Linear(20, 128).cuda(), nn.Linear(128, 4).cuda()
with torch.inference_mode(), torch.autocast("cuda", dtype=torch.bfloat16):
    h = body(torch.randn(2, 20, device="cuda"))
    with torch.autocast("cuda", enabled=False):
        logits = head(h.float())
""",
        """\
import torch
from torch import nn

net = nn.Conv2d(3, 8, 3).cuda()


@torch.inference_mode()
def features(pixels: torch.Tensor):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        maps = net(pixels.float() / 255)
        return maps.float().mean(dim=(2, 3))
""",
    ),
    check=check,
)
