import torch
from torch import nn

use_cuda = torch.cuda.is_available()
device = torch.device("cuda" if use_cuda else "cpu")


class TileSegmenter(nn.Module):
    def __init__(self, bands: int, classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(bands, 24, 3, padding=1), nn.ReLU(), nn.Conv2d(24, classes, 1))

    def forward(self, tile):
        return self.body(tile)


def train(tiles, epochs=2):
    segmenter = TileSegmenter(4, 7).to(device)
    optim = torch.optim.SGD(segmenter.parameters(), lr=0.1)
    loss_scaler = torch.amp.GradScaler(device.type)
    for _ in range(epochs):
        for tile, land_use in tiles:
            optim.zero_grad()
            with torch.autocast(device.type, dtype=torch.float16):
                logits = segmenter(tile.to(device))
            loss = nn.functional.cross_entropy(logits.float(), land_use.to(device))
            loss_scaler.scale(loss).backward()
            optim.step()  # HS105
    return segmenter


if __name__ == "__main__":
    train([(torch.randn(2, 4, 16, 16), torch.randint(0, 7, (2, 16, 16))) for _ in range(3)])
