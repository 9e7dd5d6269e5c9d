import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

LIMIT = 50.0


class Runner:
    def __init__(self, graph_net, lr):
        self.graph_net = graph_net.cuda()
        self.opt = torch.optim.Adam(self.graph_net.parameters(), lr=lr)
        self.scaler = torch.amp.GradScaler("cuda")
        self.num_dropped = 0

    def fit(self, molecules):
        for atoms, bonds, energy in molecules:
            self.opt.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                predicted = self.graph_net(atoms.cuda(), bonds.cuda())
            loss = nn.functional.l1_loss(predicted.float(), energy.cuda())
            self.scaler.scale(loss).backward()
            self.scaler.unscale_(self.opt)
            norm = clip_grad_norm_(self.graph_net.parameters(), 10.0)
            if norm > LIMIT:
                self.num_dropped += 1
                self.scaler.update()
                continue
            self.scaler.step(self.opt)
            self.scaler.update()
