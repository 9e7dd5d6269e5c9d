"""HS154: trainable adapter weights take over the 16-bit format of the frozen weights."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.lint.event import Event
from halfstep.lint.rule import Problem, Rule
from halfstep.lint.script import Script
from halfstep.lint.values import Items, Tensor
from halfstep.lint.vocabulary import is_module_base
from halfstep.lint.weights import all_trained, inherits_format

_INHERITED = (
    "the trainable weights of this adapter take over the format of the frozen base, 16 bit in this file: keep them in "
    "fp32"
)


def check(script: Script) -> Iterator[Problem]:
    if not _casts_to_16_bit(script):
        return
    for cls in script.walk(ast.ClassDef):
        assert isinstance(cls, ast.ClassDef)
        if any(is_module_base(script.names.qualified(base) or "") for base in cls.bases):
            yield from _inherited(script, cls)
    for trained in script.once(all_trained):
        if inherits_format(trained.cast):
            yield Problem(trained.cast, _INHERITED)
    averaged = any(
        event.what in {"tensor.mul_", "tensor.lerp_"} or event.name in {"mul_", "lerp_"}
        for event in script.sites
        if event.in_no_grad
    )
    for event in script.sites:
        if averaged and event.what == "data" and _casts_frozen(event):
            yield Problem(
                event.node,
                "every frozen parameter is cast to 16 bit, also an adapter that is only inactive now and is updated in "
                "place later: cast the base weights by name",
            )


def _casts_to_16_bit(script: Script) -> bool:
    """Whether the file itself puts weights into 16 bit; a base that arrives in another format is nobody's mistake."""
    names = {"float16", "bfloat16", "half"}
    for node in script.walk(ast.Attribute):
        assert isinstance(node, ast.Attribute)
        if node.attr in names and (script.names.qualified(node) or node.attr in {"half", "bfloat16"}):
            parent = script.parents[node]
            holder = script.parents.get(parent)
            if isinstance(parent, ast.Call) and parent.func is node:
                return True
            call = parent if isinstance(parent, ast.Call) else holder
            function = call.func if isinstance(call, ast.Call) else None
            if isinstance(function, ast.Attribute) and function.attr in {"to", "from_pretrained"}:
                return True
            if isinstance(parent, ast.Assign):
                return True
    return False


def _inherited(script: Script, cls: ast.ClassDef) -> Iterator[Problem]:
    """``self.to(base.weight.dtype)`` in a class that freezes its base and makes layers of its own."""
    calls = [node for node in ast.walk(cls) if isinstance(node, ast.Call)]
    freezes = any(
        (isinstance(call.func, ast.Attribute) and call.func.attr == "requires_grad_" and _is_false(call))
        for call in calls
    ) or any(
        isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Attribute)
        and node.targets[0].attr == "requires_grad"
        and getattr(node.value, "value", None) is False
        for node in ast.walk(cls)
    )
    makes = any((script.names.qualified(call.func) or "").startswith("torch.nn.") for call in calls)
    if not freezes or not makes:
        return
    for call in calls:
        function = call.func
        if not isinstance(function, ast.Attribute) or function.attr != "to" or not _is_own(function.value):
            continue
        if inherits_format(call):
            yield Problem(call, _INHERITED)


def _is_false(call: ast.Call) -> bool:
    return bool(call.args) and getattr(call.args[0], "value", None) is False


def _is_own(node: ast.expr) -> bool:
    """``self``, or a layer of it."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name) and node.id == "self"


def _casts_frozen(event: Event) -> bool:
    base, value = event.receiver, event.args[0]
    value = value.items[0] if isinstance(value, Items) and value.items else value
    return isinstance(base, Tensor) and "frozen" in base.tags and isinstance(value, Tensor) and value.is_16_bit


RULE = Rule(
    code="HS154",
    name="adapter-in-16-bit",
    severity="warning",
    summary="Adapter weights that are trained or averaged are put into the 16-bit format of the frozen base.",
    why="""
An adapter is small: rank 16 on a layer of 4096 x 4096 is 131,072 weights beside 16.8 million, so fp32 costs 0.8 % more
memory than 16 bit. But its weights are the ones that learn. In bf16 an update under 1/512 of a weight rounds away, and
a `GradScaler` refuses fp16 gradients altogether.

The same happens by a mask: `for p in params: if not p.requires_grad: p.data = p.data.half()` also casts adapters that
are only inactive at this moment. Cast the base by name, before the adapters are added.
""",
    bad=(
        """\
import torch
from torch import nn


class LowRank(nn.Module):
    def __init__(self, base: nn.Linear, rank=4):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        self.to(base.weight.dtype)  # HS154

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def build(width):
    return LowRank(nn.Linear(width, width).to(torch.bfloat16))
""",
        """\
import torch
from torch import nn


def prepare(net: nn.Module):
    frozen = [p for p in net.parameters() if not p.requires_grad]
    for p in frozen:
        p.data = p.data.to(torch.float16)  # HS154


def follow(slow: nn.Module, fast: nn.Module):
    with torch.no_grad():
        for mine, theirs in zip(slow.parameters(), fast.parameters()):
            mine.mul_(0.999).add_(theirs, alpha=0.001)
""",
    ),
    good=(
        """\
import torch
from torch import nn


class LowRank(nn.Module):
    def __init__(self, base: nn.Linear, rank=4):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        self.to(base.weight.device)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x.float())).to(x.dtype)


def build(width):
    return LowRank(nn.Linear(width, width).to(torch.bfloat16))
""",
        """\
import torch
from torch import nn


def prepare(net: nn.Module):
    for name, p in net.named_parameters():
        if "base" in name:
            p.data = p.data.to(torch.float16)
""",
    ),
    check=check,
)
