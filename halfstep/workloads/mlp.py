"""A two-layer network that learns a fixed random teacher: seconds, for a first look and for tests."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep.workload import Workload

DEFAULT_STEPS = 100
DEFAULT_SEEDS = 5

NUM_INPUTS, NUM_HIDDEN, NUM_CLASSES = 16, 32, 4
NUM_SAMPLES, NUM_HELD_OUT, BATCH_SIZE = 1024, 512, 32


def workload(seed: int) -> Workload:
    """A two-layer network that learns to classify as a fixed random teacher does."""
    inputs, labels = _teach()
    held_out = inputs[-NUM_HELD_OUT:], labels[-NUM_HELD_OUT:]
    order = torch.randperm(NUM_SAMPLES, generator=torch.Generator().manual_seed(seed))
    torch.manual_seed(seed)
    return Workload(
        model=build_model(),
        batches=[(inputs[rows], labels[rows]) for rows in torch.split(order, BATCH_SIZE)],
        loss=loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
        evaluate=lambda model: evaluate(model, held_out),
    )


def build_model() -> nn.Sequential:
    """Inputs [batch, NUM_INPUTS] to logits [batch, NUM_CLASSES]."""
    return nn.Sequential(nn.Linear(NUM_INPUTS, NUM_HIDDEN), nn.Tanh(), nn.Linear(NUM_HIDDEN, NUM_CLASSES))


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean cross entropy in nats of (inputs [batch, NUM_INPUTS], labels [batch])."""
    inputs, labels = batch
    return F.cross_entropy(model(inputs).float(), labels)


@torch.no_grad()
def evaluate(model: nn.Module, held_out: tuple[Tensor, Tensor]) -> Tensor:
    """Mean cross entropy over the held-out samples, in nats."""
    device = next(model.parameters()).device
    return loss(model, (held_out[0].to(device), held_out[1].to(device)))


def _teach() -> tuple[Tensor, Tensor]:
    """Inputs [NUM_SAMPLES + NUM_HELD_OUT, NUM_INPUTS] and the labels that a fixed random network gives them."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(NUM_SAMPLES + NUM_HELD_OUT, NUM_INPUTS, generator=generator)
    first = torch.randn(NUM_INPUTS, NUM_HIDDEN, generator=generator) / NUM_INPUTS**0.5
    second = torch.randn(NUM_HIDDEN, NUM_CLASSES, generator=generator)
    return inputs, (torch.tanh(inputs @ first) @ second).argmax(dim=1)
