"""HS143: the upper bound of a clamp is 1 in 16 bit."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.lint.operation import in_float, operations
from halfstep.lint.rounding import becomes_one, in_a_format, numbers
from halfstep.lint.rule import Problem, Rule
from halfstep.lint.script import Script

_UPPER = {"clamp": 2, "clip": 2, "clamp_max": 1}


def check(script: Script) -> Iterator[Problem]:
    for operation in operations(script, frozenset(_UPPER)):
        tensor = operation.tensor()
        place = ("max", _UPPER[operation.name])
        known = numbers(operation.argument(*place))
        if tensor is None or not tensor.is_16_bit or "assumed" in tensor.tags:
            continue
        if not in_a_format(known, tensor.formats, becomes_one):
            continue
        node = operation.argument_node(*place)
        shown = script.source(node) if node is not None else f"{max(known):g}"
        edits = (in_float(script, operation.nodes[0]),) if operation.nodes and not operation.is_in_place else ()
        name = " or ".join(sorted(tensor.formats))
        yield Problem(
            operation.node,
            f"the upper bound {shown} is 1 in {name}, so that log(1 - p) may be -inf; clamp in float32, or work from "
            "the logits",
            edits,
            "unsafe" if edits else None,
        )


RULE = Rule(
    code="HS143",
    name="clamp-rounds-to-one",
    severity="error",
    summary="A 16-bit probability is clamped to a bound so near to 1 that it rounds to 1.",
    why="""
Just below 1 the numbers of fp16 are 4.9e-4 apart, and those of bf16 3.9e-3. A bound above 1 - 2.44e-4 in fp16, or
above 1 - 1.95e-3 in bf16, rounds to 1 itself: `p.clamp(1e-4, 1 - 1e-4)` lets p = 1 through, and `log(1 - p)` is
`-inf`. The margin that helps at 0, where 16-bit numbers are dense, does not help at 1.

Work from the logits: `logsigmoid(z)` and `logsigmoid(-z)` need no clamp, nor does `binary_cross_entropy_with_logits`.
Or take the probability to float32 before the clamp.
""",
    bad=(
        """\
import torch
from torch import nn


def focal(p, target):
    p = torch.clamp(p, 1e-4, 1.0 - 1e-4)  # HS143
    missed = -torch.log(p) * target * (1 - p)
    false = -torch.log(1 - p) * (1 - target) * p
    return (missed + false).mean()


net = nn.Linear(8, 10).cuda()


@torch.inference_mode()
def evaluate(x, target):
    with torch.autocast("cuda", dtype=torch.float16):
        return focal(net(x).sigmoid(), target)
""",
        """\
import torch


def entropy(logits: torch.Tensor) -> torch.Tensor:
    p = logits.to(torch.bfloat16).sigmoid().clamp(min=1e-3, max=0.999)  # HS143
    p = p.float()
    return -p * p.log() - (1 - p) * (1 - p).log()
""",
    ),
    good=(
        """\
import torch
from torch import nn


def focal(p, target):
    p = torch.clamp(p.float(), 1e-4, 1.0 - 1e-4)
    missed = -torch.log(p) * target * (1 - p)
    false = -torch.log(1 - p) * (1 - target) * p
    return (missed + false).mean()


net = nn.Linear(8, 10).cuda()


@torch.inference_mode()
def evaluate(x, target):
    with torch.autocast("cuda", dtype=torch.float16):
        return focal(net(x).sigmoid(), target)
""",
        """\
import torch


def entropy(logits: torch.Tensor) -> torch.Tensor:
    p = logits.to(torch.float16).sigmoid().clamp(1e-3, 0.999)
    p = p.float()
    return -p * p.log() - (1 - p) * (1 - p).log()
""",
    ),
    check=check,
    fix="unsafe",
    fix_note="It clamps in float32. The result is float32 from there on, which takes more memory.",
)
