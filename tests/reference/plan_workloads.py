"""Small workloads whose steps hold memory in many ways; each function is one, for ``Subject(f"{FILE}:name")``."""

from __future__ import annotations

import functools
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from halfstep.workload import Workload

FILE = str(Path(__file__).resolve())
WIDTH, DEPTH, BATCH = 24, 3, 6


def spec(name):
    return f"{FILE}:{name}"


def mean_loss(model, batch):
    x, labels = batch
    return F.cross_entropy(model(x).float(), labels)


def vectors(count=4, batch=BATCH, width=WIDTH):
    drawn = torch.Generator().manual_seed(0)
    return [
        (torch.randn(batch, width, generator=drawn), torch.randint(4, (batch,), generator=drawn)) for _ in range(count)
    ]


def make(model, optimizer=None, **more):
    optimizer = optimizer or OPTIMIZERS["momentum"]
    return Workload(**{"model": model, "batches": vectors(), "loss": mean_loss, "optimizer": optimizer, **more})


def layers(*last):
    inner = [layer for _ in range(DEPTH) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return nn.Sequential(*inner, *last, nn.Linear(WIDTH, 4))


# --- optimizers ----------------------------------------------------------------------------------------------------

_ADAMW = functools.partial(torch.optim.AdamW, lr=1e-3)
OPTIMIZERS = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.1),
    "momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=1e-4),
    "adamw_loop": functools.partial(_ADAMW, foreach=False),
    "adamw_foreach": functools.partial(_ADAMW, foreach=True),
    "adamw_fused": functools.partial(_ADAMW, fused=True),
    "amsgrad": functools.partial(_ADAMW, amsgrad=True),
    "adagrad": functools.partial(torch.optim.Adagrad, lr=0.01),
    "rmsprop": functools.partial(torch.optim.RMSprop, lr=0.01, momentum=0.9, centered=True),
    "lbfgs": functools.partial(torch.optim.LBFGS, lr=0.1, max_iter=2, history_size=2),
}


def _with(optimizer):
    return lambda seed: make(layers(), optimizer)


for _name, _optimizer in OPTIMIZERS.items():
    globals()[_name] = _with(_optimizer)


# --- loops ---------------------------------------------------------------------------------------------------------


def accumulated(seed):
    return make(layers(), OPTIMIZERS["adamw_fused"], accumulate=3)


def clipped(seed):
    return make(layers(), OPTIMIZERS["adamw_loop"], max_norm=0.5)


def scheduled(seed):
    schedule = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=2)
    return make(layers(), OPTIMIZERS["adamw_fused"], scheduler=schedule, accumulate=2, max_norm=1.0)


def summed(seed):
    """The loss is a pair of a sum and a count on the device."""

    def loss(model, batch):
        x, labels = batch
        return F.cross_entropy(model(x).float(), labels, reduction="sum"), (labels >= 0).sum()

    return make(layers(), loss=loss, accumulate=2)


# --- models --------------------------------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant):
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1))
            for _ in range(DEPTH)
        )
        self.head = nn.Linear(WIDTH, 4)
        self.use_reentrant = use_reentrant

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return self.head(x)


def checkpointed(seed):
    return make(Checkpointed(False), OPTIMIZERS["adamw_fused"], accumulate=2)


def reentrant(seed):
    return make(Checkpointed(True))


class Conv(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(2, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3),
            nn.GroupNorm(2, 8), nn.SiLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.5),
        )  # fmt: skip
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.conv(x))


def conv(seed):
    images = [(torch.randn(BATCH, 2, 12, 12), labels) for _, labels in vectors()]
    return make(Conv(), batches=images, accumulate=2, max_norm=1.0)


class Language(nn.Module):
    """An embedding tied to the output layer, attention with dropout, a LayerNorm."""

    def __init__(self, words=40):
        super().__init__()
        self.embed = nn.Embedding(words, WIDTH)
        self.block = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, batch_first=True, dropout=0.1)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, words, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.full((10, 10), -torch.inf).triu(1))

    def forward(self, words):
        return self.head(self.norm(self.block(self.embed(words), src_mask=self.mask)))


def language(seed):
    tokens = [torch.randint(40, (4, 11)) for _ in range(4)]

    def loss(model, words):
        return F.cross_entropy(model(words[:, :-1]).flatten(0, 1).float(), words[:, 1:].flatten())

    return make(Language(), OPTIMIZERS["adamw_fused"], batches=tokens, loss=loss)


def frozen(seed):
    model = layers()
    model[0].requires_grad_(False)
    model[2].bias.requires_grad_(False)
    return make(model)


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = layers(), nn.Linear(WIDTH, 5 * WIDTH)

    def forward(self, x):
        return self.used(x)


def unused(seed):
    return make(Unused(), OPTIMIZERS["adamw_fused"])


class Cached(nn.Module):
    """Makes a table in the first forward pass, which takes more than any later one, and keeps it."""

    def __init__(self):
        super().__init__()
        self.net, self.table = layers(), None

    def forward(self, x):
        if self.table is None:
            self.table = torch.ones(5000, WIDTH, device=x.device)[:50].clone()
        return self.net(x + self.table[: len(x)])


def cached(seed):
    return make(Cached())


class Remembering(nn.Module):
    """Keeps what it gave the last time, in place of what it kept before."""

    def __init__(self):
        super().__init__()
        self.net, self.last = layers(), None

    def forward(self, x):
        y = self.net[:-1](x)
        if self.last is not None:
            y = y + self.last
        self.last = y.detach()
        return self.net[-1](y)


def remembering(seed):
    return make(Remembering(), OPTIMIZERS["adamw_fused"])


class Hoarding(nn.Module):
    """Keeps what it gave, every time."""

    def __init__(self):
        super().__init__()
        self.net, self.given = layers(), []

    def forward(self, x):
        self.given.append(self.net(x))
        return self.given[-1]


def hoarding(seed):
    return make(Hoarding())


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(WIDTH // 4, WIDTH, batch_first=True), nn.Linear(WIDTH, 4)

    def forward(self, x):
        return self.head(self.lstm(x.unflatten(1, (4, -1)))[0][:, -1])


def recurrent(seed):
    return make(Recurrent())


class Named(nn.Module):
    """One module makes a tensor larger than all others together."""

    def __init__(self):
        super().__init__()
        self.first, self.large, self.last = layers(), Large(), nn.Linear(WIDTH, 4)

    def forward(self, x):
        return self.last(self.large(self.first[:2](x)))


class Large(nn.Module):
    def forward(self, x):
        return x + x.unsqueeze(0).expand(500, *x.shape).contiguous().mean(0)


def large(seed):
    return make(Named(), OPTIMIZERS["sgd"])


LOOPS = ("accumulated", "clipped", "scheduled", "summed")
MODELS = (
    "checkpointed",
    "reentrant",
    "conv",
    "language",
    "frozen",
    "unused",
    "cached",
    "remembering",
    "recurrent",
    "large",
)
