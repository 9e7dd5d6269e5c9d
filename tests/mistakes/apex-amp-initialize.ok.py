import torch
from torch import nn


class Detector:
    def __init__(self, net: nn.Module) -> None:
        self.net = net.cuda().eval().to(torch.float16)

    @torch.inference_mode()
    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        return self.net(image.cuda().to(torch.float16))
