"""A small Llama-shaped model and its like, to be planned with techniques; each function is one workload."""

import functools
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from halfstep.plan.fake_step import fake_step
from halfstep.plan.subject import Subject
from halfstep.plan.target import target_of
from halfstep.workload import Workload

FILE = str(Path(__file__).resolve())
VOCABULARY, WIDTH, DEPTH, HEADS, INNER = 96, 64, 3, 4, 160
BATCH, TIME = 4, 32
BLOCK_WEIGHTS = 4 * WIDTH * WIDTH + 3 * WIDTH * INNER
"""Elements of the matrices of one block."""
NUM_PARAMETERS = 2 * VOCABULARY * WIDTH + DEPTH * (BLOCK_WEIGHTS + 2 * WIDTH) + WIDTH


def spec(name):
    return f"{FILE}:{name}"


@functools.cache
def traced(name, policy, *techniques, batch_size=None, finds_growth=False):
    subject = Subject(spec(name), batch_size)
    return fake_step(subject, policy, target_of(), techniques, finds_growth=finds_growth)


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5) * self.weight


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm, self.inner_norm = Norm(), Norm()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(WIDTH, INNER, bias=False), nn.Linear(WIDTH, INNER, bias=False)
        self.down = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x):
        y = self.attention_norm(x)
        parts = [layer(y).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)]
        x = x + self.out(F.scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2).flatten(2))
        y = self.inner_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.norm, self.head = Norm(), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.token(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def token_loss(model, tokens):
    return F.cross_entropy(model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())


def tokens():
    return torch.randint(VOCABULARY, (BATCH, TIME + 1), generator=torch.Generator().manual_seed(0))


def _make(model, optimizer, loss=token_loss, batch=None):
    return Workload(model, [tokens() if batch is None else batch], loss, optimizer)


def llama(seed):
    return _make(Llama(), lambda parameters: torch.optim.AdamW(parameters, lr=1e-3))


def llama_sgd(seed):
    return _make(Llama(), lambda parameters: torch.optim.SGD(parameters, lr=1e-3))


def plain(seed):
    """Layers that repeat no block."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    loss = lambda model, x: model(x).float().square().mean()  # noqa: E731
    return _make(model, lambda parameters: torch.optim.AdamW(parameters, fused=True), loss, torch.randn(BATCH, WIDTH))
