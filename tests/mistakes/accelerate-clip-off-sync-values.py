from accelerate import Accelerator
from torch import nn
from torch.optim import AdamW


def train(cfg, net, loader):
    acc = Accelerator(mixed_precision=cfg.precision, gradient_accumulation_steps=cfg.accum)
    opt = AdamW(net.parameters(), lr=cfg.lr)
    net, opt, loader = acc.prepare(net, opt, loader)
    net.train()
    for image, label in loader:
        with acc.accumulate(net):
            loss = nn.functional.cross_entropy(net(image).float(), label)
            acc.backward(loss)
            acc.clip_grad_value_(net.parameters(), 0.5)  # HS171
            opt.step()
            opt.zero_grad()
