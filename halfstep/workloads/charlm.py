"""A byte-level GPT on the source text of Python's standard library, or on any other file."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep.errors import HalfstepError
from halfstep.workload import Workload

DEFAULT_STEPS = 150
DEFAULT_SEEDS = 5

VOCABULARY = 256
"""A token is a byte."""
HEAD_WIDTH = 32
NUM_HELD_OUT = 32
"""Windows of text that ``evaluate`` reads, evenly spaced over the last tenth."""
NUM_WARM_UP_STEPS = 20
MAX_BYTES = 2_000_000
"""How much of the standard library is read; a file of the caller's is read whole."""


def workload(
    seed: int,
    *,
    data: str | Path | None = None,
    width: int = 64,
    depth: int = 2,
    context: int = 64,
    batch_size: int = 16,
) -> Workload:
    """A byte-level GPT on the source text of the standard library, or on the bytes of the file ``data``."""
    for name, value in {"width": width, "depth": depth, "context": context, "batch_size": batch_size}.items():
        if not isinstance(value, int) or value < 1:
            raise HalfstepError(f"charlm with {name}={value!r}", "it is not a count", "Use a whole number from 1.")
    if width % HEAD_WIDTH:
        raise HalfstepError(
            f"charlm with width={width}",
            f"it is not a multiple of the head width {HEAD_WIDTH}",
            f"Use {(width // HEAD_WIDTH + 1) * HEAD_WIDTH}.",
        )
    text, held_out = _split(_read(data), context, "the standard library" if data is None else str(data))
    torch.manual_seed(seed)
    return Workload(
        model=GPT(width, depth, context),
        batches=_batches(text, seed, batch_size, context),
        loss=loss,
        optimizer=lambda parameters: torch.optim.AdamW(
            parameters, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        ),
        evaluate=lambda model: evaluate(model, held_out),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min(1.0, (step + 1) / NUM_WARM_UP_STEPS)
        ),
        max_norm=1.0,
    )


# --- model ---------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); x is [batch, time, width]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, time, 3, width // HEAD_WIDTH, HEAD_WIDTH)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # each [batch, head, time, HEAD_WIDTH]
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(batch, time, width))
        out: Tensor = x + self.down(F.gelu(self.up(self.mlp_norm(x))))
        return out


class GPT(nn.Module):
    """Tokens [batch, time] to logits [batch, time, VOCABULARY]; time is at most ``context``."""

    def __init__(self, width: int, depth: int, context: int) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


def loss(model: nn.Module, windows: Tensor) -> tuple[Tensor, int]:
    """Windows [batch, context + 1] to (sum of cross entropy over the predicted tokens in nats, their number)."""
    targets = windows[:, 1:].flatten()
    # Under CUDA autocast cross_entropy would take its log_softmax in 16 bit.
    logits = model(windows[:, :-1]).flatten(0, 1).float()
    return F.cross_entropy(logits, targets, reduction="sum"), targets.numel()


@torch.no_grad()
def evaluate(model: nn.Module, held_out: Tensor) -> Tensor:
    """Mean cross entropy over the held-out windows, in nats a token."""
    total, count = loss(model, held_out.to(next(model.parameters()).device))
    return total / count


# --- text ----------------------------------------------------------------------------------------------------------


def _read(data: str | Path | None) -> bytes:
    if data is not None:
        try:
            return Path(data).read_bytes()
        except OSError as error:
            raise HalfstepError(
                f"charlm with data={str(data)!r}", f"it cannot be read ({error.strerror})", "Give the path of a file."
            ) from None
    text = b""
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += file.read_bytes()
        if len(text) >= MAX_BYTES:
            break
    return text[:MAX_BYTES]


def _split(text: bytes, context: int, name: str) -> tuple[Tensor, Tensor]:
    """Text to train on [num_bytes] as uint8, and held-out windows [NUM_HELD_OUT, context + 1] as int64."""
    needed = 20 * (context + 1)
    if len(text) < needed:
        raise HalfstepError(
            f"charlm on {name}",
            f"{len(text)} bytes are too few for a context of {context}, which needs {needed}",
            "Give a longer file as data, or a shorter context.",
        )
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    boundary = len(tokens) * 9 // 10
    starts = torch.linspace(boundary, len(tokens) - context - 1, NUM_HELD_OUT).long()
    return tokens[:boundary], _windows(tokens, starts, context)


def _windows(tokens: Tensor, starts: Tensor, context: int) -> Tensor:
    return tokens[starts[:, None] + torch.arange(context + 1)].long()


def _batches(text: Tensor, seed: int, batch_size: int, context: int) -> Iterator[Tensor]:
    """Random windows of the text, without end: each [batch_size, context + 1]."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - context, (batch_size,), generator=generator)
        yield _windows(text, starts, context)
