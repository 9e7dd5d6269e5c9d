"""HS135: an autograd.Function that multiplies matrices is used under autocast without custom_fwd and custom_bwd."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator

from halfstep.lint import vocabulary
from halfstep.lint.event import Event
from halfstep.lint.finding import Edit
from halfstep.lint.formats import region_devices, region_formats
from halfstep.lint.names import last_name
from halfstep.lint.rule import Problem, Rule
from halfstep.lint.script import Script

_PRODUCTS = vocabulary.LOWER_PRECISION | {"conv1d_input", "conv1d_weight", "conv2d_input", "conv2d_weight", "multi_dot"}
_BY_HAND = {"to", "type", "type_as", "float", "half", "bfloat16"}


def check(script: Script) -> Iterator[Problem]:
    classes = [
        node for node in script.walk(ast.ClassDef) if isinstance(node, ast.ClassDef) and _is_function(script, node)
    ]
    for cls in classes:
        methods = {node.name: node for node in cls.body if isinstance(node, ast.FunctionDef)}
        forward, backward = methods.get("forward"), methods.get("backward")
        if forward is None or backward is None or not _mixes_formats(script, backward):
            continue
        bare = [method for method in (forward, backward) if not _is_decorated(method)]
        is_reached, devices = _under_autocast(script, cls) if bare else (False, frozenset())
        if not is_reached:
            continue
        if "setup_context" in methods:
            yield Problem(
                cls,
                f"{cls.name} is used under autocast, and its backward runs without: a product of a 16-bit gradient and "
                "a float32 tensor raises; cast them there by hand, custom_bwd does not work with setup_context",
            )
            continue
        missing = " and ".join("custom_fwd" if method is forward else "custom_bwd" for method in bare)
        edits: tuple[Edit, ...] = ()
        if len(devices) == 1 and script.names.module.bindings.get("torch") == "torch" and all(map(_is_static, bare)):
            edits = tuple(_decorated(script, method, method is forward, *devices) for method in bare)
        yield Problem(
            cls,
            f"{cls.name} is used under autocast, and its backward runs without: a product of a 16-bit gradient and a "
            f"float32 tensor raises; decorate it with torch.amp.{missing}",
            edits,
            "safe" if edits else None,
        )


def _is_function(script: Script, cls: ast.ClassDef) -> bool:
    names = {script.names.qualified(base) for base in cls.bases}
    return bool(names & {"torch.autograd.Function", "torch.autograd.function.Function"})


def _is_decorated(method: ast.FunctionDef) -> bool:
    return any(
        "custom_" in ast.unparse(decorator) or "autocast" in ast.unparse(decorator)
        for decorator in method.decorator_list
    )


def _is_static(method: ast.FunctionDef) -> bool:
    return [getattr(decorator, "id", "") for decorator in method.decorator_list] == ["staticmethod"]


def _mixes_formats(script: Script, backward: ast.FunctionDef) -> bool:
    """Whether ``backward`` multiplies matrices as they come, and neither casts them nor opens a region itself."""
    multiplies = False
    for node in ast.walk(backward):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
            multiplies = True
        elif isinstance(node, ast.Call):
            name = last_name(node.func)
            if name in _BY_HAND or "autocast" in name or script.names.qualified(node.func) == "torch.enable_grad":
                return (
                    False  # under enable_grad it computes its forward again, and whoever wrote that knows the formats
                )
            multiplies |= name in _PRODUCTS
    return multiplies


def _under_autocast(script: Script, cls: ast.ClassDef) -> tuple[bool, frozenset[str]]:
    """Whether ``cls`` is used in a region, or trained with in a source that opens one and shows no use of it.

    And for which device types its uses are; empty when that is not known.
    """
    aliases = {
        target.id
        for node in script.walk(ast.Assign)
        if isinstance(node, ast.Assign) and _applies(node.value, cls)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    uses = [
        event
        for event in script.sites
        if isinstance(event.node, ast.Call)
        and (_applies(event.node.func, cls) or getattr(event.node.func, "id", "") in aliases)
    ]
    inside = [event.region for event in uses if event.region and _is_on(event) and not event.in_no_grad]
    if inside:
        devices = [region_devices(region) for region in inside]
        return True, frozenset().union(*devices) if all(devices) else frozenset()
    for path in script.paths:
        if any(_is_on(event) for event in path) and any(event.what == "backward" for event in path):
            return not any(event in path.events for event in uses), frozenset()
    return False, frozenset()


def _applies(node: ast.expr, cls: ast.ClassDef) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "apply" and getattr(node.value, "id", "") == cls.name


def _is_on(event: Event) -> bool:
    return bool(region_formats(event.region) & {"fp16", "bf16", "16 bit"})


def _decorated(script: Script, method: ast.FunctionDef, is_forward: bool, device: str) -> Edit:
    """The method with its decorator, below ``@staticmethod``."""
    first, last = method.decorator_list[0].lineno, method.end_lineno
    lines = textwrap.dedent("\n".join(script.lines[first - 1 : last])).split("\n")
    name = "custom_fwd" if is_forward else "custom_bwd"
    lines.insert(method.lineno - first, f'@torch.amp.{name}(device_type="{device}")')
    return Edit("replace", script.span(method), "\n".join(lines) + "\n")


RULE = Rule(
    code="HS135",
    name="function-without-custom-fwd",
    severity="warning",
    summary="An autograd.Function that multiplies matrices is used under autocast without custom_fwd and custom_bwd.",
    why="""
