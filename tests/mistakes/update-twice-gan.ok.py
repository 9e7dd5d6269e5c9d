import torch
import torch.nn.functional as F
from torch import nn


class FontGan:
    def __init__(self, gen: nn.Module, disc: nn.Module) -> None:
        self.gen, self.disc = gen.cuda(), disc.cuda()
        self.optimiser_g = torch.optim.Adam(self.gen.parameters(), lr=1e-4, betas=(0.5, 0.999))
        self.optimiser_d = torch.optim.Adam(self.disc.parameters(), lr=4e-4, betas=(0.5, 0.999))
        self.scaler = torch.amp.GradScaler("cuda")

    def play_round(self, glyphs: torch.Tensor) -> None:
        z = torch.randn(len(glyphs), 64, device="cuda")
        self.optimiser_d.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            fake = self.gen(z)
            on_real, on_fake = self.disc(glyphs), self.disc(fake.detach())
        d_loss = F.relu(1 - on_real.float()).mean() + F.relu(1 + on_fake.float()).mean()
        self.scaler.scale(d_loss).backward()
        self.scaler.step(self.optimiser_d)

        self.optimiser_g.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            verdict = self.disc(fake)
        g_loss = -verdict.float().mean()
        self.scaler.scale(g_loss).backward()
        self.scaler.step(self.optimiser_g)
        self.scaler.update()

    def fit(self, loader):
        for glyphs, _ in loader:
            self.play_round(glyphs.cuda())
