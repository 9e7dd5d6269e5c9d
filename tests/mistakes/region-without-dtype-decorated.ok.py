import torch
from torch import nn


class Policy(nn.Module):
    def __init__(self, num_inputs, num_moves):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(num_inputs, 256), nn.Tanh(), nn.Linear(256, num_moves))

    @torch.autocast("cuda", dtype=torch.float16)
    def forward(self, observation):
        return self.net(observation)


def imitate(policy, expert_batches):
    policy = policy.cuda()
    opt = torch.optim.Adam(policy.parameters(), lr=3e-4)
    scaler = torch.amp.GradScaler("cuda")
    for observation, move in expert_batches:
        opt.zero_grad()
        loss = nn.functional.cross_entropy(policy(observation.cuda()).float(), move.cuda())
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
