import torch
from torch import nn

torch.backends.cudnn.benchmark = True


def train(net, loader):
    net = net.cuda()
    opt = torch.optim.Adam(net.parameters(), lr=2e-4)
    scaler = torch.amp.GradScaler("cuda")
    for scan, contour in loader:
        opt.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.float16):
            out = net(scan.cuda())
        loss = nn.functional.binary_cross_entropy_with_logits(out.float(), contour.cuda())
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
