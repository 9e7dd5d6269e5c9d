"""HS137: a question about the state of autocast that asks about CUDA alone, in code for other devices too."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.lint.finding import Edit
from halfstep.lint.rule import Problem, Rule
from halfstep.lint.script import Script

_QUERY = "torch.is_autocast_enabled"
_OTHER_DEVICES = {"mps", "xpu", "hpu", "npu", "xla", "mtia"}
_ASK_OTHERS = {"torch.is_autocast_cpu_enabled", "torch.is_autocast_xla_enabled", "torch.is_autocast_ipu_enabled"}


def check(script: Script) -> Iterator[Problem]:
    queries = [node for node in script.calls(_QUERY) if not node.args and not node.keywords]
    if not queries or not _serves_others(script):
        return
    for node in queries:
        function = script.function(node)
        if not _decides(script, node) or _is_about_cuda(script, node) or _asks_others(script, function):
            continue
        device = _device_at_hand(script, function)
        edits = (Edit("replace", script.span(node), f"{script.source(node.func)}({device}.type)"),) if device else ()
        where = device or "device"
        yield Problem(
            node,
            f"without an argument this asks about CUDA alone, and is False in a region for another: pass {where}.type",
            edits,
            "safe" if edits else None,
        )


def _decides(script: Script, node: ast.AST) -> bool:
    """Whether the answer is used: in a condition, kept or returned. One that is only printed does no harm."""
    around = script.parents[node]
    while isinstance(around, ast.BoolOp | ast.UnaryOp | ast.Compare):
        node, around = around, script.parents[around]
    if isinstance(around, ast.If | ast.IfExp | ast.While | ast.Assert):
        return around.test is node
    return isinstance(around, ast.Assign | ast.AnnAssign | ast.Return | ast.keyword)


def _is_about_cuda(script: Script, node: ast.AST) -> bool:
    """Whether what surrounds it has made sure of CUDA, or asks the newer way where there is one."""
    while not isinstance(node, ast.FunctionDef | ast.Module):
        inner, node = node, script.parents[node]
        if isinstance(node, ast.BoolOp | ast.If | ast.IfExp):
            test = node if isinstance(node, ast.BoolOp) else node.test
            text = ast.unparse(test)
            if "is_cuda" in text or "'cuda'" in text:
                return True
        is_branch = isinstance(node, ast.If | ast.IfExp) and inner is not node.test
        if (is_branch or isinstance(node, ast.Try)) and any(_asks_with_device(script, part) for part in ast.walk(node)):
            return True
    return False


def _asks_with_device(script: Script, node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and bool(node.args) and script.names.qualified(node.func) == _QUERY


def _asks_others(script: Script, function: ast.AST | None) -> bool:
    """Whether the same function asks about another device by a name of its own."""
    return any(script.function(node) is function for node in script.calls(*_ASK_OTHERS))


def _serves_others(script: Script) -> bool:
    """Whether the source provides for devices besides CUDA."""
    for node in script.walk(ast.Constant):
        assert isinstance(node, ast.Constant)
        around = script.parents[node]
        if node.value in _OTHER_DEVICES or (node.value == "cpu" and isinstance(around, ast.IfExp | ast.Compare)):
            return True
    for node in script.walk(ast.Attribute):
        assert isinstance(node, ast.Attribute)
        if node.attr == "type" and isinstance(node.value, ast.Attribute | ast.Name):
            owner = node.value.attr if isinstance(node.value, ast.Attribute) else node.value.id
            if owner == "device" and not isinstance(script.parents[node], ast.Compare):
                return True
    return False


def _device_at_hand(script: Script, function: ast.AST | None) -> str:
    """``x.device``, where the function reads it of exactly one of its parameters; "" otherwise."""
    if not isinstance(function, ast.FunctionDef):
        return ""
    parameters = {arg.arg for arg in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)}
    found = {
        node.value.id
        for node in script.walk(ast.Attribute)
        if isinstance(node, ast.Attribute)
        and node.attr == "device"
        and isinstance(node.value, ast.Name)
        and node.value.id in parameters - {"self"}
        and script.function(node) is function
    }
    return f"{found.pop()}.device" if len(found) == 1 else ""


RULE = Rule(
    code="HS137",
    name="autocast-query-without-device",
    severity="warning",
    summary="torch.is_autocast_enabled() without an argument asks about CUDA alone, in code for other devices too.",
    why="""
`torch.is_autocast_enabled()` answers for CUDA, whatever device the tensors are on. Under
`torch.autocast("cpu", dtype=torch.bfloat16)` it is False on torch 2.13, and `torch.is_autocast_enabled("cpu")` is True.
A helper that casts a bias or a mask to the format of autocast then does nothing, and the float32 tensor meets a bf16
one: some operations promote the result to float32, others raise.

Since torch 2.4 both questions take the device type: `torch.is_autocast_enabled(x.device.type)` and
`torch.get_autocast_dtype(x.device.type)`.
""",
    bad=(
        """\
import torch


def like_autocast(bias: torch.Tensor) -> torch.Tensor:
    if not torch.is_autocast_enabled():  # HS137
        return bias
    return bias.to(torch.get_autocast_dtype(bias.device.type))
""",
        """\
import torch
from torch import nn

device = "xpu" if torch.xpu.is_available() else "cpu"


class Gate(nn.Module):
    def forward(self, x, gate):
        lowered = torch.is_autocast_enabled()  # HS137
        return x * gate.to(x.dtype) if lowered else x * gate


gate = Gate().to(device)
with torch.autocast(device, dtype=torch.bfloat16):
    gate(torch.ones(2, device=device), torch.ones(2, device=device))
""",
    ),
    good=(
        """\
import torch


def like_autocast(bias: torch.Tensor) -> torch.Tensor:
    if not torch.is_autocast_enabled(bias.device.type):
        return bias
    return bias.to(torch.get_autocast_dtype(bias.device.type))
""",
        """\
import torch


def like_autocast(bias):
    if torch.is_autocast_enabled(bias.device.type):
        return bias.to(torch.get_autocast_dtype(bias.device.type))
    return bias
""",
        """\
import torch


def like_autocast(bias):
    kind = bias.device.type
    if bias.is_cuda and torch.is_autocast_enabled():
        return bias.to(torch.get_autocast_dtype(kind))
    return bias
""",
        """\
import torch


def report(x):
    print(torch.is_autocast_enabled(), torch.is_autocast_enabled(x.device.type))
""",
    ),
    check=check,
    fix="safe",
    fix_note="The device type of the one parameter whose .device the function reads goes in. On CUDA the answer stays.",
)
