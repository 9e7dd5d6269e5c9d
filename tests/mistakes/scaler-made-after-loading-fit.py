import torch
from torch import nn


class Session:
    def __init__(self, net):
        self.net = net.cuda()
        self.opt = torch.optim.SGD(net.parameters(), lr=0.05)

    def fit(self, loader, checkpoint=None):
        self.scaler = torch.amp.GradScaler("cuda")
        if checkpoint is not None:
            state = torch.load(checkpoint)
            self.net.load_state_dict(state["net"])
            self.opt.load_state_dict(state["opt"])
            self.scaler.load_state_dict(state["scaler"])
        self.scaler = torch.amp.GradScaler("cuda", growth_interval=1000)  # HS164
        for x, y in loader:
            self.opt.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                out = self.net(x.cuda())
            loss = nn.functional.mse_loss(out.float(), y.cuda())
            self.scaler.scale(loss).backward()
            self.scaler.step(self.opt)
            self.scaler.update()
