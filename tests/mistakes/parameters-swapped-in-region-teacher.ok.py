import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(17)
net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10)).to(device)
average = {k: v.clone() for k, v in net.state_dict().items()}
opt = torch.optim.SGD(net.parameters(), lr=0.05)

for _ in range(30):
    x, y = torch.randn(16, 32, device=device), torch.randint(0, 10, (16,), device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        logits = net(x)
    loss = nn.functional.cross_entropy(logits.float(), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    for k, v in net.state_dict().items():
        average[k].lerp_(v, 0.01)

held_out = torch.randn(64, 32, device=device)
with torch.autocast(device, dtype=torch.bfloat16):
    plain = net(held_out)
net.load_state_dict(average)
with torch.autocast(device, dtype=torch.bfloat16):
    averaged = net(held_out)
print((plain.float() - averaged.float()).abs().max().item())
