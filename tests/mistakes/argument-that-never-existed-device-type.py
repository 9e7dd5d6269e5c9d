import torch
from torch import nn

net = nn.Linear(12, 2).cuda().eval()


@torch.inference_mode()
def predict(x):
    with torch.autocast("cuda", dtype=torch.bfloat16, cache_weights=True):  # HS136
        return net(x)
