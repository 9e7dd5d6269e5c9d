import torch
from torch import nn


class SlotEmbedding(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.project = nn.Linear(1, width)

    def forward(self, length: int):
        index = torch.arange(length, device="cuda").half()  # HS150
        return self.project(index.float().unsqueeze(-1) / length)


slots = SlotEmbedding(32).cuda()
print(slots(5000).shape)
