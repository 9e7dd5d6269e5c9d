import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main(net, loader):
    dist.init_process_group("nccl")
    rank, local = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    net = DistributedDataParallel(net.to(local), device_ids=[local])
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda")
    for i, (x, y) in enumerate(loader):
        opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            out = net(x.to(local))
        loss = nn.functional.cross_entropy(out.float(), y.to(local))
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        if rank == 0 and i % 500 == 0:
            print(i, loss.item(), scaler.get_scale())
            torch.save({"net": net.module.state_dict(), "opt": opt.state_dict(), "scaler": scaler.state_dict()}, "a.pt")
