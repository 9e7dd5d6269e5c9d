"""HS158: values of one format are written by index into a tensor of another."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.formats import SIXTEEN_BIT
from halfstep.lint.event import Event
from halfstep.lint.finding import Edit
from halfstep.lint.operation import as_operand, is_plain
from halfstep.lint.rule import Problem, Rule
from halfstep.lint.script import Script
from halfstep.lint.values import Items, Tensor, Value

_SOURCES = {
    "index_add_": ("source", 2),
    "index_copy_": ("source", 2),
    "index_reduce_": ("source", 2),
    "index_put_": ("values", 1),
    "scatter_": ("src", 2),
    "scatter_add_": ("src", 2),
    "scatter_reduce_": ("src", 2),
    "masked_scatter_": ("source", 1),
}
_FLOATS = frozenset({"fp16", "bf16", "16 bit", "fp32", "fp64"})


def check(script: Script) -> Iterator[Problem]:
    for event in script.sites:
        written = _written(event)
        if written is None:
            continue
        buffer, source, buffer_node, source_node = written
        if not _differ(buffer, source):
            continue
        edits: tuple[Edit, ...] = ()
        is_wider = buffer.formats <= {"fp32", "fp64"}
        if is_wider and buffer_node is not None and source_node is not None and is_plain(buffer_node):
            code = f"{as_operand(script, source_node)}.to({script.source(buffer_node)}.dtype)"
            edits = (Edit("replace", script.span(source_node), code),)
        place = script.source(buffer_node) if buffer_node is not None else "the buffer"
        yield Problem(
            event.node,
            f"{place} is {_name(buffer)} and what is written into it by index is {_name(source)}: this raises; cast "
            "the values, or make the buffer in their format",
            edits,
            "safe" if edits else None,
        )


def _written(event: Event) -> tuple[Tensor, Tensor, ast.expr | None, ast.expr | None] | None:
    """The buffer, what is written into it by index, and their expressions."""
    node = event.node
    if not isinstance(event.receiver, Tensor):
        return None
    if event.what == "store" and isinstance(event.args[1], Tensor) and _is_advanced(event.args[0]):
        target = node.targets[0] if isinstance(node, ast.Assign) and len(node.targets) == 1 else None
        if isinstance(target, ast.Subscript) and isinstance(node, ast.Assign):
            return event.receiver, event.args[1], target.value, node.value
        return None
    place = _SOURCES.get(event.name) if event.what == f"tensor.{event.name}" else None
    source = event.argument(*place) if place is not None else None
    if place is None or not isinstance(source, Tensor):
        return None
    buffer_node = node.func.value if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else None
    return event.receiver, source, buffer_node, _argument_node(node, *place)


def _argument_node(call: ast.AST, name: str, position: int) -> ast.expr | None:
    if not isinstance(call, ast.Call) or any(isinstance(arg, ast.Starred) for arg in call.args):
        return None
    named = next((keyword.value for keyword in call.keywords if keyword.arg == name), None)
    return named or (call.args[position] if position < len(call.args) else None)


def _is_advanced(index: Value) -> bool:
    """Whether it is a tensor of positions, or a mask: a number or a slice would copy, and cast on the way."""
    if isinstance(index, Items):
        return any(_is_advanced(item) for item in index.items)
    return isinstance(index, Tensor) and index.formats <= {"int", "bool"} and not index.tags & {"number", "element"}


def _differ(buffer: Tensor, source: Tensor) -> bool:
    """Whether the two surely have different floating-point formats, one of them of 16 bit."""
    if "assumed" in buffer.tags | source.tags or "number" in source.tags:
        return False
    known = buffer.formats and source.formats and buffer.formats | source.formats <= _FLOATS
    of_16_bit = buffer.is_16_bit or source.is_16_bit
    return bool(known) and of_16_bit and not _possible(buffer) & _possible(source)


def _possible(tensor: Tensor) -> frozenset[str]:
    return tensor.formats | SIXTEEN_BIT if "16 bit" in tensor.formats else tensor.formats


def _name(tensor: Tensor) -> str:
    return " or ".join(sorted(tensor.formats))


RULE = Rule(
    code="HS158",
    name="half-into-float-buffer",
    severity="error",
    summary="A float32 buffer is filled by index with 16-bit values, which raises.",
    why="""
`canvas[index] = values` with a tensor or a mask as the index raises `Index put requires the source and destination
dtypes match`; `index_add_`, `index_copy_`, `scatter_` and `masked_scatter_` raise too. None of them casts, not even in
an autocast region, because operations in place are not on its lists. `canvas[2:5] = values` does cast, which makes
the error look random. A buffer made by `torch.zeros` is float32; what a layer of the region gives is 16 bit.

Cast the values to the format of the buffer, `canvas[index] = values.to(canvas.dtype)`, which is exact from 16 bit to
float32, or make the buffer with `values.new_zeros(...)`. A sum of many values belongs into float32: fp16 stops at
65504.
""",
    bad=(
        """\
import torch
from torch import nn


class Pillars(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.points = nn.Linear(4, 8)

    def forward(self, points):
        features = self.points(points)
        canvas = torch.zeros(256, 8, device=points.device)
        cells = torch.randperm(256, device=points.device)[: len(points)]
        canvas[cells] = features  # HS158
        return canvas


net = Pillars().cuda()
with torch.inference_mode(), torch.autocast("cuda", dtype=torch.float16):
    print(net(torch.randn(40, 4, device="cuda")).shape)
""",
        """\
import torch
from torch import nn

message = nn.Linear(16, 16).bfloat16()


def gather(nodes: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    inbox = torch.zeros(len(nodes), 16)
    sent = message(nodes[source].bfloat16())
    inbox.index_add_(0, target, sent)  # HS158
    return inbox
""",
    ),
    good=(
        """\
import torch
from torch import nn


class Pillars(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.points = nn.Linear(4, 8)

    def forward(self, points):
        features = self.points(points)
        canvas = torch.zeros(256, 8, device=points.device)
        cells = torch.randperm(256, device=points.device)[: len(points)]
        canvas[cells] = features.to(canvas.dtype)
        return canvas


net = Pillars().cuda()
with torch.inference_mode(), torch.autocast("cuda", dtype=torch.float16):
    print(net(torch.randn(40, 4, device="cuda")).shape)
""",
        """\
import torch
from torch import nn


class Pillars(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.points = nn.Linear(4, 8)

    def forward(self, points):
        features = self.points(points)
        canvas = torch.zeros(256, 8, device=points.device)
        cells = torch.randperm(256, device=points.device)[: len(points)]
        canvas[cells] = features.to(canvas.dtype)
        other = features.new_zeros(256, 8)
        other[cells] = features
        return canvas, other


net = Pillars().cuda()
with torch.inference_mode(), torch.autocast("cuda", dtype=torch.float16):
    print(net(torch.randn(40, 4, device="cuda"))[0].shape)
""",
        """\
import torch
from torch import nn

message = nn.Linear(16, 16).bfloat16()


def fill(nodes: torch.Tensor) -> torch.Tensor:
    inbox = torch.zeros(64, 16)
    sent = message(nodes.bfloat16())
    inbox[:32] = sent
    inbox[40] = sent[0]
    for row in torch.arange(4):
        inbox[row] = sent[row]
    return inbox
""",
    ),
    check=check,
    fix="safe",
    fix_note="The line raised; with `.to(buffer.dtype)` it casts 16-bit values to the wider buffer, which is exact.",
)
