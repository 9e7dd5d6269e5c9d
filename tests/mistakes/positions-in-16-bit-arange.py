import torch
from torch import nn


class RotaryTable(nn.Module):
    def __init__(self, dim: int, base: float = 10000.0) -> None:
        super().__init__()
        self.register_buffer("rates", base ** (-torch.arange(0, dim, 2).float() / dim))

    def forward(self, x):
        place = torch.arange(x.shape[1], device=x.device, dtype=torch.bfloat16)  # HS150
        angle = torch.outer(place.float(), self.rates)
        return angle.cos().to(x.dtype), angle.sin().to(x.dtype)


table = RotaryTable(64)
cos, sin = table(torch.zeros(1, 4096, 64, dtype=torch.bfloat16))
print((cos[300] - cos[301]).abs().max())
