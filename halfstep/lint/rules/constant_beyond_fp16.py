"""HS140: a constant that does not fit the 16-bit format of the tensor it is put into."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator

from halfstep.formats import Format
from halfstep.lint.event import Event
from halfstep.lint.finding import Edit
from halfstep.lint.formats import region_formats
from halfstep.lint.operation import Operation, is_plain, operations
from halfstep.lint.rounding import in_a_format, numbers, rounded
from halfstep.lint.rule import Problem, Rule
from halfstep.lint.script import Script
from halfstep.lint.values import Tensor, Value

_CONVERTS = {
    "masked_fill": [("value", 2)],
    "index_fill": [("value", 3)],
    "scatter": [("value", 3)],
    "fill": [("value", 1)],
    "full": [("fill_value", 1)],
    "full_like": [("fill_value", 1)],
    "new_full": [("fill_value", 2)],
    "pad": [("value", 3)],
    "clamp": [("min", 1), ("max", 2)],
    "clip": [("min", 1), ("max", 2)],
    "clamp_min": [("min", 1)],
    "clamp_max": [("max", 1)],
}
"""Operations that convert a constant to the format of their tensor, and raise when it is too large; where it stands."""
_COMPUTES = {
    "where": [("input", 1), ("other", 2)],
    "add": [("input", 0), ("other", 1)],
    "sub": [("input", 0), ("other", 1)],
    "mul": [("input", 0), ("other", 1)],
}
"""Operations whose result holds infinity instead."""
_MASKS = frozenset({"masked_fill", "index_fill", "full_like", "where"})
"""What marks places as impossible: there the lowest number of the format is what was meant."""


def check(script: Script) -> Iterator[Problem]:
    for operation in operations(script, frozenset(_CONVERTS | _COMPUTES)):
        name, formats = operation.name, _formats(operation)
        for place in _CONVERTS.get(name) or _COMPUTES[name]:
            number = _beyond(operation.argument(*place), formats, raises=name in _CONVERTS)
            if number is None or (name == "mul" and number > 0):  # a mask times a negative; a positive may be a scale
                continue
            yield _problem(script, operation, number, place, formats)
    for event in script.sites:
        if event.what == "store" and isinstance(event.receiver, Tensor) and event.receiver.is_16_bit:
            number = _beyond(event.args[1], event.receiver.formats, raises=False)
            if number is not None:
                yield _stored(script, event, number, event.receiver.formats)


def _formats(operation: Operation) -> frozenset[str]:
    """The formats of the tensor that takes the constant; empty when they are not of 16 bit, or not known."""
    tensor, result = operation.tensor(), operation.event.result
    if operation.name in _COMPUTES or operation.name == "full":
        is_known = isinstance(result, Tensor) and result.is_16_bit and "number" not in result.tags
        return result.formats if isinstance(result, Tensor) and is_known else frozenset()
    if tensor is not None and not tensor.formats and operation.name == "masked_fill":
        return region_formats(operation.event.region)  # a mask, put into scores that come from elsewhere
    return tensor.formats if tensor is not None and tensor.is_16_bit else frozenset()


def _beyond(value: Value | None, formats: frozenset[str], raises: bool) -> float | None:
    """The number that ``value`` is, when it is finite and beyond the format, whatever else it may be."""
    known = numbers(value)
    return max(known, key=abs) if in_a_format(known, formats, _is_refused if raises else _overflows) else None


def _is_refused(number: float, format: Format) -> bool:
    return format.max < abs(number) < math.inf


def _overflows(number: float, format: Format) -> bool:
    return math.isfinite(number) and math.isinf(rounded(number, format))


def _problem(
    script: Script, operation: Operation, number: float, place: tuple[str, int], formats: frozenset[str]
) -> Problem:
    constant, name = operation.argument_node(*place), operation.name
    edits: tuple[Edit, ...] = ()
    if name in _MASKS and constant is not None:
        tensor = operation.argument_node("input", 0)
        if name == "where" and operation.is_call:
            tensor = operation.argument_node(*(_COMPUTES["where"][place == ("input", 1)]))
        edits = _bound(script, tensor, constant, number)
    shown = script.source(constant) if constant is not None else f"{number:g}"
    what = f'{name} raises "cannot be converted ... without overflow"' if name in _CONVERTS else "it becomes infinite"
    advice = "use torch.finfo(...).min of its dtype" if name in _MASKS else "compute this in float32"
    return _of(operation.node, f"{shown} does not fit {_described(formats)}: {what}; {advice}", edits)


def _stored(script: Script, event: Event, number: float, formats: frozenset[str]) -> Problem:
    node = event.node
    edits: tuple[Edit, ...] = ()
    if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Subscript):
        edits = _bound(script, node.targets[0].value, node.value, number)
    message = (
        f"{number:g} does not fit {_described(formats)}: it becomes infinite; use torch.finfo(...).min of its dtype"
    )
    return _of(node, message, edits)


def _of(node: ast.AST, message: str, edits: tuple[Edit, ...]) -> Problem:
    return Problem(node, message, edits, "safe" if edits else None)


def _bound(script: Script, tensor: ast.expr | None, constant: ast.expr, number: float) -> tuple[Edit, ...]:
    """The edits that put the bound of the tensor's own format in the place of ``constant``."""
    if tensor is None or not is_plain(tensor):
        return ()
    code = f"torch.finfo({script.source(tensor)}.dtype).{'min' if number < 0 else 'max'}"
    span = script.span(constant)
    return (Edit("replace", span, code), Edit("import", span, "import torch"))


