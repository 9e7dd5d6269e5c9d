"""HS151: a running sum is kept in 16 bit."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.lint.event import Event
from halfstep.lint.rule import Problem, Rule
from halfstep.lint.script import Script
from halfstep.lint.values import Tensor


def check(script: Script) -> Iterator[Problem]:
    for event in script.sites:
        total = event.receiver
        if not isinstance(total, Tensor) or not total.is_16_bit or "literal" not in total.tags:
            continue
        if _adds(event) and _outlives(event, total) and not _is_canvas(event, total):
            name = "/".join(sorted(total.formats))
            limit = 256 if "bf16" in total.formats else 2048
            yield Problem(
                event.node,
                f"a running sum is kept in {name}: counting by ones it stops at {limit}, and every sum stops before "
                f"it is {2 * limit} times what is added; keep it in fp32",
            )


def _adds(event: Event) -> bool:
    if event.what == "operator":
        return event.name == "add" and isinstance(event.node, ast.AugAssign | ast.BinOp)
    return event.what in {"tensor.add_", "tensor.index_add_", "tensor.scatter_add_"}


def _outlives(event: Event, total: Tensor) -> bool:
    """Whether the sum goes on: over the turns of a loop, or the calls of a method that adds to an attribute."""
    if event.loops:
        return not _holds(event.loops[-1].node, total.node)
    is_attribute = isinstance(event.node, ast.AugAssign) and isinstance(event.node.target, ast.Attribute)
    return is_attribute and event.function is not None and not _holds(event.function, total.node)


def _is_canvas(event: Event, total: Tensor) -> bool:
    """Whether windows are added into a tensor of the shape of the data: few of them meet in one place."""
    node = event.node
    if not (isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Subscript) and total.node is not None):
        return False
    return any(isinstance(part, ast.Attribute) and part.attr in {"shape", "size"} for part in ast.walk(total.node))


def _holds(place: ast.AST, node: ast.AST | None) -> bool:
    return any(inner is node for inner in ast.walk(place))


RULE = Rule(
    code="HS151",
    name="running-sum-in-16-bit",
    severity="error",
    summary="A sum, count or metric over a loop is kept in a 16-bit tensor.",
    why="""
A sum in bf16 stops growing somewhere between 256 and 512 times what is added, because the addend is then at most half
of the step between neighbours: adding 1.0 a thousand times gives 256, adding 0.75 gives 256 too. In fp16 the sum of
ones stops at 2048, and beyond 65504 a sum is inf.

A loss averaged in such a sum looks better the longer the epoch is. Keep running sums in fp32 (`torch.zeros(())` is) or
in Python numbers; the addend is promoted.
""",
    bad=(
        """\
import torch


def evaluate(model: torch.nn.Module, loader):
    total = torch.zeros((), dtype=torch.bfloat16, device="cuda")
    count = 0
    with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16):
        for x, y in loader:
            total += torch.nn.functional.mse_loss(model(x), y)  # HS151
            count += 1
    return total / count
""",
        """\
import torch


class Histogram:
    def count(self, batches, num_codes):
        used = torch.zeros(num_codes, dtype=torch.half)
        for codes in batches:
            used.index_add_(0, codes, torch.ones(len(codes), dtype=torch.half))  # HS151
        return used
""",
    ),
    good=(
        """\
import torch


def evaluate(model: torch.nn.Module, loader):
    total = torch.zeros((), device="cuda")
    count = 0
    with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16):
        for x, y in loader:
            total += torch.nn.functional.mse_loss(model(x), y)
            count += 1
    return total / count
""",
        """\
import torch


def mix(batches, num_codes):
    for codes in batches:
        used = torch.zeros(num_codes, dtype=torch.half)
        used += codes.half()
        yield used.float()
""",
    ),
    check=check,
)
