import torch
from torch import nn
from torch.utils.data import DataLoader


def pretrain(encoder: nn.Module, loader: DataLoader, num_epochs: int) -> None:
    encoder = encoder.cuda().train()
    opt = torch.optim.AdamW(encoder.parameters(), lr=1e-4, weight_decay=0.05)
    for _ in range(num_epochs):
        for tokens, labels in loader:
            opt.zero_grad(set_to_none=True)
            with torch.autocast("cuda", dtype=torch.float16):  # HS115
                logits = encoder(tokens.cuda())
            loss = nn.functional.cross_entropy(logits.float().transpose(1, 2), labels.cuda(), ignore_index=-100)
            loss.backward()
            opt.step()
