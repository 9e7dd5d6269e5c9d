import lightning as L
import torch
from torch import nn


class Digits(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))

    def configure_optimizers(self):
        opt = torch.optim.AdamW(self.net.parameters(), lr=1e-3)
        return {"optimizer": opt, "lr_scheduler": torch.optim.lr_scheduler.StepLR(opt, 5)}

    def training_step(self, batch, batch_idx):
        image, digit = batch
        loss = nn.functional.cross_entropy(self.net(image).float(), digit)
        self.log("loss", loss)
        return loss


def main(loader):
    trainer = L.Trainer(precision="16-mixed", gradient_clip_val=1.0, accumulate_grad_batches=4, max_epochs=3)
    trainer.fit(Digits(), loader)
