"""HS141: two masks of the lowest number are added up, which is beyond the format."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.lint.operation import operations
from halfstep.lint.rule import Problem, Rule
from halfstep.lint.script import Script
from halfstep.lint.values import Tensor, Value, is_lowest


def check(script: Script) -> Iterator[Problem]:
    for operation in operations(script, frozenset({"add"})):
        result = operation.event.result
        if not isinstance(result, Tensor) or not all(_is_low(operand) for operand in operation.operands[:2]):
            continue
        # What the bound of a tensor's own format is added to may be in any: twice the lowest number fits none.
        if result.is_16_bit or not result.formats:
            yield Problem(
                operation.node,
                "both sides hold torch.finfo(...).min: their sum overflows to -inf, and a row that is masked "
                "completely becomes NaN in the softmax; join the masks with | and fill once",
            )


def _is_low(value: Value) -> bool:
    return is_lowest(value) or (isinstance(value, Tensor) and "lowest" in value.tags)


RULE = Rule(
    code="HS141",
    name="finfo-min-added",
    severity="warning",
    summary="Two masks that hold torch.finfo(dtype).min are added, which overflows to -inf.",
    why="""
`torch.finfo(dtype).min` is the lowest number there is: -65504 in fp16. Added to a score above -16 it stays
finite, because its neighbour is 32 away. Added to a second such mask it is -131008, which is `-inf` in fp16; in bf16
twice -3.39e38 is `-inf` too. The softmax of a row that both masks cover holds nothing but `-inf` and is NaN, where a
row of equal lowest numbers would be uniform, and the NaN reaches every gradient.

Join the masks while they are boolean, and fill once: `scores.masked_fill(causal | padding,
torch.finfo(scores.dtype).min)`.
""",
    bad=(
        """\
import torch
from torch import nn


class Scores(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x, future, padding):
        q = self.query(x) * x.shape[-1] ** -0.5
        scores = q @ self.key(x).transpose(1, 2)
        lowest = torch.finfo(scores.dtype).min
        causal_bias = torch.zeros_like(scores).masked_fill(future, lowest)
        padding_bias = torch.zeros_like(scores).masked_fill(padding, lowest)
        scores = scores + (causal_bias + padding_bias)  # HS141
        return scores.softmax(dim=-1)


def attend(x, future, padding):
    with torch.inference_mode(), torch.autocast("cuda", dtype=torch.float16):
        return Scores(64).cuda()(x, future, padding)
""",
        """\
import torch

dtype = torch.bfloat16
lowest = torch.finfo(dtype).min


def bias_of(is_future: torch.Tensor, is_padding: torch.Tensor) -> torch.Tensor:
    bias = is_future.to(torch.bfloat16) * lowest
    bias += is_padding.to(torch.bfloat16)[:, None] * lowest  # HS141
    return bias
""",
    ),
    good=(
        """\
import torch
from torch import nn


class Scores(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x, future, padding):
        q = self.query(x) * x.shape[-1] ** -0.5
        scores = q @ self.key(x).transpose(1, 2)
        lowest = torch.finfo(scores.dtype).min
        bias = torch.zeros_like(scores).masked_fill(future | padding, lowest)
        scores = scores + bias
        return scores.softmax(dim=-1)


def attend(x, future, padding):
    with torch.inference_mode(), torch.autocast("cuda", dtype=torch.float16):
        return Scores(64).cuda()(x, future, padding)
""",
        """\
import torch
from torch import nn


class Scores(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x, future, padding):
        q = self.query(x) * x.shape[-1] ** -0.5
        scores = q @ self.key(x).transpose(1, 2)
        bias = torch.zeros_like(scores).masked_fill(future | padding, torch.finfo(scores.dtype).min)
        return (scores + bias).softmax(dim=-1)


def attend(x, future, padding):
    with torch.inference_mode(), torch.autocast("cuda", dtype=torch.float16):
        return Scores(64).cuda()(x, future, padding)
""",
        """\
import torch


def bias_of(is_future: torch.Tensor, is_padding: torch.Tensor) -> torch.Tensor:
    half_of_lowest = torch.finfo(torch.float16).min / 2
    bias = is_future.to(torch.float16) * half_of_lowest
    return bias + is_padding.to(torch.float16)[:, None] * half_of_lowest
""",
    ),
    check=check,
)
