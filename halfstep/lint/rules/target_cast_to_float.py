"""HS149: class indices are cast to a float format before cross-entropy."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from halfstep.lint.cast import without_cast
from halfstep.lint.event import Event
from halfstep.lint.formats import format_of
from halfstep.lint.rule import Problem, Rule
from halfstep.lint.script import Script
from halfstep.lint.values import Object, Tensor, Unknown, Value

_FUNCTIONS = {"torch.nn.functional.cross_entropy", "torch.nn.functional.nll_loss"}
_CLASSES = {"torch.nn.CrossEntropyLoss", "torch.nn.NLLLoss"}
_FLOATS = {"float", "half", "bfloat16", "double"}
_INDICES = re.compile(r"(^|_)(y|ys|labels?|targets?|tgt|class|classes|class_ids?|ids)$", re.I)
"""How sources call class indices."""
_SHARES = re.compile(r"soft|mix|smooth|prob|dense|hot|dist|weight", re.I)
"""How they call what holds a share for every class."""


def check(script: Script) -> Iterator[Problem]:
    casts = {event.node: event for event in script.sites if event.what in {"cast", "other"} and _goes_to_float(event)}
    for event in script.sites:
        if not _is_cross_entropy(event):
            continue
        node = _target(event.node)
        if node not in casts or not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        target = node.func.value
        if _are_indices(casts[node].receiver, target):
            yield Problem(
                node,
                f"{script.source(target)} holds class indices: cross-entropy takes floating-point numbers for class "
                "probabilities and raises, or trains on nonsense where the shapes agree; leave them integers",
                (without_cast(script, node),),
                "unsafe",
            )


def _is_cross_entropy(event: Event) -> bool:
    if event.what == "call":
        return event.name in _FUNCTIONS
    return event.what == "forward" and isinstance(event.receiver, Object) and event.receiver.type in _CLASSES


def _target(call: ast.AST) -> ast.expr | None:
    if not isinstance(call, ast.Call) or any(isinstance(arg, ast.Starred) for arg in call.args):
        return None
    named = next((keyword.value for keyword in call.keywords if keyword.arg == "target"), None)
    return named or (call.args[1] if len(call.args) > 1 else None)


def _goes_to_float(cast: Event) -> bool:
    if cast.name not in {"to", "type"}:
        return cast.name in _FLOATS
    asked = [format_of(value) for value in (*cast.args, *(value for _, value in cast.keywords))]
    return any(formats and formats <= {"fp16", "bf16", "fp32", "fp64", "16 bit"} for formats in asked)


def _are_indices(value: Value | None, node: ast.expr) -> bool:
    """Integers, or of no known format under the name of class indices."""
    if isinstance(value, Tensor):
        made = value.node
        if isinstance(made, ast.Call) and "one_hot" in ast.unparse(made.func):
            return False
        if value.formats:
            return value.formats == {"int"}
    elif not isinstance(value, Unknown):
        return False
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):  # y.to(device), y.cuda()
        node = node.func.value
    return isinstance(node, ast.Name) and bool(_INDICES.search(node.id)) and not _SHARES.search(node.id)


RULE = Rule(
    code="HS149",
    name="target-cast-to-float",
    severity="warning",
    summary="Integer class targets are cast to a floating-point format for cross-entropy.",
    why="""
`cross_entropy` reads a floating-point target as class probabilities of the same shape as the logits. Class indices
that were cast have one number a sample and raise `expected target dtype to be Long or Byte, but got Float`; where the
shapes happen to agree, class 7 becomes a probability of 7. The cast often comes with 16-bit training, from casting a
whole batch: inputs want the format, labels do not. In fp16 indices beyond 2048 are not exact either, in bf16 beyond
256.

Leave the labels integers (`long`), and cast the logits: `cross_entropy(logits.float(), labels)`.
""",
    bad=(
        """\
import torch
import torch.nn.functional as F


def loss_of(model, x, y):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        logits = model(x)
    return F.cross_entropy(logits.float(), y.float())  # HS149
""",
        """\
import torch
from torch import nn

net = nn.Linear(12, 5)
criterion = nn.CrossEntropyLoss()
x, kind = torch.randn(16, 12), torch.randint(0, 5, (16,))
with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
    logits = net(x)
print(criterion(logits, kind.to(logits.dtype)))  # HS149
""",
    ),
    good=(
        """\
import torch
import torch.nn.functional as F


def loss_of(model, x, y):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        logits = model(x)
    return F.cross_entropy(logits.float(), y)
""",
        """\
import torch
import torch.nn.functional as F


def losses(model, x, y, soft_targets, num_classes):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        logits = model(x)
    logits = logits.float()
    hard = F.cross_entropy(logits, y.long())
    smooth = F.cross_entropy(logits, soft_targets.float())
    return hard, smooth, F.cross_entropy(logits, F.one_hot(y, num_classes).float())
""",
        """\
import torch
from torch import nn

net = nn.Linear(12, 1)
criterion = nn.BCEWithLogitsLoss()
x, is_spam = torch.randn(16, 12), torch.randint(0, 2, (16, 1))
with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
    print(criterion(net(x), is_spam.float()))
""",
    ),
    check=check,
    fix="unsafe",
    fix_note="It takes the cast away. Where the target does hold probabilities, that changes what is computed.",
)
