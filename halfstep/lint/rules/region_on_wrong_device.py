"""HS130: an autocast region covers another type of device than the one that its tensors are on."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.lint import vocabulary
from halfstep.lint.event import Event
from halfstep.lint.formats import region_devices, region_enabled
from halfstep.lint.operation import operations
from halfstep.lint.rule import Problem, Rule
from halfstep.lint.script import Script
from halfstep.lint.values import Value


def check(script: Script) -> Iterator[Problem]:
    wrong: dict[ast.AST, Event] = {}
    right: set[ast.AST] = set()
    unsure: set[tuple[ast.AST, Value | None]] = set()
    products = (operation.event for operation in operations(script, vocabulary.LOWER_PRECISION))
    for event in (*(event for event in script.sites if event.what == "forward"), *products):
        region = event.region
        if region is None or region_enabled(region) is False or event.devices == {"meta"}:
            continue
        if not event.devices:
            unsure.add((event.node, event.receiver))  # on another path it may be known, by a setting
            continue
        covered = [region_devices(context) for context in event.contexts if context.kind == "region"]
        if all(covered) and not any(devices & event.devices for devices in covered):
            wrong.setdefault(region.node, event)
        else:
            right.add(region.node)
    for node, event in wrong.items():
        if node not in right and (event.node, event.receiver) not in unsure and event.region is not None:
            there, named = (" or ".join(sorted(devices)) for devices in (event.devices, region_devices(event.region)))
            what = "the model" if event.what == "forward" else "what is computed in it"
            yield Problem(
                node,
                f"this region covers {named}, but {what} is on {there}: everything in it stays in the format it has; "
                f"open the region for the device type of the tensors",
            )


RULE = Rule(
    code="HS130",
    name="region-on-wrong-device",
    severity="error",
    summary="An autocast region names another device type than the one its model and tensors are on.",
    why="""
Autocast is a switch for each type of device. `torch.autocast("cuda")` around tensors on the CPU changes nothing: a
linear layer answers in float32 as before, while the log says mixed precision. On a machine without CUDA it also turns
itself off, with a warning that is easily lost. The other way round, `torch.autocast("cpu")` around a model on a GPU
leaves every product in fp32: no memory is saved, and the 16-bit tensor cores stay idle.

Take the device type from where the tensors are, `x.device.type` or `torch.device(device).type`, and check once that a
product really comes out in 16 bit: `assert logits.dtype is torch.bfloat16`.
""",
    bad=(
        """\
import torch
from torch import nn

device = torch.device("mps" if torch.backends.mps.is_available() else "cpu")
head = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 5))
head.to(device)
opt = torch.optim.AdamW(head.parameters(), lr=1e-3)
for _ in range(20):
    x, y = torch.randn(32, 64, device=device), torch.randint(0, 5, (32,), device=device)
    with torch.autocast("cuda", dtype=torch.bfloat16):  # HS130
        logits = head(x)
    loss = nn.functional.cross_entropy(logits.float(), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        """\
import torch


@torch.inference_mode()
def embed(encoder, pages):
    vectors = []
    for page in pages:
        with torch.amp.autocast(device_type="cpu", dtype=torch.bfloat16):  # HS130
            vectors.append(encoder(page.cuda(non_blocking=True)))
    return torch.cat(vectors)
""",
        """\
import torch
from torch import nn


class Ranker(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.query, self.key = nn.Linear(width, 64), nn.Linear(width, 64)

    def forward(self, a, b):
        return self.query(a) @ self.key(b).T


def score(batches):
    ranker = Ranker(300).to("cuda:0").eval()
    region = torch.autocast("cpu", torch.bfloat16)  # HS130
    with torch.no_grad(), region:
        return [ranker(a, b) for a, b in batches]
""",
    ),
    good=(
        """\
import torch
from torch import nn

device = torch.device("mps" if torch.backends.mps.is_available() else "cpu")
head = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 5))
head.to(device)
opt = torch.optim.AdamW(head.parameters(), lr=1e-3)
for _ in range(20):
    x, y = torch.randn(32, 64, device=device), torch.randint(0, 5, (32,), device=device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        logits = head(x)
    loss = nn.functional.cross_entropy(logits.float(), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        """\
import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
net = nn.Linear(8, 2).to(device)
with torch.inference_mode(), torch.autocast(device, dtype=torch.bfloat16):
    print(net(torch.randn(4, 8, device=device)))
""",
        """\
import torch


def embed(encoder, page, use_cuda):
    if use_cuda:
        encoder = encoder.cuda()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return encoder(page.cuda())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return encoder(page)
""",
        """\
import torch
from torch import nn

net = nn.Linear(8, 2)
device = torch.device("cpu")
with torch.inference_mode(), torch.autocast("cuda", enabled=device.type == "cuda", dtype=torch.bfloat16):
    print(net(torch.randn(4, 8)))
""",
    ),
    check=check,
)
