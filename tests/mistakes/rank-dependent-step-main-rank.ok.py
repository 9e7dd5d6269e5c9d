import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main(net, loader):
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    net = DDP(net.to(local), device_ids=[local])
    opt = torch.optim.AdamW(net.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler("cuda")
    for i, (x, y) in enumerate(loader):
        opt.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.float16):
            out = net(x.to(local))
        loss = nn.functional.cross_entropy(out.float(), y.to(local))
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        if rank == 0 and i % 100 == 0:
            print(i, loss.item())
    dist.destroy_process_group()
