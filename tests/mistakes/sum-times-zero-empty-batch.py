import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(56)


def keypoint_loss(heat: torch.Tensor, target: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    if not visible.any():
        return 0.0 * heat.sum()  # HS156
    return nn.functional.mse_loss(heat[visible].float(), target[visible])


net = nn.Conv2d(3, 17, 1).to(device)
opt = torch.optim.SGD(net.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler(device)
for _ in range(4):
    image, target = torch.rand(2, 3, 32, 32, device=device), torch.rand(2, 17, 32, 32, device=device)
    visible = torch.rand(2, 17, device=device) > 0.95
    opt.zero_grad()
    with torch.autocast(device, dtype=torch.float16):
        heat = net(image)
        loss = keypoint_loss(heat, target, visible)
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
