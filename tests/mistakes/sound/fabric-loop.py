import torch
from lightning.fabric import Fabric
from torch import nn


def main(net, loader):
    fabric = Fabric(accelerator="cuda", precision="16-mixed")
    opt = torch.optim.Adam(net.parameters(), lr=1e-3)
    net, opt = fabric.setup(net, opt)
    loader = fabric.setup_dataloaders(loader)
    for x, y in loader:
        opt.zero_grad()
        loss = nn.functional.mse_loss(net(x).float(), y)
        fabric.backward(loss)
        fabric.clip_gradients(net, opt, max_norm=1.0)
        opt.step()