`backward()` belongs outside of the region, so the `backward` of a custom Function runs without autocast. Its `forward`
ran inside: the output and so the incoming gradient are 16 bit, while the inputs that it saved are still float32. The
first product of the two raises (torch 2.13: `expected m1 and m2 to have the same dtype, but got: c10::BFloat16 !=
float`). Where nothing raises, because the saved tensors happen to be 16 bit too, the backward computes in another
format than the forward as soon as an input changes.

`@torch.amp.custom_fwd(device_type=...)` notes the state of autocast in `forward`, and
`@torch.amp.custom_bwd(device_type=...)` opens the same state in `backward` (torch 2.4 and up). They go below
`@staticmethod`. With a separate `setup_context` they do not work: torch 2.13 raises `AttributeError: ... has no
attribute '_fwd_used_autocast'`. Cast by hand there, `grad.to(weight.dtype)`, or write `forward(ctx, ...)` in one piece.
""",
    bad=(
        """\
import torch
from torch import nn


class Project(torch.autograd.Function):  # HS135
    @staticmethod
    def forward(ctx, x, basis):
        ctx.save_for_backward(x, basis)
        return torch.mm(x, basis)

    @staticmethod
    def backward(ctx, grad):
        x, basis = ctx.saved_tensors
        return torch.mm(grad, basis.t()), torch.mm(x.t(), grad)


basis = nn.Parameter(torch.randn(32, 8))
opt = torch.optim.SGD([basis], lr=0.1)
for _ in range(10):
    x = torch.randn(64, 32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = Project.apply(x, basis)
    loss = low.float().var()
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        """\
from torch import amp, autograd, nn, optim
from torch.nn import functional as F
import torch


class TiedLinear(autograd.Function):  # HS135
    @staticmethod
    def forward(x, weight):
        return F.linear(x, weight)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad.matmul(weight), grad.t().matmul(x)


tied = TiedLinear.apply


class Decoder(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(width))

    def forward(self, h):
        return tied(h, self.weight)


def train(batches):
    decoder = Decoder(64).cuda()
    opt = optim.AdamW(decoder.parameters())
    for h, target in batches:
        opt.zero_grad()
        with amp.autocast("cuda", dtype=torch.bfloat16):
            out = decoder(h)
        F.mse_loss(out.float(), target).backward()
        opt.step()
""",
    ),
    good=(
        """\
import torch
from torch import nn


class Project(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx, x, basis):
        ctx.save_for_backward(x, basis)
        return torch.mm(x, basis)

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, grad):
        x, basis = ctx.saved_tensors
        return torch.mm(grad, basis.t()), torch.mm(x.t(), grad)


basis = nn.Parameter(torch.randn(32, 8))
opt = torch.optim.SGD([basis], lr=0.1)
for _ in range(10):
    x = torch.randn(64, 32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = Project.apply(x, basis)
    loss = low.float().var()
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        """\
import torch
from torch import nn


class Project(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx, x, basis):
        ctx.save_for_backward(x, basis)
        return torch.mm(x, basis)

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, grad):
        x, basis = ctx.saved_tensors
        return torch.mm(grad, basis.t()), torch.mm(x.t(), grad)


basis = nn.Parameter(torch.randn(32, 8))
opt = torch.optim.SGD([basis], lr=0.1)
for _ in range(10):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = Project.apply(torch.randn(64, 32), basis)
    loss = low.float().var()
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        """\
import torch


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, grad):
        return grad


def train(net, opt, batches):
    for x, y in batches:
        opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            out = StraightThrough.apply(net(x))
        torch.nn.functional.mse_loss(out.float(), y).backward()
        opt.step()
""",
    ),
    check=check,
    fix="safe",
    fix_note="The decorators of torch.amp go below @staticmethod, with the device type of the region.",
)
