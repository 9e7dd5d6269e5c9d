import torch
from torch import nn


class BoxDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.regress = nn.Conv2d(64, 4, 1)

    def forward(self, feature_map, stride: int):
        raw = self.regress(feature_map).half()
        centre, size = raw.chunk(2, dim=1)
        return torch.cat([centre.float() * stride, torch.exp(size.float()) * stride], dim=1)


decoder = BoxDecoder().cuda().half().eval()
with torch.inference_mode():
    for level, stride in zip(torch.load("pyramid.pt"), (8, 16, 32)):
        boxes = decoder(level.cuda().half(), stride)
        print(boxes.shape)
