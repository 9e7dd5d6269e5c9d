import torch
from torch import nn


@torch.inference_mode()
def perplexity(lm: nn.Module, loader) -> float:
    lm = lm.cuda().eval()
    total = torch.zeros((), device="cuda", dtype=torch.float32)
    count = 0
    for tokens in loader:
        tokens = tokens.cuda()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = lm(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        total += loss
        count += 1
    return (total / count).exp().item()
