import torch
from apex import amp
from torch import nn


class Detector:
    def __init__(self, net: nn.Module) -> None:
        self.net = amp.initialize(net.cuda().eval(), opt_level="O3")  # HS402

    @torch.inference_mode()
    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        return self.net(image.cuda())
