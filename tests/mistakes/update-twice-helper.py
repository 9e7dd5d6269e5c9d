import torch
from torch import nn


class ActorCritic:
    def __init__(self, actor, critic):
        self.actor, self.critic = actor.cuda(), critic.cuda()
        self.pi_opt = torch.optim.Adam(actor.parameters(), lr=1e-4)
        self.q_opt = torch.optim.Adam(critic.parameters(), lr=1e-3)
        self.scaler = torch.amp.GradScaler("cuda")

    def learn(self, obs, action, target):
        with torch.autocast("cuda", dtype=torch.float16):
            q = self.critic(torch.cat([obs, action], -1))
        self.q_opt.zero_grad()
        self.scaler.scale(nn.functional.mse_loss(q.float(), target)).backward()
        self.scaler.step(self.q_opt)
        self.scaler.update()  # HS107
        with torch.autocast("cuda", dtype=torch.float16):
            value = self.critic(torch.cat([obs, self.actor(obs)], -1))
        self.pi_opt.zero_grad()
        self.scaler.scale(-value.float().mean()).backward()
        self.scaler.step(self.pi_opt)
        self.scaler.update()
