import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(53)
net = nn.Linear(32, 4).to(device)
mean_net = AveragedModel(net).to(torch.bfloat16)  # HS153
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for it in range(20):
    x, y = torch.randn(16, 32, device=device), torch.randint(0, 4, (16,), device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        logits = net(x)
    loss = nn.functional.cross_entropy(logits.float(), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if it >= 10:
        mean_net.update_parameters(net)
