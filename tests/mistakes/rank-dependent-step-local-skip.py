import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Worker:
    def __init__(self, net, local_rank):
        self.net = DistributedDataParallel(net.to(local_rank), device_ids=[local_rank])
        self.opt = torch.optim.SGD(net.parameters(), lr=0.1)
        self.gs = torch.amp.GradScaler("cuda")

    def train_step(self, x, y):
        self.opt.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.float16):
            out = self.net(x)
        loss = nn.functional.cross_entropy(out.float(), y)
        self.gs.scale(loss).backward()
        self.gs.step(self.opt)
        if dist.get_rank() == 0:
            self.gs.update()  # HS176
