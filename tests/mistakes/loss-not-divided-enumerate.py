import torch
from torch import nn


def train_epoch(model, loader, opt, scaler, accum_steps=4, device="cuda"):
    model.train()
    num_batches = len(loader)
    for i, (x, y) in enumerate(loader):
        with torch.autocast(device, dtype=torch.float16):
            out = model(x.to(device))
            loss = nn.functional.cross_entropy(out.float(), y.to(device))
        scaler.scale(loss).backward()  # HS120
        if (i + 1) % accum_steps == 0 or (i + 1) == num_batches:
            scaler.step(opt)
            scaler.update()
            opt.zero_grad(set_to_none=True)


if __name__ == "__main__":
    torch.manual_seed(20)
    net = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 4)).cuda()
    data = [(torch.randn(8, 20), torch.randint(0, 4, (8,))) for _ in range(10)]
    train_epoch(net, data, torch.optim.SGD(net.parameters(), lr=0.1), torch.amp.GradScaler("cuda"))
