"""HS132: inputs, models or losses cast to 16 bit by hand where an autocast region does the casting."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.lint.cast import spelled_format, without_cast
from halfstep.lint.event import Event
from halfstep.lint.formats import region_formats
from halfstep.lint.rule import Problem, Rule
from halfstep.lint.script import Script
from halfstep.lint.values import Function, Instance, Object, Tensor, Value
from halfstep.lint.weights import cast_of

_SIXTEEN = {"fp16", "bf16"}
_MOVES = {"to", "cuda", "cpu", "contiguous", "pin_memory"}
_DATASETS = {"Dataset", "IterableDataset", "MapDataset", "VisionDataset"}


def check(script: Script) -> Iterator[Problem]:
    forwards = [
        event for event in script.sites if event.what == "forward" and _is_on(event) and not _is_half(event, script)
    ]
    fed = {node for event in forwards for node in _handed_to(script, event)}
    pipeline = _pipeline(script) if forwards else set()
    in_file = any(_is_on(event) for event in script.sites)
    for event in script.sites:
        node, kind = event.node, event.what.partition(".")[0]
        if kind not in {"cast", "module", "other"} or spelled_format(event) not in _SIXTEEN:
            continue
        assert isinstance(node, ast.Call)
        text = script.source(node.func).rpartition(".")[2]
        if kind == "module" or _is_called(node, script):
            if _is_on(event):
                yield Problem(
                    node,
                    f"{text} inside a region casts the model's own weights, for good: take it away, the region casts a "
                    "copy of them for each product",
                )
        elif isinstance(event.receiver, Tensor) and "loss" in event.receiver.tags:
            if in_file:
                yield _problem(script, node, f"the loss loses its bits by .{text}: leave it in float32")
        elif isinstance(event.receiver, Tensor) and event.receiver.tags & {"grid", "long grid"}:
            continue  # positions and time steps are HS150's
        elif node in fed:
            yield _problem(
                script,
                node,
                f"the region casts its inputs itself: this .{text} rounds them for every operation; take it away",
            )
        elif event.function in pipeline:
            yield _problem(
                script,
                node,
                f"{text} rounds the data before the region: outside of it, as in validation, they do not fit the "
                "float32 model; leave them in float32",
            )


def _problem(script: Script, node: ast.Call, message: str) -> Problem:
    return Problem(node, message, (without_cast(script, node),), "unsafe")


def _is_on(event: Event) -> bool:
    return bool(region_formats(event.region) & {*_SIXTEEN, "16 bit"})


def _is_half(forward: Event, script: Script) -> bool:
    """Whether the weights of the module are 16 bit, so that its inputs may have to be."""
    receiver = forward.receiver
    assert isinstance(receiver, Object | Instance)
    for event in script.sites:
        if (
            event.what == "make"
            and event.result == receiver
            and (event.argument("torch_dtype") or event.argument("dtype"))
        ):
            return True
        is_its = isinstance(event.receiver, Object | Instance) and event.receiver.ident == receiver.ident
        if is_its and event.what.startswith("module.") and not _is_on(event) and cast_of(event) - {"fp32", "fp64"}:
            return True
    return False


def _handed_to(script: Script, forward: Event) -> Iterator[ast.AST]:
    """Where what a model is given was computed."""
    for value in (*forward.args, *(value for _, value in forward.keywords)):
        if isinstance(value, Tensor) and value.node is not None:
            yield value.node
    if isinstance(forward.node, ast.Call):
        for part in (*forward.node.args, *(keyword.value for keyword in forward.node.keywords)):
            yield from _moved(_last_value(script, part, forward) if isinstance(part, ast.Name) else part)


def _moved(node: ast.AST | None) -> Iterator[ast.AST]:
    """``x.half().cuda()``, and ``x.half()`` which it moves."""
    while isinstance(node, ast.Call):
        yield node
        node = node.func.value if isinstance(node.func, ast.Attribute) and node.func.attr in _MOVES else None


def _last_value(script: Script, name: ast.Name, forward: Event) -> ast.expr | None:
    """What the last statement before ``forward`` that assigns ``name`` gives it, in the same function."""
    last = None
    for node in script.walk(ast.Assign):
        assert isinstance(node, ast.Assign)
        if any(isinstance(target, ast.Name) and target.id == name.id for target in node.targets):
            is_before = node.lineno < forward.node.lineno  # type: ignore[attr-defined]
            if is_before and script.function(node) is forward.function and (last is None or node.lineno > last.lineno):
                last = node
    return None if last is None else last.value


def _is_called(node: ast.Call, script: Script) -> bool:
    """Whether ``node`` is ``model.half()`` in ``model.half()(x)``: a tensor cannot be called."""
    around = script.parents.get(node)
    return isinstance(around, ast.Call) and around.func is node


def _pipeline(script: Script) -> set[ast.AST | None]:
    """The functions that make the batches: of a dataset, and what a loader collates with."""
    found: set[ast.AST | None] = set()
    for node in script.walk(ast.ClassDef):
        assert isinstance(node, ast.ClassDef)
        if any((script.names.qualified(base) or "").rpartition(".")[2] in _DATASETS for base in node.bases):
            found |= {m for m in node.body if isinstance(m, ast.FunctionDef) and m.name in {"__getitem__", "__iter__"}}
    for event in script.sites:
        collate: Value | None = event.argument("collate_fn") if event.what == "make" else None
        if isinstance(collate, Function):
            found.add(collate.node)
    return found


RULE = Rule(
    code="HS132",
    name="cast-in-region",
    severity="warning",
    summary="Inputs, a model or a loss are cast to 16 bit by hand inside or right before an autocast region.",
    why="""
