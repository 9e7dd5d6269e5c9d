import torch
from torch import nn


def main(net, loader, epochs, path="run/last.pt"):
    net = net.cuda()
    opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda")
    for epoch in range(epochs):
        for x, y in loader:
            opt.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                out = net(x.cuda())
            loss = nn.functional.mse_loss(out.float(), y.cuda())
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
        state = {
            "epoch": epoch,
            "net": net.state_dict(),
            "opt": opt.state_dict(),
        }
        torch.save(state, path)  # HS162
