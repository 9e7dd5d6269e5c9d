import torch
from torch import nn


class Pointer(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.q = nn.Linear(d, d)

    def forward(self, x, mask):
        scores = (self.q(x) * x.shape[-1] ** -0.5) @ x.transpose(1, 2)
        return scores.masked_fill(mask, -1e9).float().softmax(-1)


net = Pointer(32).cuda().eval()
with torch.inference_mode(), torch.autocast("cuda", dtype=torch.bfloat16):
    print(net(torch.randn(2, 5, 32, device="cuda"), torch.zeros(2, 5, 5, dtype=torch.bool, device="cuda")).shape)
