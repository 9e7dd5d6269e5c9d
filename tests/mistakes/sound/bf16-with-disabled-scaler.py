import torch
from torch import nn

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def train(net, loader, precision="bf16"):
    dtype = DTYPES[precision]
    net = net.cuda()
    opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda", enabled=precision == "fp16")
    for x, y in loader:
        opt.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=dtype):
            out = net(x.cuda())
        loss = nn.functional.cross_entropy(out.float(), y.cuda())
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(opt)
        scaler.update()
