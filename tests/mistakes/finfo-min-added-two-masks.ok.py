import torch
from torch import nn


class CausalAttention(nn.Module):
    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(d, 3 * d), nn.Linear(d, d)

    def forward(self, x, padding):
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
        lowest = torch.finfo(scores.dtype).min
        future = torch.ones(n, n, dtype=torch.bool, device=x.device).triu(1)
        scores = scores.masked_fill(future | padding[:, None, None, :], lowest)
        return self.proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, n, d))


@torch.inference_mode()
def encode(layer, x, padding):
    with torch.autocast("cuda", dtype=torch.float16):
        return layer(x.cuda(), padding.cuda())
