"""HS146: a sum of many values is stored in 16 bit."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.lint.finding import Edit
from halfstep.lint.operation import Operation, operations
from halfstep.lint.rule import Problem, Rule
from halfstep.lint.rules.sum_times_zero import zeroed_sums
from halfstep.lint.script import Script
from halfstep.lint.values import NONE, Tensor

_RUNNING = frozenset({"cumsum", "cumprod", "logcumsumexp"})
_TAKE_DTYPE = frozenset({"sum", "nansum", "norm", "cumsum", "cumprod"})


def check(script: Script) -> Iterator[Problem]:
    zeroed = {total.node for total, _ in zeroed_sums(script)}  # HS156 says more
    for operation in operations(script, frozenset({"sum", "nansum", "norm", *_RUNNING})):
        tensor, result, node = operation.tensor(), operation.event.result, operation.node
        if tensor is None or not isinstance(result, Tensor) or not (tensor.is_16_bit and result.is_16_bit):
            continue
        if "assumed" in tensor.tags or node in zeroed or _is_only_differentiated(script, node):
            continue
        if operation.name in _RUNNING or _is_long(operation, tensor):
            edits = _edits(script, operation)
            yield Problem(
                node,
                f"{operation.name} stores its result in {_described(result.formats)}; pass dtype=torch.float32",
                edits,
                "unsafe" if edits else None,
            )


def _edits(script: Script, operation: Operation) -> tuple[Edit, ...]:
    node = operation.node
    if (
        not isinstance(node, ast.Call)
        or operation.name not in _TAKE_DTYPE
        or operation.argument("dtype", 9) is not None
    ):
        return ()
    call = script.source(node)[:-1].rstrip().removesuffix(",")
    comma = ", " if node.args or node.keywords else ""
    span = script.span(node)
    return (Edit("replace", span, f"{call}{comma}dtype=torch.float32)"), Edit("import", span, "import torch"))


def _is_only_differentiated(script: Script, node: ast.AST) -> bool:
    """``x.sum().backward()``: the gradient of a sum is 1, whatever the sum is rounded to."""
    while not isinstance(node, ast.stmt):
        if isinstance(node, ast.Attribute) and node.attr == "backward":
            return True
        node = script.parents[node]
    return False


def _is_long(operation: Operation, tensor: Tensor) -> bool:
    """Over everything, or over the log-probabilities of a sequence; a norm is one number, so that its range counts."""
    dim = operation.argument("dim", 2 if operation.name == "norm" else 1)
    if operation.name == "norm" and not tensor.is_fp16:
        return False
    return dim is None or dim == NONE or "log_probability" in tensor.tags


def _described(formats: frozenset[str]) -> str:
    if formats == {"bf16"}:
        return "bf16, which keeps 8 bits of it"
    if formats == {"fp16"}:
        return "fp16, which keeps 11 bits of it and is inf beyond 65504"
    return "16 bit, which keeps 8 or 11 bits of it"


RULE = Rule(
    code="HS146",
    name="sum-in-16-bit",
    severity="warning",
    summary="A sum or norm of a whole tensor, a sum of log-probabilities, or a running sum is stored in 16 bit.",
    why="""
torch adds 16-bit numbers up in fp32, and then rounds the sum to the format of its input. In bf16 that keeps 8 bits: of
the log-probability of a long answer, -11206.6, it makes -11200, and the difference between two such sums, the one that
a preference loss is about, is gone. In fp16 it keeps 11 bits, and a sum beyond 65504 is `inf`: 100,000 times 2 is. So
is a norm: of a million numbers of size 100 it would be 100,000. A mean is not affected, since it is divided before it
is rounded.

In a CUDA region `sum` and `cumsum` answer in fp32. Outside, and in a region of the CPU, they do not: pass
`dtype=torch.float32`, which costs no memory for the input, or take the values to float32 before.
""",
    bad=(
        """\
import torch
from torch import nn

head = nn.Linear(64, 1000).cuda()


@torch.no_grad()
def score(states, tokens):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        logits = head(states)
    chosen = logits.log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)
    return chosen.sum(-1)  # HS146
""",
        """\
import torch


def travelled(speeds: torch.Tensor) -> torch.Tensor:
    speeds = speeds.half()
    return torch.cumsum(speeds, dim=1) * 0.01  # HS146


def total_weight(weights: torch.Tensor) -> torch.Tensor:
    return weights.to(torch.bfloat16).abs().sum()  # HS146
""",
        """\
import torch
from torch import nn

encoder = nn.Linear(512, 64).half().cuda()


def length(x):
    return torch.norm(encoder(x.half()))  # HS146
""",
    ),
    good=(
        """\
import torch
from torch import nn

head = nn.Linear(64, 1000).cuda()


@torch.no_grad()
def score(states, tokens):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        logits = head(states)
    chosen = logits.log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)
    return chosen.sum(-1, dtype=torch.float32)
""",
        """\
import torch
from torch import nn

head = nn.Linear(64, 1000).cuda()


@torch.no_grad()
def score(states, tokens):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        logits = head(states)
        inside = logits.log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1).sum(-1)
    chosen = logits.float().log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)
    return chosen.sum(-1), inside, logits.mean()
""",
        """\
import torch


def travelled(speeds: torch.Tensor) -> torch.Tensor:
    speeds = speeds.half()
    return torch.cumsum(speeds, dim=1, dtype=torch.float32) * 0.01


def pooled(features: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    features = features.to(torch.bfloat16) * gate.to(torch.bfloat16)
    return features.sum(dim=(2, 3))
""",
    ),
    check=check,
    fix="unsafe",
    fix_note="It passes `dtype=torch.float32`. The result is float32 from there on, which other code may not expect.",
)
