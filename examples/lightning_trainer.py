"""Lightning's Trainer in fp16 with a fused optimizer, clipping and a scheduler, stopped and resumed.

Batch 11 is beyond fp16. The step is skipped, the scheduler waits, the loss scale halves; the checkpoint carries it.
"""

import logging
import tempfile
import warnings

import torch
import torch.nn.functional as F
from lightning import LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset

from halfstep.integrations.lightning import Precision

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", "The 'train_dataloader' does not have many workers")
warnings.filterwarnings("ignore", ".*treespec, LeafSpec")  # Lightning's own use of torch


class Classifier(LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self.net(x).float(), y)
        return loss * 1e7 if self.current_epoch == 0 and batch_idx == 11 else loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=64)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


torch.manual_seed(1)
x = torch.randn(512, 16)
loader = DataLoader(TensorDataset(x, x[:, :4].argmax(1)), batch_size=32)


def fit(num_epochs, checkpoint=None):
    plugin = Precision("fp16 on_overflow=skip")
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    trainer = Trainer(
        plugins=plugin, max_epochs=num_epochs, gradient_clip_val=1.0, accelerator="cpu", devices=1, **quiet
    )
    trainer.fit(Classifier(), loader, ckpt_path=checkpoint)
    return trainer


straight = fit(4)
plugin = straight.precision_plugin
print("in", straight.precision, "because", plugin.info.reason)
print(plugin.report)
print("the scheduler took", straight.lr_scheduler_configs[0].scheduler.last_epoch, "of 64 steps")

with tempfile.TemporaryDirectory() as folder:
    fit(2).save_checkpoint(f"{folder}/run.ckpt")
    resumed = fit(4, f"{folder}/run.ckpt")
weights = [trainer.lightning_module.net[0].weight for trainer in (straight, resumed)]
print("the same bits:", torch.equal(*weights))
