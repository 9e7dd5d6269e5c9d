"""HS145: fp16 values are squared, or their exponential is taken, in fp16."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.lint.finding import Edit
from halfstep.lint.operation import Operation, in_float, operations
from halfstep.lint.rounding import numbers
from halfstep.lint.rule import Problem, Rule
from halfstep.lint.script import Script
from halfstep.lint.values import Tensor

_EXPONENTIALS = frozenset({"exp", "expm1", "exp2"})


def check(script: Script) -> Iterator[Problem]:
    for operation in operations(script, frozenset({"mul", "pow", "square", *_EXPONENTIALS})):
        tensor, result = operation.tensor(), operation.event.result
        if tensor is None or not isinstance(result, Tensor) or not (tensor.is_fp16 and result.is_fp16):
            continue
        if tensor.tags & {"assumed", "probability", "bounded", "gradient"}:
            continue
        if operation.name in _EXPONENTIALS:
            if _may_be_large(tensor, operation):
                yield _problem(script, operation, "an exponential", "from 11.1 on it is inf (largest 65504)")
        elif _is_square(operation):
            yield _problem(script, operation, "a square", "from 256 on it is inf, below 1.7e-4 it is 0")


def _is_square(operation: Operation) -> bool:
    if operation.name == "mul":
        return len(operation.nodes) == 2 and ast.dump(operation.nodes[0]) == ast.dump(operation.nodes[1])
    if operation.name == "pow":
        exponents = numbers(operation.argument("exponent", 1))
        return bool(exponents) and min(exponents) >= 2
    return True


def _may_be_large(tensor: Tensor, operation: Operation) -> bool:
    """Not the exponential of a difference or of a negative, as ``exp(x - x.max())`` and ``exp(-distance)`` are."""
    argument = operation.nodes[0] if operation.nodes else None
    if isinstance(argument, ast.UnaryOp) or "log_probability" in tensor.tags:
        return False
    return not any(isinstance(n, ast.BinOp) and isinstance(n.op, ast.Sub) for n in (argument, tensor.node))


def _problem(script: Script, operation: Operation, what: str, limits: str) -> Problem:
    edits: tuple[Edit, ...] = ()
    if operation.nodes and not operation.is_in_place:
        both = operation.nodes if operation.name == "mul" else operation.nodes[:1]
        edits = tuple(in_float(script, node) for node in both)
    shown = script.source(operation.nodes[0]) if operation.nodes else "it"
    return Problem(
        operation.node,
        f"{what} of {shown} is taken in fp16: {limits}; take {shown} to float32 first",
        edits,
        "unsafe" if edits else None,
    )


RULE = Rule(
    code="HS145",
    name="square-in-fp16",
    severity="warning",
    summary="fp16 values are squared, or their exponential is taken, without a cast to float32.",
    why="""
The square of an fp16 number fits fp16 only between 1.7e-4 and 255.9: above, it passes 65504 and is `inf`; below, it is
0. The exponential passes 65504 at 11.09. In a norm written by hand the overflow does not even show: the mean square is
`inf`, one over its root is 0, and the activations become exact zeros, all of them finite.

CUDA autocast takes `x ** 2`, `x.pow(2)`, `x.square()` and `exp` to fp32, and leaves `x * x`, `x.square_()` and `exp2`
in fp16. Outside a region, and in a region of the CPU, all of them stay in fp16.

Take the values to float32 before the square, and the result back at the end: `y = x.float(); y = y *
torch.rsqrt(y.square().mean(-1, keepdim=True) + eps); return y.to(x.dtype)`.
""",
    bad=(
        """\
import torch
from torch import nn


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x):
        mean_square = (x * x).mean(-1, keepdim=True)  # HS145
        return x * torch.rsqrt(mean_square + self.eps) * self.weight


net = nn.Sequential(nn.Linear(16, 64), RMSNorm(64), nn.Linear(64, 2)).cuda().eval()
with torch.inference_mode(), torch.autocast("cuda", dtype=torch.float16):
    print(net(torch.randn(4, 16, device="cuda")))
""",
        '''\
import torch


def boxes(raw: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
    """Sizes are predicted as logarithms."""
    raw = raw.half()
    return torch.exp(raw[..., 2:]) * anchors  # HS145


def energy(frames: torch.Tensor) -> torch.Tensor:
    frames = frames.to(torch.float16)
    return frames.pow(2).mean(dim=-1)  # HS145
''',
    ),
    good=(
        """\
import torch
from torch import nn


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x):
        wide = x.float()
        mean_square = (wide * wide).mean(-1, keepdim=True)
        return (wide * torch.rsqrt(mean_square + self.eps) * self.weight).to(x.dtype)


net = nn.Sequential(nn.Linear(16, 64), RMSNorm(64), nn.Linear(64, 2)).cuda().eval()
with torch.inference_mode(), torch.autocast("cuda", dtype=torch.float16):
    print(net(torch.randn(4, 16, device="cuda")))
""",
        """\
import torch
from torch import nn

head = nn.Linear(32, 8).cuda()


@torch.inference_mode()
def summary(x):
    with torch.autocast("cuda", dtype=torch.float16):
        z = head(x)
        energy = z.pow(2).mean()
        width = torch.exp(z)
    gate = z.sigmoid()
    weights = torch.exp(z - z.amax(-1, keepdim=True))
    return energy, width, gate * gate, weights, z.bfloat16().square()
""",
    ),
    check=check,
    fix="unsafe",
    fix_note="It takes the values to float32 first. The result is float32 from there on, which takes more memory.",
)
