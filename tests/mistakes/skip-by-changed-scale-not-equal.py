import torch
from torch import nn


def train(policy, demonstrations, warmup=500):
    policy = policy.cuda()
    opt = torch.optim.AdamW(policy.parameters(), lr=1e-4)
    warm = torch.optim.lr_scheduler.LinearLR(opt, start_factor=0.01, total_iters=warmup)
    amp_scaler = torch.amp.GradScaler("cuda")
    for state, action in demonstrations:
        opt.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.float16):
            imitated = policy(state.cuda())
        loss = nn.functional.mse_loss(imitated.float(), action.cuda())
        amp_scaler.scale(loss).backward()
        previous = amp_scaler.get_scale()
        amp_scaler.step(opt)
        amp_scaler.update()
        skipped = amp_scaler.get_scale() != previous  # HS123
        if not skipped:
            warm.step()
