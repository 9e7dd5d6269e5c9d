"""A small classifier as a LightningModule, its batches, and a quiet Trainer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from lightning import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

QUIET = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}

# What Lightning warns of: its own use of torch, and data loaders as small as these.
FILTERS = [
    r"ignore:.*isinstance\(treespec, LeafSpec\):FutureWarning",
    r"ignore:.*isinstance\(treespec, LeafSpec\):DeprecationWarning",
    r"ignore:The '\w+_dataloader' does not have many workers",
    r"ignore:You defined a `validation_step` but have no `val_dataloader`",
]


def data(num=70, batch_size=10):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(num, 8, generator=generator)
    y = torch.randint(4, (num,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=batch_size)


def body():
    torch.default_generator.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def loss_of(net, batch, factor=1.0):
    return F.cross_entropy(net(batch[0]).float(), batch[1]) * factor


class Net(LightningModule):
    """factors: what the loss of a batch is multiplied by, by its number in the run; a large one overflows in fp16."""

    def __init__(self, fused=True, lr=1e-2, factors=None, interval=None, optimizer=torch.optim.AdamW):
        super().__init__()
        self.net = body()
        self.fused, self.lr, self.factors, self.interval = fused, lr, factors or {}, interval
        self.kind, self.seen = optimizer, 0

    def training_step(self, batch, batch_idx):
        self.seen += 1
        return loss_of(self.net, batch, self.factors.get(self.seen - 1, 1.0))

    def configure_optimizers(self):
        optimizer = self.kind(self.parameters(), lr=self.lr, **({"fused": True} if self.fused else {}))
        if self.interval is None:
            return optimizer
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": self.interval}}


def fit(module, plugin, loader=None, checkpoint=None, validation=None, **settings):
    settings = {**QUIET, "enable_checkpointing": False, "max_epochs": 1, **settings}
    trainer = Trainer(plugins=plugin, **settings)
    trainer.fit(module, data() if loader is None else loader, validation, ckpt_path=checkpoint)
    return trainer


def weights(module):
    return torch.cat([p.detach().float().flatten() for p in module.parameters()])
