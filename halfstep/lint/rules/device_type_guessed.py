"""HS138: the device type is guessed from a text, and every accelerator but CUDA is taken for the CPU."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.lint.finding import Edit
from halfstep.lint.rule import Problem, Rule
from halfstep.lint.script import Script

_AMP = [f"{home}.{name}" for home in ("torch.amp", "torch.cuda.amp", "halfstep") for name in ("autocast", "GradScaler")]


def check(script: Script) -> Iterator[Problem]:
    if not any(script.calls(*_AMP)):
        return
    for node in script.walk(ast.IfExp):
        assert isinstance(node, ast.IfExp)
        if (_text(node.body), _text(node.orelse)) == ("cuda", "cpu"):
            subject, kind = _asked(node.test)
            if subject is not None and not _is_cuda_or_cpu(script, subject):
                yield _problem(script, node, subject, kind)


def _text(node: ast.expr) -> object:
    return node.value if isinstance(node, ast.Constant) else None


def _asked(test: ast.expr) -> tuple[ast.expr | None, str]:
    """The device that a condition asks for CUDA, and what it is: a text, a device, or a type.

    None for another condition: ``torch.cuda.is_available()`` chooses a device and guesses nothing.
    """
    if isinstance(test, ast.Call) and isinstance(test.func, ast.Attribute) and test.func.attr == "startswith":
        return (test.func.value, "text") if [_text(arg) for arg in test.args] == ["cuda"] else (None, "")
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        left, right = test.left, test.comparators[0]
        if isinstance(test.ops[0], ast.In) and _text(left) == "cuda":
            is_str = isinstance(right, ast.Call) and getattr(right.func, "id", "") == "str" and len(right.args) == 1
            return (right.args[0] if is_str else right), "text"  # type: ignore[attr-defined]
        if isinstance(test.ops[0], ast.Eq) and _text(right) == "cuda":
            is_type = isinstance(left, ast.Attribute) and left.attr == "type"
            return left, "type" if is_type else "either"
    return None, ""


def _is_cuda_or_cpu(script: Script, subject: ast.expr) -> bool:
    """Whether the source itself lets the device be nothing else: its one assignment chooses between the two."""
    name = subject.value if isinstance(subject, ast.Attribute) and subject.attr == "type" else subject
    if not isinstance(name, ast.Name):
        return False
    given = [
        node.value
        for node in script.walk(ast.Assign)
        if isinstance(node, ast.Assign) and any(getattr(target, "id", "") == name.id for target in node.targets)
    ]
    if len(given) != 1 or any(node.arg == name.id for node in script.walk(ast.arg)):  # type: ignore[attr-defined]
        return False
    value = given[0]
    if isinstance(value, ast.Call) and script.names.qualified(value.func) == "torch.device" and value.args:
        value = value.args[0]
    if not isinstance(value, ast.IfExp):
        return False
    return all(str(_text(side)).partition(":")[0] in {"cuda", "cpu"} for side in (value.body, value.orelse))


def _problem(script: Script, node: ast.IfExp, subject: ast.expr, kind: str) -> Problem:
    text = script.source(subject)
    right = text if kind == "type" else f"torch.device({text}).type"
    has_torch = script.names.module.bindings.get("torch") == "torch"
    # `device == "cuda"` may compare with None or a torch.device, where the two differ on CUDA too.
    edits = (Edit("replace", script.span(node), right),) if kind == "type" or (kind == "text" and has_torch) else ()
    return Problem(
        node,
        f"this takes every accelerator but CUDA (mps, xpu, hpu) for the CPU, and those compute in fp32: write {right}",
        edits,
        "safe" if edits else None,
    )


RULE = Rule(
    code="HS138",
    name="device-type-guessed",
    severity="warning",
    summary='"cuda" if the device is CUDA else "cpu" takes every other accelerator for the CPU.',
    why="""
Besides `cuda` and `cpu`, torch 2.13 runs autocast on `mps`, `xpu`, `hpu` and `mtia`. A training script that tells CUDA
from everything else opens a CPU region, or none, around a model on such a device: it computes in fp32 without a word,
while the dtype chosen for it may still be float16 and the scaler on.

`torch.device(device).type` gives the type of a text like `"cuda:1"` and of a `torch.device` alike. Choose dtype, region
and scaler from that one value.
""",
    bad=(
        """\
import torch


def fit(net, batches, device="cuda"):
    kind = "cuda" if device.startswith("cuda") else "cpu"  # HS138
    opt = torch.optim.AdamW(net.to(device).parameters(), lr=1e-3)
    for x, y in batches:
        opt.zero_grad()
        with torch.autocast(device_type=kind, dtype=torch.bfloat16):
            out = net(x.to(device))
        loss = torch.nn.functional.mse_loss(out.float(), y.to(device))
        loss.backward()
        opt.step()
""",
        """\
import torch


class Inference:
    def __init__(self, net):
        self.net = net.eval()

    @torch.inference_mode()
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        region = torch.autocast("cuda" if "cuda" in str(x.device) else "cpu", dtype=torch.bfloat16)  # HS138
        with region:
            return self.net(x)
""",
    ),
    good=(
        """\
import torch


def fit(net, batches, device="cuda"):
    kind = torch.device(device).type
    opt = torch.optim.AdamW(net.to(device).parameters(), lr=1e-3)
    for x, y in batches:
        opt.zero_grad()
        with torch.autocast(device_type=kind, dtype=torch.bfloat16):
            out = net(x.to(device))
        loss = torch.nn.functional.mse_loss(out.float(), y.to(device))
        loss.backward()
        opt.step()
""",
        """\
import torch


def region(device):
    return torch.autocast(torch.device(device).type, dtype=torch.bfloat16)
""",
        """\
import torch

device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
kind = "cuda" if device.type == "cuda" else "cpu"
region = torch.autocast(kind, dtype=torch.bfloat16)
""",
        """\
import torch

device = "cuda" if torch.cuda.is_available() else "cpu"
region = torch.autocast(device, dtype=torch.bfloat16)
""",
    ),
    check=check,
    fix="safe",
    fix_note="torch.device(device).type takes the place of the guess. On CUDA and the CPU the value is the same.",
)
