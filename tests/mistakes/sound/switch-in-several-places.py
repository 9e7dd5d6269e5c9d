"""One switch turns mixed precision on: the region and the scaler read the same flag."""

import argparse
from contextlib import nullcontext

import torch
from torch import nn


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--use-amp", action="store_true")
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--epochs", type=int, default=2)
    return parser.parse_args()


def region(use_amp: bool, device: torch.device):
    return torch.autocast(device.type, dtype=torch.float16) if use_amp else nullcontext()


def train(args, net, loader):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    net.to(device)
    opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler(device.type, enabled=args.use_amp)
    for _ in range(args.epochs):
        for x, y in loader:
            opt.zero_grad()
            with region(args.use_amp, device):
                out = net(x.to(device))
            loss = nn.functional.mse_loss(out.float(), y.to(device))
            scaler.scale(loss).backward()
            if args.clip > 0:
                scaler.unscale_(opt)
                nn.utils.clip_grad_norm_(net.parameters(), args.clip)
            scaler.step(opt)
            scaler.update()
