import torch
from torch import nn


class Aggregate(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.message = nn.Linear(2 * width, width)

    def forward(self, nodes, edges):
        source, target = edges
        sent = self.message(torch.cat([nodes[source], nodes[target]], dim=-1))
        inbox = torch.zeros(nodes.shape[0], sent.shape[1], device=nodes.device)
        inbox.index_add_(0, target, sent)  # HS158
        return inbox


layer = Aggregate(32).cuda().eval()
with torch.inference_mode(), torch.autocast("cuda", dtype=torch.bfloat16):
    nodes = torch.randn(100, 32, device="cuda")
    edges = torch.randint(0, 100, (2, 400), device="cuda")
    print(layer(nodes, edges).shape)
