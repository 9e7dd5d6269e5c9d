import torch
from torch import nn


def train_one_epoch(net, criterion, opt, loader, device, scaler=None):
    for image, target in loader:
        image, target = image.to(device), target.to(device)
        with torch.autocast("cuda", dtype=torch.float16, enabled=scaler is not None):
            output = net(image)
            loss = criterion(output.float(), target)
        opt.zero_grad()
        if scaler is not None:
            scaler.scale(loss).backward()
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(net.parameters(), 5.0)
            scaler.step(opt)
            scaler.update()
        else:
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 5.0)
            opt.step()


def main(net, loader, amp: bool):
    device = torch.device("cuda")
    net.to(device)
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cuda") if amp else None
    decay = torch.optim.lr_scheduler.StepLR(opt, step_size=30)
    for _ in range(90):
        train_one_epoch(net, nn.CrossEntropyLoss(), opt, loader, device, scaler)
        decay.step()
