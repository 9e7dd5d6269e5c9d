import torch
from torch import nn


class Server:
    def __init__(self, path: str) -> None:
        self.net = torch.load(path, weights_only=False).half().cuda().eval()

    @torch.inference_mode()
    def answer(self, x: torch.Tensor) -> list[float]:
        scores = self.net(x.cuda().half())
        return scores.float().softmax(-1).cpu().tolist()


@torch.no_grad()
def evaluate(net: nn.Module, loader) -> float:
    net = net.cuda().eval()
    wrong, seen = 0, 0
    for x, y in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            out = net(x.cuda())
        wrong += (out.argmax(-1).cpu() != y).sum().item()
        seen += len(y)
    return wrong / seen
