import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(49)
net = nn.Linear(12, 5).to(device)
opt = torch.optim.Adam(net.parameters(), lr=1e-2)
criterion = nn.CrossEntropyLoss()
data = [(torch.randn(16, 12), torch.randint(0, 5, (16,))) for _ in range(3)]
for features, kind in data:
    features = features.to(device)
    with torch.autocast(device, dtype=torch.bfloat16):
        logits = net(features)
    loss = criterion(logits.float(), kind.to(device))
    opt.zero_grad()
    loss.backward()
    opt.step()
