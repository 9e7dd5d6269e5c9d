"""HS134: a block that should compute in float32 is given 16-bit tensors and computes in 16 bit."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.lint import vocabulary
from halfstep.lint.event import Event
from halfstep.lint.formats import region_devices
from halfstep.lint.island import islands
from halfstep.lint.operation import operations
from halfstep.lint.rule import Problem, Rule
from halfstep.lint.script import Script
from halfstep.lint.values import Object, Tensor, Value

_ARITHMETIC = (
    vocabulary.LOWER_PRECISION | vocabulary.FP32 | {"add", "sub", "mul", "div", "mean", "square", "var", "std"}
)


def check(script: Script) -> Iterator[Problem]:
    # An island that itself casts to 16 bit is there to keep autocast away, not to compute in float32.
    in_16_bit = {_island(event) for event in script.sites if event.what == "cast" and _is_16_bit(event)}
    lowered = {event.node for event in script.sites if event.region is None and _is_product(event)}
    seen: set[ast.AST] = set()
    for operation in operations(script, _ARITHMETIC):
        node = _island(operation.event)
        if node is None or node in seen or node in in_16_bit:
            continue
        around, _ = islands(operation.event)
        seems_16_bit = any(_comes_from(value, lowered) for value in operation.operands)
        if not (seems_16_bit if around is None else _is_16_bit(operation.event)):
            continue
        seen.add(node)
        at = operation.node.lineno  # type: ignore[attr-defined]
        yield Problem(
            node,
            f"autocast is off here, but line {at} computes with a tensor that the region around left in 16 bit, so in "
            "16 bit: cast the inputs with .float() first",
        )


def _island(event: Event) -> ast.AST | None:
    """The innermost block around an event that turns autocast off, unless it is for another device than the region."""
    around, inner = islands(event)
    if not inner:
        return None
    devices, named = (region_devices(around) if around else frozenset()), region_devices(inner[-1])
    return inner[-1].node if devices & named or not devices or not named else None


def _is_product(event: Event) -> bool:
    """Whether a layer answers that a region would run in 16 bit. Nobody turns autocast off where there is no region:
    so the one around is in another file or function."""
    layer = event.receiver
    if event.what != "forward" or not isinstance(layer, Object):
        return False
    return layer.type.rpartition(".")[2] in vocabulary.LOWER_PRECISION_CLASSES


def _comes_from(value: Value, lowered: set[ast.AST]) -> bool:
    return isinstance(value, Tensor) and value.node in lowered and not value.formats


def _is_16_bit(event: Event) -> bool:
    return isinstance(event.result, Tensor) and event.result.is_16_bit


RULE = Rule(
    code="HS134",
    name="island-without-cast",
    severity="warning",
    summary="An autocast(enabled=False) block gets 16-bit inputs and so computes in 16 bit.",
    why="""
Turning autocast off does not change a tensor. What the region around has left in fp16 or bf16 stays so, and without
autocast every operation computes in the format of its inputs: the block is less exact than the region, which would at
least have taken softmax, norms and sums to float32 (on CUDA). A sum of fp16 values in the block overflows at 65504,
and a bf16 result keeps 8 bits, about 2.4 decimal digits.

Cast what comes in: `with torch.autocast(x.device.type, enabled=False): y = f(x.float())`.
""",
    bad=(
        """\
import torch
from torch import nn


class Energy(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(16, 64)

    def forward(self, x):
        h = self.net(x)
        with torch.autocast("cuda", enabled=False):  # HS134
            return torch.logsumexp(h, dim=-1)


energy = Energy().cuda()
opt = torch.optim.Adam(energy.parameters(), lr=1e-4)
for x in torch.load("points.pt"):
    opt.zero_grad()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        low = energy(x.cuda())
    loss = low.float().mean()
    loss.backward()
    opt.step()
""",
        """\
import torch
from torch import nn

left, right = nn.Linear(24, 8).cuda(), nn.Linear(24, 8).cuda()


def whole(x):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        a, b = left(x), right(x)
        with torch.autocast("cuda", enabled=False):  # HS134
            return torch.matmul(a, b.transpose(0, 1))
""",
    ),
    good=(
        """\
import torch
from torch import nn


class Energy(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(16, 64)

    def forward(self, x):
        h = self.net(x)
        with torch.autocast("cuda", enabled=False):
            return torch.logsumexp(h.float(), dim=-1)


energy = Energy().cuda()
opt = torch.optim.Adam(energy.parameters(), lr=1e-4)
for x in torch.load("points.pt"):
    opt.zero_grad()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        low = energy(x.cuda())
    loss = low.float().mean()
    loss.backward()
    opt.step()
""",
        """\
import torch
from torch import nn

left, right = nn.Linear(24, 8).cuda(), nn.Linear(24, 8).cuda()


def whole(x):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        a, b = left(x), right(x)
        with torch.autocast("cuda", enabled=False):
            return a.float() @ b.float().T
""",
        """\
import torch
from torch import nn

norm = nn.Linear(24, 8).cuda()


def kernel(x, scale):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        h = norm(x)
        with torch.autocast("cuda", enabled=False):
            return h * scale.to(torch.bfloat16)
""",
    ),
    check=check,
)
