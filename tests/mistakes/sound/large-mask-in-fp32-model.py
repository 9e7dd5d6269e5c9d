import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(9)
net = nn.Linear(16, 16).to(device)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(3):
    x = torch.randn(4, 16, device=device)
    scores = net(x).masked_fill(x < 0, -1e9)
    loss = nn.functional.cross_entropy(scores, x.argmax(-1))
    opt.zero_grad()
    loss.backward()
    opt.step()
