import torch
from torch import nn


def train(model, loader, epochs):
    model = model.cuda()
    opt = torch.optim.AdamW(model.parameters(), lr=3e-4)
    criterion = nn.CrossEntropyLoss()
    for _ in range(epochs):
        for sentence, intent in loader:
            with torch.autocast(device_type="cuda", dtype=torch.bfloat16):
                logits = model(sentence.cuda())
                loss = criterion(logits.float(), intent.cuda())
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
    return model
