import torch
from torch import nn


class Engine:
    def __init__(self, device: torch.device, net: nn.Module) -> None:
        self.device, self.net = device, net.to(device).eval()

    @torch.inference_mode()
    def __call__(self, x):
        kind = "cuda" if self.device.type == "cuda" else "cpu"  # HS138
        with torch.autocast(kind, dtype=torch.bfloat16):
            return self.net(x.to(self.device))
