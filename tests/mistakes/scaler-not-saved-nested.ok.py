import torch
from torch import nn


def fit(net, loader, path):
    def save(epoch):
        torch.save(
            {
                "model_state": net.state_dict(),
                "optim_state": optim.state_dict(),
                "scaler_state": scaler.state_dict(),
                "epoch": epoch,
            },
            path,
        )

    net = net.cuda()
    optim = torch.optim.Adam(net.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda")
    for epoch in range(10):
        for x, y in loader:
            optim.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                out = net(x.cuda())
            loss = nn.functional.mse_loss(out.float(), y.cuda())
            scaler.scale(loss).backward()
            scaler.step(optim)
            scaler.update()
        save(epoch)
