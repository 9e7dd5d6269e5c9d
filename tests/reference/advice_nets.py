"""Pairs of workloads: one that advice is given for, and one in which it was taken. ``spec("name")`` is a Subject's."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from halfstep.workload import Workload

WIDTH, NUM_BLOCKS = 32, 4


def spec(name):
    return f"{Path(__file__).resolve()}:{name}"


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Blocks(nn.Module):
    def __init__(self, num_classes=8, is_checkpointed=False, buffer=0):
        super().__init__()
        self.is_checkpointed = is_checkpointed
        self.start = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.head = nn.Linear(WIDTH, num_classes)
        if buffer:
            self.register_buffer("table", torch.zeros(buffer))

    def forward(self, x):
        x = self.start(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.is_checkpointed else block(x)
        return self.head(x)


def cross_entropy(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def in_pieces(model, batch):
    """The loss of eight pieces of the batch, each computed again in the backward pass."""
    x = model.start(batch[0])
    for block in model.blocks:
        x = block(x)

    def piece(x, labels):
        return F.cross_entropy(model.head(x), labels, reduction="sum")

    pairs = zip(x.chunk(8), batch[1].chunk(8), strict=True)
    return sum(checkpoint(piece, *pair, use_reentrant=False) for pair in pairs) / len(x)


def made(batch_size=64, format=torch.float32, optimizer=torch.optim.AdamW, loss=cross_entropy, accumulate=1, **model):
    batch = (torch.zeros(batch_size, WIDTH, dtype=format), torch.zeros(batch_size, dtype=torch.long))
    return Workload(Blocks(**model), [batch], loss, optimizer, accumulate=accumulate)


def few(seed):
    return made(1)


def few_fused(seed):
    return made(1, optimizer=partial(torch.optim.AdamW, fused=True))


def many(seed):
    return made(512)


def many_checkpointed(seed):
    return made(512, is_checkpointed=True)


def classes(seed):
    return made(512, num_classes=2048)


def classes_in_pieces(seed):
    return made(512, num_classes=2048, loss=in_pieces)


def window(seed):
    return made(accumulate=3)


def window_of_one(seed):
    return made()


def buffered(seed):
    return made(buffer=10_000)


class Wide(nn.Module):
    """Small behind its inputs, which are the most of what it holds."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Conv2d(3, 2, 3, stride=4), nn.Linear(2, 4)

    def forward(self, x):
        return self.head(self.first(x).mean((2, 3)))


def wide(seed, format=torch.float32):
    batch = (torch.zeros(8, 3, 64, 64, dtype=format), torch.zeros(8, dtype=torch.long))
    return Workload(Wide(), [batch], cross_entropy, torch.optim.AdamW)


def wide_in_bf16(seed):
    return wide(seed, torch.bfloat16)


def frozen(seed, format=torch.float32):
    workload = made(4)
    for parameter in workload.model.blocks.parameters():
        parameter.requires_grad_(False)
        parameter.data = parameter.data.to(format)
    return workload


def frozen_in_bf16(seed):
    return frozen(seed, torch.bfloat16)
