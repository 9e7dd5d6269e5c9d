"""HS136: an argument or attribute of torch's mixed precision that no version of torch has had."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.lint.finding import Edit
from halfstep.lint.never_existed import ARGUMENTS, FIRST_ARGUMENT, NAMES, NEEDS_DEVICE, SCALER_ATTRIBUTES
from halfstep.lint.rule import Problem, Rule
from halfstep.lint.script import Script
from halfstep.lint.values import Object

_OF_ANY_SCALER = {"_found_inf", "unscale"}
"""What to report of a scaler whose constructor is not in this source: another library's may have the rest."""
_LAST_NAMES = {name.rpartition(".")[2] for name in NAMES}
_DTYPES = {"torch.bf16": "bfloat16", "torch.fp16": "float16", "torch.fp32": "float32"}


def check(script: Script) -> Iterator[Problem]:
    for name in ARGUMENTS:
        for call in script.calls(name):
            yield from _call(call, name)
    for node in script.walk(ast.Attribute):
        assert isinstance(node, ast.Attribute)
        name = (script.names.qualified(node) if node.attr in _LAST_NAMES else None) or ""
        if name in NAMES:
            edits: tuple[Edit, ...] = ()
            if name in _DTYPES:
                edits = (Edit("replace", script.span(node), f"{script.source(node.value)}.{_DTYPES[name]}"),)
            message = f"torch has no {name.removeprefix('torch.')}: {NAMES[name]}"
            yield Problem(node, message, edits, "safe" if edits else None)
    for definition in script.walk(ast.FunctionDef):
        assert isinstance(definition, ast.FunctionDef)
        for decorator in definition.decorator_list:
            name = script.names.qualified(decorator) or ""
            if name in NEEDS_DEVICE:
                yield Problem(decorator, f"{name} cannot be called without device_type: this raises a TypeError")
    for event in script.sites:
        scaler, attribute = event.receiver, event.node
        if event.what != "read" or event.name not in SCALER_ATTRIBUTES or not isinstance(attribute, ast.Attribute):
            continue
        assert isinstance(scaler, Object)
        if scaler.type.startswith("torch.") or (
            not scaler.type and event.name in _OF_ANY_SCALER and _steps(script, scaler)
        ):
            edits = ()
            if event.name == "unscale":
                edits = (Edit("replace", script.span(attribute), f"{script.source(attribute.value)}.unscale_"),)
            message = f"a GradScaler has no attribute {event.name}: {SCALER_ATTRIBUTES[event.name]}"
            yield Problem(attribute, message, edits, "safe" if edits else None)


def _call(node: ast.Call, name: str) -> Iterator[Problem]:
    for keyword in node.keywords:
        if keyword.arg is not None and keyword.arg not in ARGUMENTS[name]:
            yield Problem(node, f"{name} has never taken {keyword.arg}=: this raises a TypeError")
            return
    is_open = any(keyword.arg is None for keyword in node.keywords) or any(
        isinstance(arg, ast.Starred) for arg in node.args
    )
    if is_open:
        return
    if name in NEEDS_DEVICE and not any(keyword.arg == "device_type" for keyword in node.keywords):
        enough = NEEDS_DEVICE[name]
        if enough is None or len(node.args) < enough:
            yield Problem(node, f"{name} cannot be called without device_type: this raises a TypeError")
    if name in FIRST_ARGUMENT and node.args:
        wrong, what = FIRST_ARGUMENT[name]
        if isinstance(_number_or_text(node.args[0]), wrong):
            yield Problem(node, f"the first argument of {name} is {what}")


def _number_or_text(node: ast.expr) -> object:
    """A constant, also where it is written as ``2.0**16``."""
    while isinstance(node, ast.BinOp):
        node = node.left
    return node.value if isinstance(node, ast.Constant) else None


def _steps(script: Script, scaler: Object) -> bool:
    """Whether an object that was taken for a scaler is used like torch's, in a source that has no other library's."""
    if script.names.imports("paddle") or not script.names.imports("torch"):
        return False
    methods = {event.what for event in script.sites if event.receiver == scaler}
    return {"scaler.step", "scaler.update"} <= methods


RULE = Rule(
    code="HS136",
    name="argument-that-never-existed",
    severity="error",
    summary="An argument or attribute of torch's mixed precision that no version of torch has had.",
    why="""
Tutorials and generated code use names that torch never had. Most raise as soon as the line runs: `torch.autocast` and
`GradScaler` refuse unknown arguments with a TypeError, `torch.backends.cuda.matmul.allow_bf16` raises
`AttributeError: Unknown attribute allow_bf16`. On a machine where the line is behind a switch that shows late.

Some do not raise. `torch.cuda.amp.autocast("cuda")` passes the text as `enabled`, `torch.amp.GradScaler(2.0**12)` takes
the number for a device and starts at 65536 as ever, and `torch.backends.cudnn.allow_bf16 = True` sets an attribute that
nothing reads. Every entry was checked against torch 2.13.
""",
    bad=(
        """\
import torch
from torch.amp import GradScaler

scaler = GradScaler("cuda", dtype=torch.float16)  # HS136
""",
        """\
import torch
from torch import nn


class Loop:
    def __init__(self, net):
        self.net = net.cuda()
        self.opt = torch.optim.SGD(net.parameters(), lr=0.1)
        self.amp = torch.amp.GradScaler("cuda")

    def step(self, x, y):
        self.opt.zero_grad()
        with torch.autocast(device_type="cuda", dtype=torch.float16):
            out = self.net(x)
        self.amp.scale(nn.functional.mse_loss(out.float(), y)).backward()
        self.amp.unscale(self.opt)  # HS136
        self.amp.step(self.opt)
        self.amp.update()
""",
        """\
import torch


def predict(net, x):
    with torch.autocast(dtype=torch.bfloat16):  # HS136
        return net(x.to(memory_format=torch.channels_last))
""",
        """\
import torch

scaler = torch.amp.GradScaler(2.0**12)  # HS136
half = torch.bf16 if torch.cuda.is_available() else None  # HS136
""",
    ),
    good=(
        """\
import torch
from torch.amp import GradScaler

scaler = GradScaler("cuda")
""",
        """\
import torch

scaler = torch.amp.GradScaler("cuda", init_scale=2.0**12)
torch.backends.cuda.matmul.allow_tf32 = True
torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
""",
        """\
import torch


def region(device, **settings):
    return torch.autocast(device, **settings)


def scale(rates, opt, scaler):
    scaler.unscale_(opt)
    return [rate.unscale(opt) for rate in rates]
""",
    ),
    check=check,
    fix="safe",
    fix_note="`unscale` becomes `unscale_`, and torch.bf16 torch.bfloat16: neither could run. The rest has none.",
)
