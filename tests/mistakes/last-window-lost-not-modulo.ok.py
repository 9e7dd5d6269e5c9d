from argparse import Namespace

import torch


def train(args: Namespace, net, loader):
    opt = torch.optim.AdamW(net.parameters(), lr=args.lr)
    scaler = torch.amp.GradScaler("cuda")
    for epoch in range(args.epochs):
        for i, batch in enumerate(loader):
            with torch.autocast("cuda", dtype=torch.float16):
                loss = net(batch["x"].cuda(), batch["y"].cuda()).float()
            scaler.scale(loss / args.accum).backward()
            if not (i + 1) % args.accum or i + 1 == len(loader):
                scaler.step(opt)
                scaler.update()
                opt.zero_grad()
