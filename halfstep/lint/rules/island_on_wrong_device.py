"""HS131: a region that should turn autocast off names another device than the region around it."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.lint.formats import region_devices, region_enabled
from halfstep.lint.island import islands
from halfstep.lint.rule import Problem, Rule
from halfstep.lint.script import Script


def check(script: Script) -> Iterator[Problem]:
    seen: set[ast.AST] = set()
    for event in script.sites:
        if event.what in {"make", "enter"}:  # of several islands in one `with`, the later ones are not open yet
            continue
        around, inner = islands(event)
        devices, covered = (region_devices(around) if around else frozenset()), [region_devices(i) for i in inner]
        if around is None or not inner or not devices or not all(covered) or inner[-1].node in seen:
            continue
        left = devices.difference(*covered)
        if left == devices or (left and region_enabled(around)):
            seen.add(inner[-1].node)
            named, there = (" or ".join(sorted(part)) for part in (frozenset().union(*covered), left))
            yield Problem(
                inner[-1].node,
                f"this turns autocast off for {named}, but the region around it is for {there} and goes on: products in"
                f" here are still 16 bit; name the device type of the tensors",
            )


RULE = Rule(
    code="HS131",
    name="island-on-wrong-device",
    severity="error",
    summary="An autocast(enabled=False) block names another device type than the region it should interrupt.",
    why="""
`torch.autocast("cuda", enabled=False)` changes the state of CUDA alone. In a region of another device type it protects
nothing, and casting the inputs to float32 first does not help: the region that goes on casts them down again for every
product. On torch 2.13, `a.float() @ a.float()` in such a block under a bf16 CPU region answers in bf16. For two
512 x 512 matrices of normal values its largest error is then 3.9e-3 of the largest entry, against 4.2e-7 in fp32.

Name the device type of the tensor at hand: `torch.autocast(x.device.type, enabled=False)`.
""",
    bad=(
        """\
import torch
from torch import nn


class Rotary(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.register_buffer("rate", 1e4 ** (-torch.arange(0, width, 2, dtype=torch.float32) / width))

    def forward(self, place):
        with torch.autocast("cuda", enabled=False):  # HS131
            angle = place.float()[:, None] @ self.rate.float()[None, :]
        return torch.cat([angle.cos(), angle.sin()], dim=-1)


rotary = Rotary(32)
with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
    print(rotary(torch.linspace(0, 1, 512)))
""",
        """\
import torch


@torch.autocast("cpu", enabled=False)  # HS131
def covariance(features):
    features = features.float()
    return features.T @ features / len(features)


def train(net, opt, batches):
    device = torch.device("cuda", 0)
    for x in batches:
        opt.zero_grad()
        with torch.autocast(device.type, dtype=torch.bfloat16):
            h = net(x.to(device))
            loss = (covariance(h) - torch.eye(h.shape[1], device=device)).square().mean()
        loss.backward()
        opt.step()
""",
    ),
    good=(
        """\
import torch
from torch import nn


class Rotary(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.register_buffer("rate", 1e4 ** (-torch.arange(0, width, 2, dtype=torch.float32) / width))

    def forward(self, place):
        with torch.autocast(place.device.type, enabled=False):
            angle = place.float()[:, None] @ self.rate.float()[None, :]
        return torch.cat([angle.cos(), angle.sin()], dim=-1)


rotary = Rotary(32)
with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
    print(rotary(torch.linspace(0, 1, 512)))
""",
        """\
import torch


def gram(x):
    with torch.autocast(x.device.type, enabled=False):
        x = x.float()
        return x @ x.T


def predict(net, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return gram(net(x))
""",
        """\
import torch


def gram(x):
    x = x.float()
    with torch.autocast("cuda", enabled=False), torch.autocast("cpu", enabled=False):
        return x @ x.T


def predict(net, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return gram(net(x))
""",
    ),
    check=check,
)
