import torch
from torch import nn

TINY = 1e-12


class Standardise(nn.Module):
    """Each recording gets its own level."""

    def forward(self, wave):
        wave = wave.to(torch.float16)
        peak = wave.abs().amax(dim=-1, keepdim=True)
        return wave / (peak + 1e-4)


front_end = Standardise()
tagger = torch.jit.load("tagger_fp16.pt").cuda()
with torch.inference_mode():
    for wave in torch.load("recordings.pt"):
        print(tagger(front_end(wave.cuda())).argmax(-1).cpu())
