"""HS157: the eps of normalize or cosine_similarity is zero in fp16."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.lint.finding import Edit
from halfstep.lint.formats import imposed
from halfstep.lint.operation import in_float, operations
from halfstep.lint.rounding import in_a_format, numbers, vanishes
from halfstep.lint.rule import Problem, Rule
from halfstep.lint.script import Script
from halfstep.lint.values import Const

_EPS = {"normalize": (3, 1e-12), "cosine_similarity": (3, 1e-8)}
"""Where the eps stands, and what it is when it is left out."""
_HOME = "torch.nn.functional."


def check(script: Script) -> Iterator[Problem]:
    for operation in operations(script, frozenset(_EPS)):
        if imposed(operation.name, operation.event.region) or not operation.event.name.startswith(_HOME):
            continue
        tensor = operation.tensor()
        position, default = _EPS[operation.name]
        known = numbers(operation.argument("eps", position) or Const(default))
        if tensor is None or not tensor.is_16_bit or "assumed" in tensor.tags:
            continue
        if not in_a_format(known, tensor.formats, vanishes):
            continue
        of_both = 2 if operation.name == "cosine_similarity" else 1
        edits: tuple[Edit, ...] = tuple(in_float(script, node) for node in operation.nodes[:of_both])
        yield Problem(
            operation.node,
            f"the eps of {operation.name}, {max(known):g}, is 0 in fp16: a vector of zeros becomes NaN; take it to "
            "float32 first",
            edits,
            "unsafe" if edits else None,
        )


RULE = Rule(
    code="HS157",
    name="normalize-eps-vanishes",
    severity="warning",
    summary="F.normalize or F.cosine_similarity of fp16 vectors, whose eps is 0 in fp16.",
    why="""
`F.normalize` divides by the norm, clamped to its eps of 1e-12 from below, and `F.cosine_similarity` has an eps of
1e-8. The smallest number of fp16 is 6.0e-8: both are 0 there, and a vector of zeros (a blank image, a dead row of
ReLUs) is 0 / 0, NaN, in the result and in the gradient. An eps that fp16 holds saves the result alone: with `eps=1e-6`
the gradient of a zero vector is 1e6, which is `inf`.

In a CUDA region both are computed in fp32. Vectors that come out of the region, half weights, and regions of the CPU
are not: normalise in float32, `F.normalize(z.float(), dim=-1)`. bf16 is not affected.
""",
    bad=(
        """\
import torch
import torch.nn.functional as F
from torch import nn

head = nn.Linear(32, 16).cuda()


def similarity(a, b):
    with torch.no_grad(), torch.autocast("cuda", dtype=torch.float16):
        first, second = head(a), head(b)
    return (F.normalize(first, dim=-1) * second).sum(-1, dtype=torch.float32)  # HS157
""",
        """\
import torch


def closest(query: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    query, index = query.half(), index.half()
    return torch.nn.functional.cosine_similarity(query[:, None], index[None], dim=-1).argmax(-1)  # HS157
""",
    ),
    good=(
        """\
import torch
import torch.nn.functional as F
from torch import nn

head = nn.Linear(32, 16).cuda()


def similarity(a, b):
    with torch.no_grad(), torch.autocast("cuda", dtype=torch.float16):
        first, second = head(a), head(b)
    return (F.normalize(first.float(), dim=-1) * second).sum(-1, dtype=torch.float32)
""",
        """\
import torch
import torch.nn.functional as F
from torch import nn

head = nn.Linear(32, 16).cuda()


def similarity(a, b):
    with torch.no_grad(), torch.autocast("cuda", dtype=torch.float16):
        first, second = head(a), head(b)
        inside = F.normalize(first, dim=-1)
    return (F.normalize(first.float(), dim=-1) * second).sum(-1), inside
""",
        """\
import torch
import torch.nn.functional as F


def closest(query: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    query, index = query.bfloat16(), index.bfloat16()
    return F.cosine_similarity(query[:, None], index[None], dim=-1).argmax(-1)


def unit(z: torch.Tensor) -> torch.Tensor:
    return F.normalize(z.half(), dim=-1, eps=1e-4)
""",
    ),
    check=check,
    fix="unsafe",
    fix_note="It takes the vectors to float32 first. The result is float32 from there on, which takes more memory.",
)
