import torch


def losses(net, x, banned, y):
    with torch.autocast("cuda", dtype=torch.float16):
        logits = net(x)
    logits = logits.float().masked_fill(banned, -1e9)
    probs = logits.softmax(-1).clamp(1e-7, 1 - 1e-7)
    return -torch.log(probs.gather(1, y[:, None]) + 1e-8).mean()


def train(net, loader):
    net = net.cuda()
    opt = torch.optim.Adam(net.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda")
    for x, banned, y in loader:
        opt.zero_grad()
        scaler.scale(losses(net, x.cuda(), banned.cuda(), y.cuda())).backward()
        scaler.step(opt)
        scaler.update()
