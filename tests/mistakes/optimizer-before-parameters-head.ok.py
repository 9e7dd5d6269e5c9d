import torch
from torch import nn
from torchvision.models import resnet18


def build(num_species: int):
    model = resnet18(weights="DEFAULT")
    for w in model.parameters():
        w.requires_grad_(False)
    model.fc = nn.Linear(model.fc.in_features, num_species)
    model = model.cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return model, optimizer


def train(loader, num_species):
    model, optimizer = build(num_species)
    scaler = torch.amp.GradScaler("cuda")
    for photos, species in loader:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.float16):
            logits = model(photos.cuda())
        loss = nn.functional.cross_entropy(logits.float(), species.cuda())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return model
