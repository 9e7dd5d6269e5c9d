"""HS139: an autocast region with a dtype that it does not lower to."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.lint.formats import format_of, region_devices, region_dtype, region_enabled
from halfstep.lint.rule import Problem, Rule
from halfstep.lint.script import Script
from halfstep.lint.values import Object

_LOWER = {"fp16", "bf16"}


def check(script: Script) -> Iterator[Problem]:
    for event in script.sites:
        region = event.result
        if event.what != "make" or not isinstance(region, Object) or region.kind != "region":
            continue
        formats = format_of(region_dtype(region))
        if region_enabled(region) is False or not formats or formats & _LOWER:
            continue
        name = " or ".join(sorted(formats))
        devices = region_devices(region)
        if devices == {"cuda"}:
            what = f"on CUDA every product in it runs in {name}"
        elif devices and "cuda" not in devices:
            what = f"on {' and '.join(sorted(devices))} torch turns it off with a warning"
        else:
            what = f"on CUDA every product in it runs in {name}, elsewhere torch turns it off with a warning"
        yield Problem(
            event.node,
            f"a region in {name} lowers nothing: {what}; pass a 16-bit dtype, or enabled=False for no autocast",
        )


RULE = Rule(
    code="HS139",
    name="region-dtype",
    severity="warning",
    summary="An autocast region is opened with a dtype that is not 16 bit.",
    why="""
Autocast lowers to float16 or bfloat16. What another dtype does depends on the device. On the CPU, and on every other
device than CUDA, torch 2.13 warns (`the target dtype is not supported. Disabling autocast`) and the block runs without
autocast: a 16-bit tensor that meets a float32 weight in it raises. On CUDA nothing is checked: `torch.float32` casts
the inputs of each product up to fp32, and `torch.float64` to fp64, which takes twice the memory and, on a consumer GPU,
up to 64 times the time.

Write `enabled=False` for a block without autocast, and cast what goes in. `enabled=dtype is not torch.float32` makes it
a setting.
""",
    bad=(
        """\
import torch


def loss_of(criterion, logits, target):
    with torch.autocast("cpu", dtype=torch.float32):  # HS139
        return criterion(logits, target)
""",
        """\
import torch
from torch import amp


class Sampler:
    precision = torch.float64

    def __init__(self, flow, device):
        self.flow = flow.eval()
        self.region = amp.autocast(device, Sampler.precision)  # HS139

    @torch.inference_mode()
    def draw(self, noise):
        with self.region:
            return self.flow(noise)
""",
    ),
    good=(
        """\
import torch


def loss_of(criterion, logits, target):
    with torch.autocast("cpu", enabled=False):
        return criterion(logits.float(), target)
""",
        """\
import torch

names = {"fp32": torch.float32, "bf16": torch.bfloat16}


def predict(net, x, precision):
    with torch.autocast("cuda", dtype=names[precision], enabled=precision != "fp32"):
        return net(x)
""",
    ),
    check=check,
)
