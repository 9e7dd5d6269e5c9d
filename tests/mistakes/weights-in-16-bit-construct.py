import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(52)
net = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 8)).to(device, torch.bfloat16)  # HS152
opt = torch.optim.AdamW(net.parameters(), lr=3e-5)
for _ in range(10):
    x, y = torch.randn(64, 16, device=device), torch.randint(0, 8, (64,), device=device)
    logits = net(x.to(torch.bfloat16))
    loss = nn.functional.cross_entropy(logits.float(), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
