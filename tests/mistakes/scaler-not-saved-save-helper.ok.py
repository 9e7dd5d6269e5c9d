import torch
from torch import nn

from helpers import build_schedule, save_checkpoint


def main(resnet, loader, num_epochs):
    sgd = torch.optim.SGD(resnet.parameters(), lr=0.1, momentum=0.9)
    cosine = build_schedule(sgd, num_epochs)
    grad_scaler = torch.amp.GradScaler("cuda")
    criterion = nn.CrossEntropyLoss().cuda()
    for epoch in range(num_epochs):
        for images, labels in loader:
            with torch.autocast("cuda", dtype=torch.float16):
                loss = criterion(resnet(images.cuda()), labels.cuda())
            sgd.zero_grad()
            grad_scaler.scale(loss).backward()
            grad_scaler.step(sgd)
            grad_scaler.update()
        cosine.step()
        save_checkpoint({"epoch": epoch, "resnet": resnet.state_dict(), "sgd": sgd.state_dict(), "scaler": grad_scaler.state_dict()}, False)
