"""HS302: an autocast region that leaves its format to the device's default."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.lint.finding import Edit
from halfstep.lint.rule import Problem, Rule
from halfstep.lint.script import Script

_DEFAULTS = {"cuda": "float16", "cpu": "bfloat16"}
_SETTERS = {"torch.set_autocast_dtype", "torch.set_autocast_gpu_dtype", "torch.set_autocast_cpu_dtype"}


def check(script: Script) -> Iterator[Problem]:
    if any(script.calls(*_SETTERS)):
        return
    for node in script.calls("torch.amp.autocast"):
        if len(node.args) > 1:
            continue
        keywords = {keyword.arg: keyword.value for keyword in node.keywords}
        is_open = None in keywords or any(isinstance(arg, ast.Starred) for arg in node.args)
        device = node.args[0] if node.args else keywords.get("device_type")
        if is_open or "dtype" in keywords or device is None or getattr(keywords.get("enabled"), "value", True) is False:
            continue
        default = _DEFAULTS.get(str(device.value)) if isinstance(device, ast.Constant) else None
        what = default or "float16 on CUDA and bfloat16 on the CPU"
        edits: tuple[Edit, ...] = ()
        if default and script.names.module.bindings.get("torch") == "torch":
            edits = (Edit("replace", script.span(node), _with_dtype(script, node, default)),)
        yield Problem(
            node,
            f"a region without dtype takes the device's default, {what}: write the one that you mean, "
            "dtype=torch.bfloat16 or torch.float16",
            edits,
            "unsafe" if edits else None,
        )


def _with_dtype(script: Script, node: ast.Call, default: str) -> str:
    """The call with its dtype, the rest of it as it is written."""
    text = script.source(node)
    parts = [*node.args, *(keyword.value for keyword in node.keywords)]
    last = max(parts, key=lambda part: (part.lineno, part.col_offset))
    end = script.span(last)
    head = "\n".join([*script.lines[: end.end_line - 1], script.lines[end.end_line - 1][: end.end_column]])
    start = script.span(node)
    before = "\n".join([*script.lines[: start.line - 1], script.lines[start.line - 1][: start.column]])
    return f"{text[: len(head) - len(before)]}, dtype=torch.{default}{text[len(head) - len(before) :]}"


RULE = Rule(
    code="HS302",
    name="region-without-dtype",
    severity="warning",
    summary="An autocast region without dtype: float16 on CUDA, bfloat16 on the CPU.",
    why="""
Without `dtype`, `torch.autocast` takes `torch.get_autocast_dtype(device_type)`: float16 on CUDA, bfloat16 on the CPU.
The two need different code: float16 ends at 65504 and needs a loss scale, bfloat16 reaches 3.4e38 and needs none. A
script that was tried on a laptop runs in another format on the GPU, and without a scaler gradients below 3.0e-8 become
zero there.

Write the format: `torch.autocast(device_type, dtype=torch.bfloat16)`.
""",
    bad=(
        """\
import torch


@torch.no_grad()
def evaluate(net, batches, device):
    with torch.amp.autocast(device_type=device.type):  # HS302
        return [net(x.to(device)).argmax(-1) for x in batches]
""",
        """\
import torch
from torch import autocast, nn

net = nn.Linear(4, 2)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
x, y = torch.randn(8, 4), torch.zeros(8, 2)
with autocast("cpu", cache_enabled=True):  # HS302
    out = net(x)
loss = nn.functional.mse_loss(out.float(), y)
loss.backward()
opt.step()
""",
    ),
    good=(
        """\
import torch


@torch.no_grad()
def evaluate(net, batches, device):
    with torch.amp.autocast(device_type=device.type, dtype=torch.bfloat16):
        return [net(x.to(device)).argmax(-1) for x in batches]
""",
        """\
import torch


@torch.no_grad()
def evaluate(net, batches, device, dtype):
    with torch.amp.autocast(device.type, dtype):
        return [net(x.to(device)).argmax(-1) for x in batches]
""",
        """\
import torch


def norm(x):
    with torch.autocast(x.device.type, enabled=False):
        return x.float().norm(dim=-1)
""",
    ),
    check=check,
    fix="unsafe",
    fix_note=(
        "Where the device is written out, so is its default: float16 for CUDA, bfloat16 for the CPU. Nothing changes by"
        " that unless other code sets the default, but it may not be the format that you mean."
    ),
)
