"""A convolutional net with BatchNorm on scikit-learn's 1797 handwritten digits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from halfstep.errors import HalfstepError
from halfstep.workload import Workload

DEFAULT_STEPS = 150
DEFAULT_SEEDS = 5

NUM_HELD_OUT = 360
BATCH_SIZE = 64


def workload(seed: int) -> Workload:
    """A convolutional net with BatchNorm on scikit-learn's handwritten digits."""
    images, labels = _read()
    fixed = torch.Generator().manual_seed(0)  # the split is the same for all seeds
    order = torch.randperm(len(images), generator=fixed)
    train, held_out = order[NUM_HELD_OUT:], order[:NUM_HELD_OUT]
    torch.manual_seed(seed)
    return Workload(
        model=ConvNet(),
        batches=DataLoader(
            TensorDataset(images[train], labels[train]),
            batch_size=BATCH_SIZE,
            shuffle=True,
            generator=torch.Generator().manual_seed(seed),
        ),
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-4),
        evaluate=lambda model: evaluate(model, images[held_out], labels[held_out]),
    )


class ConvNet(nn.Module):
    """Images [batch, 1, 8, 8] in 0 to 1, to logits [batch, 10]."""

    def __init__(self) -> None:
        super().__init__()
        self.low = nn.Conv2d(1, 16, 3, padding=1, bias=False)
        self.low_norm = nn.BatchNorm2d(16)
        self.high = nn.Conv2d(16, 32, 3, padding=1, bias=False)
        self.high_norm = nn.BatchNorm2d(32)
        self.head = nn.Linear(32 * 2 * 2, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.low_norm(self.low(images))), 2)
        x = F.max_pool2d(F.relu(self.high_norm(self.high(x))), 2)
        logits: Tensor = self.head(x.flatten(1))
        return logits


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean cross entropy in nats of (images [batch, 1, 8, 8], labels [batch])."""
    images, labels = batch
    return F.cross_entropy(model(images).float(), labels)


@torch.no_grad()
def evaluate(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy in nats with the running statistics of BatchNorm; the model's mode is restored."""
    device, was_training = next(model.parameters()).device, model.training
    model.eval()
    held_out_loss = loss(model, (images.to(device), labels.to(device)))
    model.train(was_training)
    return held_out_loss


def _read() -> tuple[Tensor, Tensor]:
    """Images [1797, 1, 8, 8] as float32 in 0 to 1, and labels [1797] as int64."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise HalfstepError(
            "workload digits",
            "it reads its images from scikit-learn, which is missing",
            "pip install 'halfstep[torch]'.",
        ) from None
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    return images, torch.tensor(digits.target, dtype=torch.int64)
