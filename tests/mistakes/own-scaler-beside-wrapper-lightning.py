import lightning as L
import torch
from torch import nn
from torch.amp import GradScaler


class Classifier(L.LightningModule):
    def __init__(self, net):
        super().__init__()
        self.net = net
        self.scaler = GradScaler("cuda")

    def configure_optimizers(self):
        return torch.optim.AdamW(self.net.parameters(), lr=1e-3)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x).float(), y)
        return self.scaler.scale(loss)  # HS172


def main(net, loader):
    L.Trainer(precision="16-mixed", max_epochs=3, gradient_clip_val=1.0).fit(Classifier(net), loader)
