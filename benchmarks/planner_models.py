"""The models that planner.py plans: those of the T4 runs, as their harness trained them, and two to time plans with.

The runs are those of torch-preflight's tests/calibration/measure_cuda.py: autocast, torch.optim.AdamW with its
defaults, no gradient scaler, gradients set to None before each step, and a function for a step, so that the model's
output lives until the optimizer is done. Everything is built from a configuration; nothing is downloaded.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from halfstep import Workload
from halfstep.source import load


def held_by_step(loss: Callable[..., tuple[Any, torch.Tensor]], model: nn.Module, batches: Iterator[Any]) -> Workload:
    """A workload whose ``loss(model, batch)`` gives (output, loss); the output lives until the optimizer is done."""
    held: list[Any] = []

    def keep(model: nn.Module, batch: Any) -> torch.Tensor:
        output, value = loss(model, batch)
        held.append(output)
        return value

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        adam = torch.optim.AdamW(parameters, lr=1e-5)
        adam.register_step_post_hook(lambda *_: held.clear())
        return adam

    return Workload(model=model, batches=batches, loss=keep, optimizer=optimizer)


def tokens(batch_size: int, length: int, vocabulary: int) -> Iterator[torch.Tensor]:
    while True:
        yield torch.randint(0, vocabulary - 1, (batch_size, length))


def causal(batch_size: int, length: int) -> Workload:
    from transformers import GPT2Config, GPT2LMHeadModel

    def loss(model: nn.Module, ids: torch.Tensor) -> tuple[Any, torch.Tensor]:
        output = model(input_ids=ids, labels=ids)
        return output, output.loss

    model = GPT2LMHeadModel(GPT2Config())
    return held_by_step(loss, model, tokens(batch_size, length, model.config.vocab_size))


def encoder(model: Any, batch_size: int, length: int) -> Workload:
    def loss(model: nn.Module, ids: torch.Tensor) -> tuple[Any, torch.Tensor]:
        output = model(input_ids=ids)
        return output, output.last_hidden_state.float().pow(2).mean()

    return held_by_step(loss, model, tokens(batch_size, length, model.config.vocab_size))


def bert(batch_size: int, length: int) -> Workload:
    from transformers import BertConfig, BertModel

    return encoder(BertModel(BertConfig()), batch_size, length)


def distilbert(batch_size: int, length: int) -> Workload:
    from transformers import DistilBertConfig, DistilBertModel

    return encoder(DistilBertModel(DistilBertConfig()), batch_size, length)


class Bottleneck(nn.Module):
    """1x1 to ``width``, 3x3 with the stride, 1x1 to four times ``width``, and a shortcut past all three."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module | None = None
        if stride != 1 or channels != 4 * width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        y += x if self.shortcut is None else self.shortcut(x)
        return self.relu(y)


class ResNet50(nn.Module):
    """ResNet-50 with the stride in the 3x3 convolution, 25,557,032 parameters."""

    def __init__(self, num_classes: int = 1000) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        channels = 64
        blocks: list[nn.Module] = []
        for width, depth, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
            for index in range(depth):
                blocks.append(Bottleneck(channels, width, stride if index == 0 else 1))
                channels = 4 * width
        self.blocks = nn.Sequential(*blocks)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(channels, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.avgpool(self.blocks(x))
        return self.fc(torch.flatten(x, 1))


def resnet50(batch_size: int, size: int) -> Workload:
    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    batch = torch.zeros(batch_size, 3, size, size), torch.zeros(batch_size, dtype=torch.long)
    return Workload(
        model=ResNet50(),
        batches=itertools.repeat(batch),
        loss=loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
    )


# --- what a plan is asked for by name ------------------------------------------------------------------------------


def gpt2_4x128(seed: int) -> Workload:
    return causal(4, 128)


def gpt2_8x256(seed: int) -> Workload:
    return causal(8, 256)


def distilbert_4x128(seed: int) -> Workload:
    return distilbert(4, 128)


def distilbert_8x256(seed: int) -> Workload:
    return distilbert(8, 256)


def bert_4x128(seed: int) -> Workload:
    return bert(4, 128)


def bert_8x256(seed: int) -> Workload:
    return bert(8, 256)


def resnet50_16(seed: int) -> Workload:
    return resnet50(16, 224)


def resnet50_32(seed: int) -> Workload:
    return resnet50(32, 224)


def charlm_accumulated(seed: int) -> Workload:
    """The built-in charlm with three micro-batches in a window."""
    return dataclasses.replace(load("charlm")(seed), accumulate=3)


# --- what plans are timed with -------------------------------------------------------------------------------------


class Norm(nn.Module):
    """Root mean square norm in fp32, as Llama's own code writes it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


class LlamaBlock(nn.Module):
    """Attention with rotary positions, and a gated feed-forward network."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = Norm(width), Norm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape

        def split(y: torch.Tensor) -> torch.Tensor:
            return y.view(batch, length, self.heads, -1).transpose(1, 2)

        def turn(y: torch.Tensor) -> torch.Tensor:
            first, second = y.chunk(2, -1)
            return (y * cosine + torch.cat([-second, first], -1) * sine).to(y.dtype)

        y = self.norm1(x)
        query, key, value = turn(split(self.query(y))), turn(split(self.key(y))), split(self.value(y))
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """Tokens [batch, length] to logits; the defaults are those of Llama 2 7B, 6,738,415,616 parameters."""

    def __init__(
        self, vocabulary: int = 32000, width: int = 4096, depth: int = 32, heads: int = 32, hidden: int = 11008
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(LlamaBlock(width, heads, hidden) for _ in range(depth))
        self.norm, self.head = Norm(width), nn.Linear(width, vocabulary, bias=False)
        self.size = width // heads

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rates = 10000 ** (-torch.arange(0, self.size, 2, device=ids.device) / self.size)
        angles = torch.arange(ids.shape[1], device=ids.device)[:, None] * rates.repeat(2)
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x, angles.cos(), angles.sin())
        return self.head(self.norm(x))


def next_token(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    logits = model(ids)[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())


def language_model(model: nn.Module, batch_size: int, length: int) -> Workload:
    return Workload(
        model=model,
        batches=[torch.zeros(batch_size, length, dtype=torch.long)],
        loss=next_token,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
    )


def llama_7b(seed: int) -> Workload:
    return language_model(Llama(), 1, 2048)


def llama_small(seed: int) -> Workload:
    """For a real card: 47 million parameters, head size 64."""
    return language_model(Llama(8192, 512, 12, 8, 1408), 8, 512)


class GPT(nn.Module):
    """Tokens [batch, length] to logits; the defaults are those of GPT-2, 124,439,808 parameters with a tied head."""

    def __init__(self, vocabulary: int = 50257, length: int = 1024, width: int = 768, depth: int = 12) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 12, 4 * width, 0.0, F.gelu, batch_first=True, norm_first=True)
            for _ in range(depth)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        length = ids.shape[1]
        x = self.embedding(ids) + self.positions(torch.arange(length, device=ids.device))
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=ids.device)
        for block in self.blocks:
            x = block(x, mask, is_causal=True)
        return self.head(self.norm(x))


def gpt_125m(seed: int) -> Workload:
    return language_model(GPT(), 8, 1024)
