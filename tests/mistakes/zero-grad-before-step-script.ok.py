import torch
from torch import nn

torch.manual_seed(6)
dev = "cuda" if torch.cuda.is_available() else "cpu"
router = nn.Linear(10, 4).to(dev)
sgd = torch.optim.SGD(router.parameters(), lr=0.5)
amp_scaler = torch.amp.GradScaler(dev, init_scale=1024.0)
losses = []

for step in range(30):
    x = torch.randn(32, 10, device=dev)
    y = x[:, :4].argmax(-1)
    with torch.autocast(dev, dtype=torch.float16):
        logits = router(x)
    loss = nn.functional.cross_entropy(logits.float(), y)
    amp_scaler.scale(loss).backward()
    amp_scaler.step(sgd)
    amp_scaler.update()
    sgd.zero_grad(set_to_none=False)
    losses.append(loss.detach())
print(torch.stack(losses).tolist())
