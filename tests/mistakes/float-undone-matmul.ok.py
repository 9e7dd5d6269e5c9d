import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(34)
image_tower, text_tower = nn.Linear(64, 32).to(device), nn.Linear(48, 32).to(device)
opt = torch.optim.AdamW([*image_tower.parameters(), *text_tower.parameters()], lr=1e-3)

for _ in range(10):
    pictures, captions = torch.randn(16, 64, device=device), torch.randn(16, 48, device=device)
    opt.zero_grad(set_to_none=True)
    with torch.autocast(device, dtype=torch.bfloat16):
        a, b = image_tower(pictures), text_tower(captions)
    similarity = a.float() @ b.float().T
    target = torch.arange(16, device=device)
    loss = nn.functional.cross_entropy(similarity.float(), target)
    loss.backward()
    opt.step()