A region casts what its products need, for each product, and keeps everything else as it was. A cast by hand rounds the
values for all operations: 0.1 becomes 0.09998 in fp16 and 0.1001 in bf16, whole numbers above 2048 lose their last
bit in fp16, and above 65504 they are infinite. Where the region is missing, as in a validation loop, the same batch
raises `Input type (c10::Half) and bias type (float) should be the same`.

`model.half()` in a region is worse: it casts the weights themselves, and they stay so. An optimizer then updates 16-bit
weights, and `GradScaler` refuses with `Attempting to unscale FP16 gradients`. A loss keeps 8 bits in bf16 and 11 in
fp16, and above 65504 it is infinite in fp16.

Leave inputs, weights and loss in float32 and let the region cast.
""",
    bad=(
        """\
import torch
from torch import nn

model = nn.Sequential(nn.Linear(40, 80), nn.Tanh(), nn.Linear(80, 3)).cuda()
opt = torch.optim.SGD(model.parameters(), lr=0.1)


def train(batches):
    for x, y in batches:
        opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            x = x.cuda().to(torch.bfloat16)  # HS132
            logits = model(x)
        loss = nn.functional.cross_entropy(logits.float(), y.cuda())
        loss.backward()
        opt.step()
""",
        """\
import torch


@torch.inference_mode()
def answer(network, image):
    with torch.autocast("cuda", dtype=torch.float16):
        network = network.eval()
        return network.half()(image)  # HS132
""",
        """\
import torch
from torch import nn
from torch.utils.data import DataLoader


def collate(rows):
    features = torch.stack([row["features"] for row in rows])
    return {"features": features.half(), "label": torch.tensor([row["label"] for row in rows])}  # HS132


def fit(rows, device):
    net = nn.Linear(12, 2).to(device)
    opt = torch.optim.AdamW(net.parameters())
    loader = DataLoader(rows, batch_size=16, collate_fn=collate)
    for batch in loader:
        opt.zero_grad()
        with torch.autocast(device, dtype=torch.bfloat16):
            logits = net(batch["features"].to(device))
        loss = nn.functional.cross_entropy(logits.float(), batch["label"].to(device))
        loss.backward()
        opt.step()
""",
        """\
import torch
from torch import nn


class Fit:
    def __init__(self, net):
        self.net, self.opt = net.cuda(), torch.optim.Adam(net.parameters())

    def step(self, x, y):
        self.opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            out = self.net(x)
        loss = nn.functional.mse_loss(out.float(), y).bfloat16()  # HS132
        loss.backward()
        self.opt.step()
""",
    ),
    good=(
        """\
import torch
from torch import nn

model = nn.Sequential(nn.Linear(40, 80), nn.Tanh(), nn.Linear(80, 3)).cuda()
opt = torch.optim.SGD(model.parameters(), lr=0.1)


def train(batches):
    for x, y in batches:
        opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            x = x.cuda()
            logits = model(x)
        loss = nn.functional.cross_entropy(logits.float(), y.cuda())
        loss.backward()
        opt.step()
""",
        """\
import torch
from torch import nn


def train(model, opt, batches):
    for x, y in batches:
        opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = model(x.float())
        loss = nn.functional.cross_entropy(logits.float(), y)
        loss.backward()
        opt.step()
""",
        """\
import torch
from torch import nn

net = nn.Linear(8, 2).half().cuda().eval()


@torch.inference_mode()
def predict(x):
    with torch.autocast("cuda", dtype=torch.float16):
        return net(x.half())
""",
        """\
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        q, k = self.q(x), self.k(x)
        weight = torch.softmax(q @ k.transpose(-1, -2) / 8**0.5, dim=-1)
        return weight.to(q.dtype) @ k


block = Block().cuda()
with torch.inference_mode(), torch.autocast("cuda", dtype=torch.bfloat16):
    block(torch.randn(1, 4, 8, device="cuda"))
""",
    ),
    check=check,
    fix="unsafe",
    fix_note=(
        "The cast goes. Unsafe, because what else reads the tensor then gets float32: code that was written for 16 bit"
        " may raise, and a batch takes twice the memory. A cast of a model stays for you to move."
    ),
)
