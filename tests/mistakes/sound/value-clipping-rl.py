import torch
from torch import nn


def ppo(policy, value, rollouts, clip=0.2):
    policy, value = policy.cuda(), value.cuda()
    opt = torch.optim.Adam([*policy.parameters(), *value.parameters()], lr=3e-4, eps=1e-5)
    scaler = torch.amp.GradScaler("cuda")
    for obs, action, old_logp, old_value, ret, adv in rollouts:
        opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            logits, v = policy(obs), value(obs).squeeze(-1)
        logp = logits.float().log_softmax(-1).gather(1, action[:, None]).squeeze(1)
        ratio = (logp - old_logp).exp()
        surrogate = torch.min(ratio * adv, ratio.clamp(1 - clip, 1 + clip) * adv)
        clipped = old_value + (v.float() - old_value).clamp(-clip, clip)
        value_loss = torch.max((v.float() - ret) ** 2, (clipped - ret) ** 2).mean()
        scaler.scale(value_loss - surrogate.mean()).backward()
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_([*policy.parameters(), *value.parameters()], 0.5)
        scaler.step(opt)
        scaler.update()
