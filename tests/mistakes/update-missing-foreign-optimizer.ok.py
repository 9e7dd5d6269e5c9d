import torch
from torch.nn.utils import clip_grad_norm_

from robots import make_optimizers


def imitate(policy, demonstrations, limit):
    policy_optimizer, vision_optimizer = make_optimizers(policy, lr=1e-4)
    scaler = torch.amp.GradScaler("cuda")
    for observation, action in demonstrations:
        with torch.autocast("cuda", dtype=torch.float16):
            error = policy.error(observation.cuda(), action.cuda())
        policy_optimizer.zero_grad()
        vision_optimizer.zero_grad()
        scaler.scale(error).backward()
        scaler.unscale_(policy_optimizer)
        norm = clip_grad_norm_(policy.head.parameters(), 1.0)
        if norm > limit:
            scaler.update()
            continue
        scaler.step(policy_optimizer)
        scaler.step(vision_optimizer)
        scaler.update()
