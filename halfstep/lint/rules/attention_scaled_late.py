"""HS147: a product in fp16 is made smaller only after it was stored."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.lint.finding import Edit
from halfstep.lint.operation import Operation, as_operand, operations
from halfstep.lint.rounding import numbers
from halfstep.lint.rule import Problem, Rule
from halfstep.lint.script import Script
from halfstep.lint.values import Tensor

_PRODUCTS = frozenset({"matmul", "bmm", "einsum"})
_LATE = 4.0
"""A factor from which on it is worth a word: that of a head 16 wide."""


def check(script: Script) -> Iterator[Problem]:
    products = {product.node: product for product in operations(script, _PRODUCTS)}
    for operation in operations(script, frozenset({"div", "true_divide", "mul"})):
        for position in (0, 1) if operation.name == "mul" else (0,):
            tensor = operation.tensor(position)
            product = products.get(tensor.node) if tensor is not None and tensor.node is not None else None
            if tensor is None or product is None or not tensor.is_fp16 or not _is_of_activations(product):
                continue
            factor = _smaller_by(operation, 1 - position)
            if factor >= _LATE:
                yield _problem(script, operation, product, 1 - position, factor)


def _is_of_activations(product: Operation) -> bool:
    """Both factors are computed: a matrix of weights has no scale to move."""
    factors = [value for value in product.operands if isinstance(value, Tensor)]
    return not any("parameter" in factor.tags for factor in factors)


def _smaller_by(operation: Operation, position: int) -> float:
    """How many times smaller the product becomes; 0 where that is not known."""
    keyword = "other" if position else "input"
    known = {abs(number) for number in numbers(operation.argument(keyword, position)) if number}
    if not known:
        return 0.0
    return 1 / max(known) if operation.name == "mul" else min(known)


def _problem(script: Script, operation: Operation, product: Operation, position: int, factor: float) -> Problem:
    edits: tuple[Edit, ...] = ()
    node, inner = operation.node, product.node
    factors = product.nodes[1:] if product.name == "einsum" else product.nodes
    shown = script.source(factors[0]) if factors else "one factor"
    if isinstance(node, ast.BinOp) and isinstance(inner, ast.BinOp) and inner in (node.left, node.right):
        sign = "/" if isinstance(node.op, ast.Div) else "*"
        query, key, scale = (as_operand(script, part) for part in (*factors, operation.nodes[position]))
        edits = (Edit("replace", script.span(node), f"({query} {sign} {scale}) @ {key}"),)
    return Problem(
        inner,
        f"this product is stored in fp16 before it is made {factor:g} times smaller, and is inf beyond 65504; scale "
        f"{shown} before the product",
        edits,
        "unsafe" if edits else None,
    )


RULE = Rule(
    code="HS147",
    name="attention-scaled-late",
    severity="warning",
    summary="Attention scores are multiplied out in fp16 and scaled afterwards, when they may be inf already.",
    why="""
A product of fp16 matrices is added up in fp32 and stored in fp16, where everything beyond 65504 is `inf`. Scores of
heads 64 wide are 8 times larger before the division by `sqrt(64)` than after it, so the overflow comes 8 times earlier
than needed: with weights grown late in training, a raw product of 89,120 is `inf` although 11,140 would have fitted.
The softmax of a row that holds one is NaN.

Scale one factor first: `(q / math.sqrt(d)) @ k.mT`. It costs less as well where sequences are longer than a head is
wide.
`scaled_dot_product_attention` does it right.
""",
    bad=(
        """\
import torch
from torch import nn


class Mixer(nn.Module):
    def __init__(self, channels: int = 128, heads: int = 2) -> None:
        super().__init__()
        self.width = 64
        self.query, self.key = nn.Linear(128, 64), nn.Linear(128, 64)

    def forward(self, x):
        scores = torch.matmul(self.query(x), self.key(x).mT)  # HS147
        scores = scores / self.width**0.5
        return scores.softmax(dim=-1) @ x


layer = Mixer().cuda()
with torch.inference_mode(), torch.autocast("cuda", dtype=torch.float16):
    print(layer(torch.randn(2, 9, 128, device="cuda")))
""",
        """\
import math

import torch


def weights(q: torch.Tensor, k: torch.Tensor, width: int = 128) -> torch.Tensor:
    q, k = q.half(), k.half()
    return (q @ k.transpose(-2, -1) / math.sqrt(128)).softmax(dim=-1)  # HS147
""",
        """\
import torch


def gram(features: torch.Tensor) -> torch.Tensor:
    features = features.half()
    return torch.bmm(features, features.mT) * (1 / 4096)  # HS147
""",
    ),
    good=(
        """\
import torch
from torch import nn


class Mixer(nn.Module):
    def __init__(self, channels: int = 128, heads: int = 2) -> None:
        super().__init__()
        self.width = 64
        self.query, self.key = nn.Linear(128, 64), nn.Linear(128, 64)

    def forward(self, x):
        scores = torch.matmul(self.query(x) / self.width**0.5, self.key(x).mT)
        return scores.softmax(dim=-1) @ x


layer = Mixer().cuda()
with torch.inference_mode(), torch.autocast("cuda", dtype=torch.float16):
    print(layer(torch.randn(2, 9, 128, device="cuda")))
""",
        """\
import math

import torch


def weights(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    q, k = q.bfloat16(), k.bfloat16()
    return (q @ k.transpose(-2, -1) / math.sqrt(128)).softmax(dim=-1)


def similarity(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.half() @ b.half().mT / 0.07
""",
    ),
    check=check,
    fix="unsafe",
    fix_note=(
        "Where `@` and the division stand in one expression, it divides the first factor instead: the last bit rounds"
        " differently."
    ),
)
