"""HS142: an eps that is zero in the format of the tensor that it should guard."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.lint.finding import Edit
from halfstep.lint.operation import Operation, in_float, operations
from halfstep.lint.rounding import in_a_format, numbers, vanishes
from halfstep.lint.rule import Problem, Rule
from halfstep.lint.script import Script
from halfstep.lint.values import Tensor, Value

_GUARDS = {"add": ("other", 1), "clamp": ("min", 1), "clip": ("min", 1), "clamp_min": ("min", 1)}


def check(script: Script) -> Iterator[Problem]:
    for operation in operations(script, frozenset(_GUARDS)):
        position, eps, place = _guarded(operation)
        tensor, known = operation.tensor(position), numbers(eps)
        if tensor is None or not tensor.is_16_bit or "assumed" in tensor.tags:
            continue
        if not in_a_format(known, tensor.formats, vanishes):
            continue
        node = operation.argument_node(*place)
        shown = f"{max(known):g}" if node is None or isinstance(node, ast.Constant) else script.source(node)
        edits: tuple[Edit, ...] = ()
        if position < len(operation.nodes) and not operation.is_in_place:
            edits = (in_float(script, operation.nodes[position]),)
        yield Problem(
            operation.node,
            f"{shown} is 0 in fp16, whose smallest number is 6.0e-8: it guards nothing; compute this in float32, or "
            "take a larger eps",
            edits,
            "unsafe" if edits else None,
        )


def _guarded(operation: Operation) -> tuple[int, Value | None, tuple[str, int]]:
    """The position of the tensor, the eps, and where the eps stands."""
    keyword, position = _GUARDS[operation.name]
    if operation.name == "add" and len(operation.operands) > 1 and not isinstance(operation.operands[0], Tensor):
        return 1, operation.operands[0], ("input", 0)
    return 0, operation.argument(keyword, position), (keyword, position)


RULE = Rule(
    code="HS142",
    name="eps-vanishes",
    severity="error",
    summary="An eps such as 1e-8 is added to an fp16 tensor, or clamps it from below, and is 0 there.",
    why="""
The smallest number of fp16 above zero is 6.0e-8, and what is at most half of it, 2.98e-8, rounds to zero. So `x +
1e-8` and `x.clamp(min=1e-8)` leave a zero of an fp16 tensor at zero, and the logarithm, division or square root that
follows gives `inf` or NaN. Autocast takes `log` to fp32 on CUDA, but the addition before it was done in fp16 already.
In fp32 and bf16 (smallest 9.2e-41) the same line works.

Take the tensor to float32 first: `torch.log(x.float() + 1e-8)`. An eps that fp16 holds is not always enough: one over
1e-6 is 1e6, which is `inf` in fp16 again. From 1.6e-5 on the inverse fits.
""",
    bad=(
        """\
import torch
from torch import nn

EPS = 1e-8


class Sizes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.regress = nn.Linear(64, 2)

    def forward(self, features):
        size = torch.relu(self.regress(features))
        return torch.log(size + EPS)  # HS142


net = Sizes().cuda()
with torch.inference_mode(), torch.autocast("cuda", dtype=torch.float16):
    print(net(torch.randn(8, 64, device="cuda")))
""",
        """\
import torch


def relative(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    prediction, target = prediction.half(), target.half()
    error = (prediction - target).abs()
    return error / torch.clamp(target.abs(), min=1e-10)  # HS142


def level(wave: torch.Tensor) -> torch.Tensor:
    peak = wave.to(torch.float16).abs().amax(dim=-1, keepdim=True)
    peak += 1e-9  # HS142
    return wave / peak
""",
    ),
    good=(
        """\
import torch
from torch import nn

EPS = 1e-8


class Sizes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.regress = nn.Linear(64, 2)

    def forward(self, features):
        size = torch.relu(self.regress(features))
        return torch.log(size.float() + EPS)


net = Sizes().cuda()
with torch.inference_mode(), torch.autocast("cuda", dtype=torch.float16):
    print(net(torch.randn(8, 64, device="cuda")))
""",
        """\
import torch
from torch import nn


class Sizes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.regress = nn.Linear(64, 2)

    def forward(self, features):
        size = torch.relu(self.regress(features))
        return torch.log(size.float() + 1e-8), torch.log(size + 1e-4)


net = Sizes().cuda()
with torch.inference_mode(), torch.autocast("cuda", dtype=torch.float16):
    print(net(torch.randn(8, 64, device="cuda")))
""",
        """\
import torch


def relative(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    target = target.bfloat16()
    error = (prediction.bfloat16() - target).abs()
    return error / target.abs().clamp(min=1e-10)


def mean_loss(losses: torch.Tensor) -> float:
    return losses.half().amax().item() + 1e-10
""",
    ),
    check=check,
    fix="unsafe",
    fix_note=(
        "It takes the tensor to float32 where the eps meets it. The result is float32 from there on, which takes more"
        " memory and may meet code that expects fp16."
    ),
)
