import torch
import torch.nn.functional as F
from torch import nn


class PrototypeLoss(nn.Module):
    def __init__(self, num_classes: int, width: int) -> None:
        super().__init__()
        self.centres = nn.Linear(width, num_classes, bias=False)

    def forward(self, features, target):
        logits = self.centres(features)
        spread = logits.abs().amax(dim=-1, keepdim=True)
        cosine = logits / spread.clamp(min=1e-8)  # HS142
        return F.cross_entropy(16.0 * cosine.float(), target)


def train(backbone, loader, num_classes):
    backbone, loss_fn = backbone.cuda(), PrototypeLoss(num_classes, 512).cuda()
    opt = torch.optim.SGD([*backbone.parameters(), *loss_fn.parameters()], lr=0.1)
    gs = torch.amp.GradScaler("cuda")
    for faces, who in loader:
        opt.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.float16):
            loss = loss_fn(backbone(faces.cuda()), who.cuda())
        gs.scale(loss).backward()
        gs.step(opt)
        gs.update()
