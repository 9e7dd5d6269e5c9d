"""HS159: a bf16 tensor is handed to NumPy."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.lint.event import Event
from halfstep.lint.finding import Edit
from halfstep.lint.operation import in_float
from halfstep.lint.rule import Problem, Rule
from halfstep.lint.script import Script
from halfstep.lint.values import Items, Tensor, Value

_READERS = frozenset(
    {
        "numpy.array",
        "numpy.asarray",
        "numpy.ascontiguousarray",
        "numpy.concatenate",
        "numpy.stack",
        "numpy.vstack",
        "numpy.hstack",
    }
)


def check(script: Script) -> Iterator[Problem]:
    for event in script.sites:
        handed = _handed(event)
        if handed is None:
            continue
        tensor, node = handed
        if not tensor.is_16_bit or "bf16" not in tensor.formats or tensor.tags & {"assumed", "number"}:
            continue
        edits: tuple[Edit, ...] = (in_float(script, node),) if node is not None else ()
        yield Problem(
            event.node,
            'NumPy has no bf16: this raises "Got unsupported ScalarType BFloat16"; call .float() first',
            edits,
            "safe" if edits else None,
        )


def _handed(event: Event) -> tuple[Tensor, ast.expr | None] | None:
    """The tensor that NumPy reads, and its expression where it stands alone."""
    node = event.node
    if event.what == "tensor.numpy" and isinstance(event.receiver, Tensor):
        return event.receiver, node.func.value if isinstance(node, ast.Call) and isinstance(
            node.func, ast.Attribute
        ) else None
    if event.what == "call" and event.name in _READERS and event.args:
        value: Value = event.args[0]
        if isinstance(value, Items):
            first = value.items[0] if value.items else None
            return (first, None) if isinstance(first, Tensor) else None
        if isinstance(value, Tensor):
            is_plain = isinstance(node, ast.Call) and bool(node.args) and not isinstance(node.args[0], ast.Starred)
            return value, node.args[0] if is_plain and isinstance(node, ast.Call) else None
    return None


RULE = Rule(
    code="HS159",
    name="bf16-to-numpy",
    severity="error",
    summary="A bf16 tensor is handed to NumPy, which has no such format.",
    why="""
`tensor.numpy()`, `np.asarray(tensor)` and `np.stack([tensor])` raise `TypeError: Got unsupported ScalarType BFloat16`.
Training itself never comes near NumPy, so that the error waits for the first evaluation, hours later. fp16 works,
since NumPy has a float16; it has no format with the 8 exponent bits of bf16 in 16 bits.

Cast first, which is exact: `preds.float().cpu().numpy()`. `.item()` and `.tolist()` take bf16 as it is.
""",
    bad=(
        """\
import torch
from torch import nn

net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1)).cuda()


def predict(batches):
    preds = []
    with torch.inference_mode(), torch.autocast("cuda", dtype=torch.bfloat16):
        for x in batches:
            preds.append(net(x.cuda()))
    preds = torch.cat(preds).squeeze(-1)
    return preds.cpu().numpy()  # HS159
""",
        """\
import numpy as np
import torch


def embed(vectors: torch.Tensor) -> np.ndarray:
    return np.asarray(vectors.bfloat16())  # HS159
""",
    ),
    good=(
        """\
import torch
from torch import nn

net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1)).cuda()


def predict(batches):
    preds = []
    with torch.inference_mode(), torch.autocast("cuda", dtype=torch.bfloat16):
        for x in batches:
            preds.append(net(x.cuda()))
    preds = torch.cat(preds).squeeze(-1)
    return preds.float().cpu().numpy()
""",
        """\
import torch
from torch import nn

net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1)).cuda()


def predict(batches):
    preds = []
    with torch.inference_mode(), torch.autocast("cuda", dtype=torch.bfloat16):
        for x in batches:
            preds.append(net(x.cuda()).float())
    preds = torch.cat(preds).squeeze(-1)
    return preds.cpu().numpy()
""",
        """\
import numpy as np
import torch


def embed(vectors: torch.Tensor) -> tuple[np.ndarray, list[float]]:
    return np.asarray(vectors.half()), vectors.bfloat16().tolist()
""",
    ),
    check=check,
    fix="safe",
    fix_note="The line raised; with `.float()` it gives NumPy the same numbers.",
)
