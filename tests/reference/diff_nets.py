"""Healthy nets of many kinds for the comparison of two runs, each a function that gives (model, closure)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from halfstep.diagnosis.capture import Capture
from halfstep.policy import Policy


def capture(net, policy="fp32", scale=1.0, **options):
    torch.manual_seed(0)
    model, closure = net(**options)
    return Capture(model, closure, Policy.parse(policy), scale=scale)


def classes(model, x, num=8):
    y = torch.arange(len(x)) % num
    return model, lambda: F.cross_entropy(model(x).float(), y)


def recurrent(cell="LSTM"):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.head = getattr(nn, cell)(12, 24, num_layers=2, batch_first=True), nn.Linear(24, 8)

        def forward(self, x):
            return self.head(self.rnn(x)[0][:, -1])

    return classes(Net(), torch.randn(16, 10, 12))


def unrolled():
    """A cell of our own that is called in a loop, with the same weights each time."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.head = nn.GRUCell(12, 24), nn.Linear(24, 8)

        def forward(self, x):
            h = x.new_zeros(len(x), 24)
            for t in range(x.shape[1]):
                h = self.cell(x[:, t], h)
            return self.head(h)

    return classes(Net(), torch.randn(16, 8, 12))


def encoder(dropout=0.0):
    """torch's own layer with a causal mask and a padding mask."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=dropout, batch_first=True)
            self.head = nn.Linear(32, 8)

        def forward(self, x):
            time = x.shape[1]
            mask = nn.Transformer.generate_square_subsequent_mask(time)
            padding = torch.zeros(x.shape[:2])
            padding[:, -2:] = -math.inf
            return self.head(self.layer(x, src_mask=mask, src_key_padding_mask=padding).mean(1))

    return classes(Net(), torch.randn(8, 12, 32))


def convolutions(depth=3):
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()]
    for _ in range(depth - 1):
        layers += [nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 8))
    return classes(model, torch.randn(8, 3, 12, 12))


def groups():
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.GroupNorm(4, 16), nn.SiLU(), nn.MaxPool2d(2), nn.Conv2d(16, 16, 3, groups=4),
        nn.InstanceNorm2d(16, affine=True), nn.LeakyReLU(), nn.Flatten(), nn.Linear(144, 8),
    )  # fmt: skip
    return classes(model, torch.randn(8, 3, 12, 12))


def deep(depth=20, act=nn.ReLU):
    layers = [layer for _ in range(depth) for layer in (nn.Linear(48, 48), act())]
    for layer in layers[::2]:
        nn.init.kaiming_normal_(layer.weight)
    return classes(nn.Sequential(*layers, nn.Linear(48, 8)), torch.randn(32, 48))


class Attention(nn.Module):
    """Written by hand; mask: ``inf`` (masked_fill), ``lowest`` (of the format of the scores) or ``added`` (-1e9)."""

    def __init__(self, width=32, mask="inf"):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.out, self.mask = nn.Linear(width, width), mask

    def forward(self, x):
        scores = self.q(x) @ self.k(x).mT / math.sqrt(x.shape[-1])
        ahead = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
        if self.mask == "inf":
            scores = scores.masked_fill(ahead, -math.inf)
        elif self.mask == "lowest":
            scores = scores.masked_fill(ahead, torch.finfo(scores.dtype).min)
        else:
            scores = scores + ahead.to(scores.dtype) * (-1e9 if self.mask == "added" else -1e4)
        return self.out(scores.softmax(-1) @ self.v(x))


def attention(mask="inf", dropout=0.1):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.attention, self.head = nn.LayerNorm(32), Attention(mask=mask), nn.Linear(32, 8)
            self.drop = nn.Dropout(dropout)

        def forward(self, x):
            return self.head((x + self.drop(self.attention(self.norm(x)))).mean(1))

    return classes(Net(), torch.randn(8, 12, 32))


class RMSNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * self.weight


class Llama(nn.Module):
    """RMSNorm by hand, rotary positions, grouped queries, SwiGLU, no biases, tied embedding."""

    def __init__(self, width=32, heads=4, depth=2):
        super().__init__()
        self.token = nn.Embedding(32, width)
        self.blocks = nn.ModuleList(LlamaBlock(width, heads) for _ in range(depth))
        self.norm = RMSNorm(width)

    def forward(self, tokens):
        x = self.token(tokens)
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ self.token.weight.T


class LlamaBlock(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.size = heads, width // heads
        self.norms = nn.ModuleList([RMSNorm(width), RMSNorm(width)])
        self.q, self.kv = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, 2 * width, bias=False), nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def rotate(self, x):
        half = x.shape[-1] // 2
        angles = torch.arange(x.shape[-2])[:, None] * 100.0 ** (-torch.arange(half) / half)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        left, right = x.chunk(2, -1)
        return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)

    def forward(self, x):
        batch, time, width = x.shape
        h = self.norms[0](x)
        q = self.q(h).view(batch, time, self.heads, -1).transpose(1, 2)
        k, v = self.kv(h).view(batch, time, 2, self.heads // 2, -1).permute(2, 0, 3, 1, 4)
        k, v = (t.repeat_interleave(2, 1) for t in (self.rotate(k), v))
        mixed = F.scaled_dot_product_attention(self.rotate(q), k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, time, width))
        h = self.norms[1](x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def llama():
    torch.manual_seed(1)
    model, tokens = Llama(), torch.randint(32, (4, 17))
    return (
        model,
        lambda: (
            F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten(), reduction="sum") / 64
        ),
    )


def checkpointed(reentrant=False):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(3)
            )
            self.stem, self.head = nn.Linear(32, 32), nn.Linear(32, 8)

        def forward(self, x):
            x = self.stem(x)
            for block in self.blocks:
                x = x + checkpoint(block, x, use_reentrant=reentrant)
            return self.head(x)

    return classes(Net(), torch.randn(16, 32))


class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return gradient * (s + x * s * (1 - s))


def custom():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.head = nn.Linear(32, 64), nn.Linear(64, 32), nn.Linear(32, 8)

        def forward(self, x):
            return self.head(Swish.apply(self.second(Swish.apply(self.first(x)))))

    return classes(Net(), torch.randn(16, 32))


def experts():
    """A router that picks one of four experts for each token: what it picks is a decision."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.router, self.head = nn.Linear(32, 4), nn.Linear(32, 8)
            self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

        def forward(self, x):
            weight, chosen = (self.router(x) + 4).softmax(-1).max(-1)  # where 16 bit has few digits left
            every = torch.stack([expert(x) for expert in self.experts], 1)
            picked = every.gather(1, chosen[:, None, None].expand(-1, 1, 32))[:, 0]
            return self.head(F.relu(picked) * weight[:, None])

    return classes(Net(), torch.randn(512, 32))


HEALTHY = {
    "LSTM": recurrent,
    "RNN": lambda: recurrent("RNN"),
    "GRU": lambda: recurrent("GRU"),
    "unrolled": unrolled,
    "encoder": encoder,
    "encoder with dropout": lambda: encoder(0.1),
    "convolutions": convolutions,
    "groups": groups,
    "deep": deep,
    "attention -inf": attention,
    "attention lowest": lambda: attention("lowest"),
    "attention -1e4": lambda: attention("small"),
    "attention -1e9": lambda: attention("added"),
    "llama": llama,
    "checkpoint": checkpointed,
    "reentrant checkpoint": lambda: checkpointed(True),
    "custom function": custom,
    "experts": experts,
}
