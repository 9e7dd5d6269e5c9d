"""The nets and questions that the tests of the region share."""

from __future__ import annotations

import itertools

import torch
from torch import nn

from halfstep import cpu16, oplist
from halfstep import region as region_module
from halfstep.hardware import Hardware
from halfstep.region import Region

CPU = Hardware.of("cpu", "plain CPU")
AMX = Hardware.of("cpu", "CPU with AMX", features=["amx_bf16", "amx_fp16"])
LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}
DOUBLE = torch.float64
LABELS = torch.tensor([0, 2, 1])
BF16, FP16, FULL = torch.bfloat16, torch.float16, torch.float32


def nesting():
    """How many autocast regions are open."""
    count = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return count


def autocast_state():
    return (
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
        nesting(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        oplist.active,
        cpu16.active,
        list(region_module._opened),
    )


class Seen(nn.Module):
    """A linear layer that notes the formats it sees and gives."""

    def __init__(self, width=4):
        super().__init__()
        self.linear, self.formats = nn.Linear(width, width), []

    def forward(self, x, scale=None):
        y = self.linear(x)
        self.formats.append((x.dtype, y.dtype, None if scale is None else scale.dtype))
        return y

    @property
    def last(self):
        return self.formats[-1][:2]


class Net(nn.Module):
    """A stem, two blocks of two parts each, and a head."""

    def __init__(self):
        super().__init__()
        self.stem = Seen()
        self.blocks = nn.ModuleList(nn.Sequential(Seen(), Seen()) for _ in range(2))
        self.head = Seen()

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def outputs(model):
    """The format that each layer gave the last time."""
    return {name: module.last[1] for name, module in model.named_modules() if isinstance(module, Seen)}


NAMES = ["stem", "blocks.0.0", "blocks.0.1", "blocks.1.0", "blocks.1.1", "head"]


def run(model, policy, hardware=CPU):
    region = Region(model, policy, hardware)
    with region:
        model(torch.randn(2, 4))
    return [outputs(model)[name] for name in NAMES]


class Tensors:
    """Tensors with values in (0.1, 0.9), where every operation is defined; their dtypes take turns."""

    def __init__(self, *dtypes):
        self.dtypes = itertools.cycle(dtypes)
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self, *shape):
        values = torch.rand(*shape, generator=self.generator) * 0.8 + 0.1
        return values.to(next(self.dtypes))


def same(a, b):
    return a == b if isinstance(a, str) else a.dtype == b.dtype and torch.equal(a, b)
