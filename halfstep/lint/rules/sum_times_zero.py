"""HS156: a sum in fp16 times 0, as a loss that is zero."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.lint.event import Event
from halfstep.lint.finding import Edit
from halfstep.lint.formats import region_devices, region_formats
from halfstep.lint.operation import Operation, in_float, operations
from halfstep.lint.rounding import numbers
from halfstep.lint.rule import Problem, Rule
from halfstep.lint.script import Script


def check(script: Script) -> Iterator[Problem]:
    for total, product in zeroed_sums(script):
        edits: tuple[Edit, ...] = ()
        if isinstance(total.node, ast.Call) and total.nodes:
            edits = (in_float(script, total.nodes[0]),)
        yield Problem(
            product.node,
            "this sum may pass 65504 and be inf in fp16, and inf * 0 is NaN; sum in float32, or take one element",
            edits,
            "unsafe" if edits else None,
        )


def zeroed_sums(script: Script) -> Iterator[tuple[Operation, Operation]]:
    """Every sum stored in fp16 that is multiplied by 0, and the product."""
    sums = {}
    for operation in operations(script, frozenset({"sum"})):
        tensor = operation.tensor()
        sure = tensor is not None and tensor.is_fp16 and "assumed" not in tensor.tags
        if sure and _stays(operation.event) and operation.argument("dtype", 9) is None:
            sums[operation.node] = operation
    for product in operations(script, frozenset({"mul"})):
        for position in (0, 1):
            tensor = product.tensor(position)
            total = sums.get(tensor.node) if tensor is not None and tensor.node is not None else None
            if total is not None and numbers(product.argument("other", 1 - position)) == {0.0}:
                yield total, product


def _stays(event: Event) -> bool:
    """Whether the sum is stored in 16 bit on one of the devices that it may run on."""
    if not region_formats(event.region) or event.region is None:
        return True
    return "cpu" in region_devices(event.region)


RULE = Rule(
    code="HS156",
    name="sum-times-zero",
    severity="warning",
    summary="A zero loss is made as preds.sum() * 0 of fp16 values, which is NaN when the sum overflows.",
    why="""
A batch without labels still needs a loss that reaches every parameter, and `preds.sum() * 0` looks like one. The sum
of an fp16 tensor is stored in fp16: 32,768 logits of 2 make 65,536, which is `inf`, and `inf * 0` is NaN. With the
small logits of an untrained net it works. The gradients are exact zeros, so that a GradScaler sees nothing wrong while
the loss in the log is NaN. In a CUDA region `sum` is computed in fp32; after the region, and on the CPU, it is not.

Sum in float32, `preds.float().sum() * 0`, or take one element: `preds.flatten()[0] * 0`.
""",
    bad=(
        """\
import torch
from torch import nn

net = nn.Conv2d(3, 4, 1).cuda()


def loss_of(image, labels):
    with torch.autocast("cuda", dtype=torch.float16):
        preds = net(image)
    if (labels == 255).all():
        return preds.sum() * 0  # HS156
    return nn.functional.cross_entropy(preds.float(), labels, ignore_index=255)
""",
        """\
import torch


def untouched(outputs: torch.Tensor) -> torch.Tensor:
    outputs = outputs.half()
    return 0.0 * torch.sum(outputs)  # HS156
""",
    ),
    good=(
        """\
import torch
from torch import nn

net = nn.Conv2d(3, 4, 1).cuda()


def loss_of(image, labels):
    with torch.autocast("cuda", dtype=torch.float16):
        preds = net(image)
    if (labels == 255).all():
        return preds.float().sum() * 0
    return nn.functional.cross_entropy(preds.float(), labels, ignore_index=255)
""",
        """\
import torch
from torch import nn

net = nn.Conv2d(3, 4, 1).cuda()


def loss_of(image, labels):
    with torch.autocast("cuda", dtype=torch.float16):
        preds = net(image)
        inside = preds.sum() * 0
    if (labels == 255).all():
        return preds.float().sum() * 0 + inside
    return nn.functional.cross_entropy(preds.float(), labels, ignore_index=255)
""",
        """\
import torch


def untouched(outputs: torch.Tensor) -> torch.Tensor:
    return outputs.half().flatten()[0] * 0
""",
    ),
    check=check,
    fix="unsafe",
    fix_note="It sums in float32. The loss is float32 from there on.",
)
