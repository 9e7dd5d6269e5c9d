import torch
from torch import nn

torch.manual_seed(2)
net = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1)).cuda()
opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
for step in range(1000):
    x = torch.randn(512, 10, device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out = net(x)
    loss = nn.functional.mse_loss(out.float(), x.sum(-1, keepdim=True))
    opt.zero_grad(set_to_none=True)
    loss.backward()
    opt.step()
    print(f"step {step}: loss {float(loss.detach()):.4f}")  # HS202
