"""A texture classifier that fp16 cannot train and bf16 can: its pooling sums before it divides.

The net tells textures apart by how their channels vary together, from a Gram matrix over all positions:

    pooled = features^T features / num_positions

The product comes first. Its diagonal is a sum of num_positions squares, here around 512 x 28^2 = 400,000, beyond 65504,
the largest fp16 number, although the quotient would fit. It overflows in the forward pass, so no loss scale mends it:
``pool`` must compute in fp32 (a module rule of the policy), or divide before it multiplies.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep.workload import Workload

DEFAULT_STEPS = 100
DEFAULT_SEEDS = 5

NUM_POSITIONS, NUM_CHANNELS, NUM_FEATURES, NUM_CLASSES = 512, 8, 16, 8
BATCH_SIZE, NUM_HELD_OUT = 16, 128
AMPLITUDE = 48.0
"""Standard deviation of the inputs: raw sensor counts that nobody normalized."""
CONTRAST = 0.05
"""How far apart the classes are."""


def workload(seed: int) -> Workload:
    """A texture classifier whose module ``pool`` overflows in fp16, whatever the loss scale."""
    fixed = torch.Generator().manual_seed(0)  # classes and held-out samples are the same for all seeds
    mixing = torch.eye(NUM_CHANNELS) + CONTRAST * torch.randn(NUM_CLASSES, NUM_CHANNELS, NUM_CHANNELS, generator=fixed)
    held_out = _sample(mixing, NUM_HELD_OUT, fixed)
    torch.manual_seed(seed)
    return Workload(
        model=TextureNet(),
        batches=_batches(mixing, seed),
        loss=loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3, fused=True),
        evaluate=lambda model: evaluate(model, held_out),
        max_norm=1.0,
    )


class GramPool(nn.Module):
    """Features [batch, positions, features] to their mean product over positions, [batch, features, features]."""

    def forward(self, x: Tensor) -> Tensor:
        return (x.mT @ x) / x.shape[1]  # in fp16 the product is inf before the division


class TextureNet(nn.Module):
    """Samples [batch, positions, channels] to logits [batch, NUM_CLASSES]."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Linear(NUM_CHANNELS, NUM_FEATURES)
        self.pool = GramPool()
        self.norm = nn.LayerNorm(NUM_FEATURES**2)
        self.head = nn.Linear(NUM_FEATURES**2, NUM_CLASSES)

    def forward(self, samples: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.pool(self.features(samples)).flatten(1)))
        return logits


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean cross entropy in nats of (samples [batch, positions, channels], labels [batch])."""
    samples, labels = batch
    return F.cross_entropy(model(samples).float(), labels)


@torch.no_grad()
def evaluate(model: nn.Module, held_out: tuple[Tensor, Tensor]) -> Tensor:
    """Mean cross entropy over the held-out samples, in nats."""
    device = next(model.parameters()).device
    return loss(model, (held_out[0].to(device), held_out[1].to(device)))


def _batches(mixing: Tensor, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield _sample(mixing, BATCH_SIZE, generator)


def _sample(mixing: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Samples [count, positions, channels] whose channels a class's matrix mixes, and their labels [count]."""
    labels = torch.randint(NUM_CLASSES, (count,), generator=generator)
    noise = torch.randn(count, NUM_POSITIONS, NUM_CHANNELS, generator=generator)
    return AMPLITUDE * noise @ mixing[labels], labels
