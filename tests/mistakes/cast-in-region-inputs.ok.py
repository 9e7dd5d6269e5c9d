import torch
from torch import nn
from torch.amp import GradScaler


def train(detector, loader):
    detector.cuda().train()
    opt = torch.optim.SGD(detector.parameters(), lr=0.02, momentum=0.9)
    scaler = GradScaler("cuda")
    for lidar, boxes in loader:
        lidar, boxes = lidar.cuda(), boxes.cuda()
        opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            found = detector(lidar)
        loss = nn.functional.smooth_l1_loss(found.float(), boxes)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
