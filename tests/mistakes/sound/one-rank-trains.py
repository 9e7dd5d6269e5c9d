import torch
import torch.distributed as dist
from torch import nn


def train_teacher(teacher, loader):
    optimizer = torch.optim.AdamW(teacher.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda")
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            answer = teacher(x.cuda())
        scaler.scale(nn.functional.mse_loss(answer.float(), y.cuda())).backward()
        scaler.step(optimizer)
        scaler.update()


def main(teacher, loader):
    if dist.get_rank() == 0:
        train_teacher(teacher, loader)
    dist.barrier()
    for weight in teacher.parameters():
        dist.broadcast(weight.data, 0)
