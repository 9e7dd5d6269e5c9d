import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
parts = {"encoder": nn.Linear(24, 12).to(device), "decoder": nn.Linear(12, 24).to(device)}
optimizers = [torch.optim.Adam(parts[k].parameters(), lr=1e-3) for k in ("encoder", "decoder")]
scaler = torch.amp.GradScaler(device, growth_interval=500)
torch.manual_seed(3)

for batch in torch.randn(40, 32, 24, device=device):
    with torch.autocast(device, dtype=torch.float16):
        code = torch.relu(parts["encoder"](batch))
        copy = parts["decoder"](code)
    loss = nn.functional.mse_loss(copy.float(), batch)
    for o in optimizers:
        o.zero_grad(set_to_none=True)
    scaler.scale(loss).backward()
    for o in optimizers:
        scaler.step(o)
        scaler.update()  # HS107
