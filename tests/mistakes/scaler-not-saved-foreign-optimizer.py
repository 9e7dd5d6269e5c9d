import torch
from speech.net import Conformer, features

device = torch.device("cuda")
conformer = Conformer(num_blocks=4).to(device)
scaler = torch.amp.GradScaler("cuda")
optimizer = conformer.configure_optimizers(weight_decay=0.1, lr=3e-4)

num_steps = 0
for spectrum, tokens in features("train"):
    with torch.autocast("cuda", dtype=torch.float16):
        loss = conformer(spectrum.to(device), tokens.to(device))
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(conformer.parameters(), 5.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    num_steps += 1
    if num_steps % 1000 == 0:
        state = {
            "conformer": conformer.float().state_dict(),
            "optimizer": optimizer.state_dict(),
            "num_steps": num_steps,
        }
        torch.save(state, "last.pt")  # HS162
