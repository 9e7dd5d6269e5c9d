import torch
from torch import nn


def rotate(x: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
    if torch.is_autocast_enabled():  # HS137
        angle = angle.to(torch.get_autocast_dtype(x.device.type))
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], dim=-1)


def best_device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


device = best_device()
torch.manual_seed(37)
proj = nn.Linear(16, 16).to(device)
turn = torch.rand(8, device=device)
with torch.inference_mode(), torch.autocast(device.type, dtype=torch.bfloat16):
    print(rotate(proj(torch.randn(4, 16, device=device)), turn).dtype)
