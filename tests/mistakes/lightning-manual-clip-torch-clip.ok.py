import lightning as L
import torch
from torch import nn


class SuperResolution(L.LightningModule):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.net = net

    def configure_optimizers(self):
        return torch.optim.Adam(self.net.parameters(), lr=1e-4)

    def training_step(self, batch, batch_idx):
        small, large = batch
        opt = self.optimizers()
        loss = nn.functional.l1_loss(self.net(small).float(), large)
        opt.zero_grad()
        self.manual_backward(loss)
        opt.step()


def main(net, loader):
    trainer = L.Trainer(max_epochs=5, precision="bf16-mixed", accelerator="gpu")
    trainer.fit(SuperResolution(net), loader)