def _described(formats: frozenset[str]) -> str:
    largest = "largest 65504" if "fp16" in formats else "largest 3.39e38"
    return f"{' or '.join(sorted(formats))} ({largest})"


RULE = Rule(
    code="HS140",
    name="constant-beyond-fp16",
    severity="error",
    summary="A constant such as -1e9 is put into a 16-bit tensor whose format cannot hold it.",
    why="""
The largest number of fp16 is 65504. `masked_fill`, `index_fill`, `full_like`, `new_full` and `clamp` convert their
constant to the format of the tensor and raise `value cannot be converted to type c10::Half without overflow` for
`-1e9`. In bf16 and fp32 the same line works, so it fails only where somebody turns fp16 on. `torch.where`, `x[mask] =
-1e9` and `(1 - mask) * -1e9` do not raise: the constant becomes `-inf`, and the softmax of a row that is masked
completely is NaN instead of uniform.

The lowest number of fp32, -3.40e38, does not fit bf16 either, whose lowest is -3.39e38.

Take the bound from the tensor: `scores.masked_fill(mask, torch.finfo(scores.dtype).min)`. It is right in every format.
""",
    bad=(
        """\
import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x, is_padding):
        q = self.query(x) * x.shape[-1] ** -0.5
        scores = q @ self.key(x).transpose(1, 2)
        scores = scores.masked_fill(is_padding[:, None, :], -1e9)  # HS140
        return scores.softmax(dim=-1) @ x


@torch.inference_mode()
def encode(layer: Attention, x, is_padding):
    with torch.autocast("cuda", dtype=torch.float16):
        return Attention(64).cuda()(x, is_padding)
""",
        """\
import torch

LARGE = 1e6


def rank(scorer, items, known):
    scorer.half().eval()
    with torch.no_grad():
        scores = scorer(items.half()).half()
    scores[known] = -LARGE  # HS140
    return scores.topk(10).indices


def penalise(logits, banned):
    with torch.autocast("cuda", dtype=torch.float16):
        return logits.masked_fill(banned, -1e10).argmax(dim=-1)  # HS140
""",
        """\
import torch
from torch import nn

gate = nn.Linear(32, 8, device="cuda", dtype=torch.float16)


def route(tokens: torch.Tensor, is_full: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        logits = gate(tokens.half())
    bias = is_full.half() * -1e9  # HS140
    return (logits + bias).argmax(dim=-1)
""",
    ),
    good=(
        """\
import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x, is_padding):
        q = self.query(x) * x.shape[-1] ** -0.5
        scores = q @ self.key(x).transpose(1, 2)
        scores = scores.masked_fill(is_padding[:, None, :], torch.finfo(scores.dtype).min)
        return scores.softmax(dim=-1) @ x


@torch.inference_mode()
def encode(layer: Attention, x, is_padding):
    with torch.autocast("cuda", dtype=torch.float16):
        return Attention(64).cuda()(x, is_padding)
""",
        """\
import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x, is_padding):
        q = self.query(x) * x.shape[-1] ** -0.5
        scores = q @ self.key(x).transpose(1, 2)
        scores = scores.masked_fill(is_padding[:, None, :], torch.finfo(scores.dtype).min)
        return scores.softmax(dim=-1) @ x


@torch.inference_mode()
def encode(x, is_padding):
    with torch.autocast("cuda", dtype=torch.float16):
        return Attention(64).cuda()(x, is_padding)
""",
        """\
import torch
from torch import nn

scorer = nn.Linear(16, 100).cuda()


@torch.inference_mode()
def rank(items, known, dtype=torch.bfloat16):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        rough = scorer(items)
        in_bf16 = rough.masked_fill(known, -1e9)
    with torch.autocast("cuda", dtype=torch.float16):
        scores = scorer(items)
        scores = scores.masked_fill(known, -1e4)
        scores = torch.where(known, scores, -65504.0)
        scores[known] = float("-inf")
        wide = scores.float().masked_fill(known, -1e9)
    return in_bf16, scores, wide, scorer(items).masked_fill(known, -1e9)
""",
    ),
    check=check,
    fix="safe",
    fix_note=(
        "A mask constant becomes `torch.finfo(x.dtype).min`, or `.max` for a positive one, where the tensor is a name."
        " Other constants are left: there the arithmetic has to move to float32."
    ),
)
