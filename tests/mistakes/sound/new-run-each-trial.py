import torch
from zoo import detector, build_optimizer, mutate


def train(settings, loader):
    net = detector(settings).cuda()
    optimizer = build_optimizer(net, settings)
    scaler = torch.amp.GradScaler("cuda")
    for images, targets in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = net(images.cuda(), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return loss.item()


def search(settings, loader, num_trials):
    best = None
    for _ in range(num_trials):
        settings = mutate(settings)
        reached = train(settings, loader)
        best = reached if best is None else min(best, reached)
    return best
