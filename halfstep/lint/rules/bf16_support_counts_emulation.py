"""HS301: torch.cuda.is_bf16_supported() says yes where bf16 is only emulated."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.lint.finding import Edit
from halfstep.lint.rule import Problem, Rule
from halfstep.lint.script import Script


def check(script: Script) -> Iterator[Problem]:
    for node in script.calls("torch.cuda.is_bf16_supported"):
        if node.args or node.keywords or _asks_capability(script, node):
            continue
        edit = Edit("replace", script.span(node), f"{script.source(node.func)}(including_emulation=False)")
        yield Problem(
            node,
            "this is True on GPUs that only emulate bf16: pass including_emulation=False to ask for bf16 in hardware",
            (edit,),
            "unsafe",
        )


def _asks_capability(script: Script, node: ast.AST) -> bool:
    """Whether the same condition also asks for the compute capability."""
    around = node
    while isinstance(script.parents[around], ast.BoolOp | ast.UnaryOp):
        around = script.parents[around]
    return "capability" in script.source(around) if around is not node else False


RULE = Rule(
    code="HS301",
    name="bf16-support-counts-emulation",
    severity="warning",
    summary="torch.cuda.is_bf16_supported() counts GPUs that only emulate bf16.",
    why="""
The question has an argument, `including_emulation`, and its default is True: it then only tries whether a bf16 tensor
can be made. A V100 or T4 (compute capability 7.0 and 7.5) answers yes, though bf16 is in hardware from 8.0 on. A script
that chooses its format by the answer runs bf16 there without tensor cores, instead of fp16 with them.

Ask `torch.cuda.is_bf16_supported(including_emulation=False)`.
""",
    bad=(
        """\
import torch

bf16 = torch.cuda.is_available() and torch.cuda.is_bf16_supported()  # HS301
dtype = torch.bfloat16 if bf16 else torch.float16
""",
        """\
from torch import cuda, float32, bfloat16


def formats():
    return [bfloat16, float32] if cuda.is_bf16_supported() else [float32]  # HS301
""",
    ),
    good=(
        """\
import torch

bf16 = torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
dtype = torch.bfloat16 if bf16 else torch.float16
""",
        """\
import torch

dtype = torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
""",
        """\
import torch


def has_bf16():
    return torch.cuda.get_device_capability()[0] >= 8 and torch.cuda.is_bf16_supported()
""",
    ),
    check=check,
    fix="unsafe",
    fix_note="`including_emulation=False` goes in, which torch takes since 2.4. On a GPU with bf16 the answer stays; "
    "on an older one the script goes its other way from then on, which may need a loss scale.",
)
