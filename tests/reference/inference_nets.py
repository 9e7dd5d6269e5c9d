"""Models as people write them, with an input each, that casting for inference is tested on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from halfstep.workloads.charlm import GPT


class RMSNorm(nn.Module):
    """Written by hand: in fp32, and back to what came in."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x):
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


@dataclass
class Output:
    logits: torch.Tensor
    hidden: torch.Tensor


class Llama(nn.Module):
    """Tied head, rotary tables, hand-written norms, a gated MLP, an additive fp32 mask, a dataclass as output."""

    def __init__(self, vocabulary=32, width=16, num_heads=2, context=8):
        super().__init__()
        self.num_heads = num_heads
        self.token = nn.Embedding(vocabulary, width)
        self.norm1, self.norm2, self.norm = RMSNorm(width), RMSNorm(width), RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, 32, bias=False), nn.Linear(width, 32, bias=False)
        self.down = nn.Linear(32, width, bias=False)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.token.weight
        half = width // num_heads // 2
        angles = torch.arange(context)[:, None] * 100.0 ** (-torch.arange(half) / half)
        self.register_buffer("cos", angles.cos().repeat(1, 2), persistent=False)
        self.register_buffer("sin", angles.sin().repeat(1, 2), persistent=False)

    def rotate(self, x):
        first, second = x.chunk(2, -1)
        return x * self.cos[: x.shape[-2]] + torch.cat([-second, first], -1) * self.sin[: x.shape[-2]]

    def forward(self, ids):
        x = self.token(ids)
        batch, time, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, time, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        mask = torch.full((time, time), torch.finfo(torch.float32).min).triu(1)
        mixed = F.scaled_dot_product_attention(self.rotate(qkv[0]), self.rotate(qkv[1]), qkv[2], attn_mask=mask)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, time, width))
        h = self.norm2(x)
        x = self.norm(x + self.down(F.silu(self.gate(h)) * self.up(h)))
        return Output(self.head(x), x)


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.bn = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.conv, self.bn2 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.norm = nn.GroupNorm(2, 8)
        self.head = nn.Linear(8, 5)
        for norm in (self.bn, self.bn2):
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.5, 2)
            nn.init.uniform_(norm.weight)

    def forward(self, x):
        x = F.relu(self.bn(self.stem(x)))
        x = F.relu(x + self.bn2(self.conv(x)))
        return {"logits": self.head(self.norm(x).mean((2, 3))), "features": x}


class Experts(nn.Module):
    """Products with matrices that belong to the module itself."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, 8, 8))
        self.bias, self.scale = nn.Parameter(torch.randn(8)), nn.Parameter(torch.tensor(0.7))

    def forward(self, x):
        return (torch.einsum("bi,eij->bej", x, self.w) + self.bias) * self.scale


class Vit(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch = nn.Conv2d(3, 8, 4, 4)
        self.position = nn.Parameter(torch.randn(1, 4, 8))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 5)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2) + self.position
        return self.head(self.norm(x).mean(1))


class Attention(nn.Module):
    def __init__(self, **settings):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True, **settings)

    def forward(self, x, mask=None):
        x = self.linear(x)
        return self.attention(x, x, x, key_padding_mask=mask, need_weights=False)[0]


def encoder(**settings):
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.5, batch_first=True, **settings)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=not settings)


class Cells(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru, self.lstm = nn.GRUCell(8, 6), nn.LSTMCell(6, 5)

    def forward(self, x):
        return self.lstm(self.gru(x))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = encoder()

    def forward(self, x):
        mask = torch.arange(x.shape[1]) >= torch.tensor([[5], [3]])
        return self.inner(x, src_key_padding_mask=mask)


class Twice(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x, x)


IDS = torch.arange(16).reshape(2, 8) * 5 % 32
IMAGE = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))
ROWS = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(2))
MODELS = {
    "gpt": (lambda: GPT(32, 2, 8), IDS),
    "llama": (Llama, IDS),
    "resnet": (ResNet, IMAGE),
    "experts": (Experts, ROWS[0]),
    "attention": (Attention, ROWS),
    "attention with bias_k": (lambda: Attention(add_bias_kv=True), ROWS),
    "encoder": (encoder, ROWS),
    "encoder, norm first": (lambda: encoder(norm_first=True), ROWS),
    "encoder with padding": (Encoder, ROWS),
    "bilinear": (lambda: Twice(nn.Bilinear(8, 8, 4)), ROWS),
    "cells": (Cells, ROWS[0]),
    "transposed": (lambda: nn.Sequential(nn.ConvTranspose2d(3, 4, 2), nn.PReLU(4), nn.InstanceNorm2d(4)), IMAGE),
}


def build(make, seed=0):
    torch.default_generator.manual_seed(seed)
    return make().eval()
