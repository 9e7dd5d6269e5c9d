"""Healthy nets of every kind for the audit, and a product that accumulates in 16 bit."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    """Two blocks of attention with a causal and a padding mask of -inf, dropout and layer norms; tied weights."""

    def __init__(self, width=32, heads=4, vocabulary=40, dropout=0.1):
        super().__init__()
        self.heads = heads
        self.token = nn.Embedding(vocabulary, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(4))
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.mlp = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(2)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens):
        batch, length = tokens.shape
        x = self.dropout(self.token(tokens))
        ahead = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        padding = (tokens == 0)[:, None, None, :]
        for i in range(2):
            q, k, v = self.qkv[i](self.norms[2 * i](x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
            scores = (q @ k.mT) / q.shape[-1] ** 0.5
            scores = scores.masked_fill(ahead | padding, -torch.inf)
            weights = self.dropout(scores.softmax(-1))
            mixed = (weights @ v).transpose(1, 2).reshape(batch, length, -1)
            x = x + self.dropout(self.out[i](mixed))
            x = x + self.mlp[i](self.norms[2 * i + 1](x))
        return F.linear(x, self.token.weight)


class Conv(nn.Module):
    """Convolutions with a bias in front of batch norms, residuals, pooling."""

    def __init__(self, channels=8, classes=10):
        super().__init__()
        self.stem = nn.Conv2d(1, channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(channels)
        self.conv1, self.conv2 = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.GroupNorm(2, channels)
        self.down = nn.Conv2d(channels, channels, 3, stride=2)
        self.head = nn.Linear(channels, classes)

    def forward(self, x):
        x = F.relu(self.norm(self.stem(x)))
        x = x + self.norm2(self.conv2(F.leaky_relu(self.norm1(self.conv1(x)))))
        x = F.hardswish(self.down(F.avg_pool2d(x, 2)))
        return self.head(x.mean((2, 3)))


class Recurrent(nn.Module):
    """A GRU cell, a plain recurrence by hand and their readout."""

    def __init__(self, width=16):
        super().__init__()
        self.cell = nn.GRUCell(4, width)
        self.step = nn.Linear(width, width)
        self.head = nn.Linear(width, 3)
        self.width = width

    def forward(self, x):
        h = x.new_zeros(len(x), self.width)
        s = x.new_zeros(len(x), self.width)
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
            s = torch.tanh(self.step(s) + h)
        return self.head(s)


def attention_batch(generator):
    tokens = torch.randint(1, 40, (4, 17), generator=generator)
    tokens[1, 12:] = 0
    return tokens


def attention_loss(model, tokens):
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=0)


def conv_batch(generator):
    labels = torch.randint(10, (16,), generator=generator)
    return torch.randn(16, 1, 12, 12, generator=generator) + labels[:, None, None, None] / 5, labels


def recurrent_batch(generator):
    x = torch.randn(16, 6, 4, generator=generator)
    return x, (x.sum((1, 2)) > 0).long() + (x[:, 0, 0] > 0).long()


def classify(model, batch):
    return F.cross_entropy(model(batch[0]).float(), batch[1])


NETS = {
    "attention": (Attention, attention_batch, attention_loss),
    "conv": (Conv, conv_batch, classify),
    "recurrent": (Recurrent, recurrent_batch, classify),
}


class LowAccumulate(torch.autograd.Function):
    """A product that rounds every partial sum to the format of its inputs, forward and backward."""

    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return low_product(a, b)

    @staticmethod
    def backward(ctx, gradient):
        a, b = ctx.saved_tensors
        return low_product(gradient, b.T), low_product(a.T, gradient)


def low_product(a, b):
    out = a.new_zeros(a.shape[0], b.shape[1])
    for k in range(a.shape[1]):
        out += a[:, k, None] * b[None, k]
    return out
