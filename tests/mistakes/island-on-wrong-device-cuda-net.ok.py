import torch
from torch import nn


class SpectralLoss(nn.Module):
    def forward(self, a, b):
        with torch.autocast(device_type="cuda", enabled=False):
            return (torch.fft.rfft(a.float()).abs() - torch.fft.rfft(b.float()).abs()).abs().mean()


def train(vocoder, loader):
    vocoder = vocoder.cuda()
    spectral = SpectralLoss()
    opt = torch.optim.AdamW(vocoder.parameters(), lr=2e-4)
    for mel, wave in loader:
        opt.zero_grad(set_to_none=True)
        with torch.autocast(device_type="cuda", dtype=torch.bfloat16):
            loss = spectral(vocoder(mel.cuda()), wave.cuda())
        loss.backward()
        opt.step()
