import torch
import torch.nn.functional as F
from torch import nn

pixels = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 1, 1)).to("cuda")
opt = torch.optim.RMSprop(pixels.parameters(), lr=1e-4)

for step in range(200):
    image = torch.rand(4, 3, 64, 64, device="cuda")
    crack = (image.amax(1, keepdim=True) > 0.9).float()
    opt.zero_grad()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        logits = pixels(image)
        loss = F.binary_cross_entropy_with_logits(logits.float(), crack)
    loss.backward()
    opt.step()
