"""Advantage actor critic on a toy grid; two losses, one scaler."""

import torch
from torch import nn
from torch.distributions import Categorical


class Agent:
    def __init__(self, num_features, num_actions):
        self.actor = nn.Sequential(nn.Linear(num_features, 64), nn.Tanh(), nn.Linear(64, num_actions)).cuda()
        self.critic = nn.Sequential(nn.Linear(num_features, 64), nn.Tanh(), nn.Linear(64, 1)).cuda()
        self.opt_actor = torch.optim.Adam(self.actor.parameters(), lr=3e-4)
        self.opt_critic = torch.optim.Adam(self.critic.parameters(), lr=1e-3)
        self.scaler = torch.amp.GradScaler("cuda")

    def learn(self, states, actions, returns):
        with torch.autocast("cuda", dtype=torch.float16):
            logits = self.actor(states)
            values = self.critic(states).squeeze(-1)
        advantage = returns - values.detach().float()
        policy_loss = -(Categorical(logits=logits.float()).log_prob(actions) * advantage).mean()
        value_loss = nn.functional.smooth_l1_loss(values.float(), returns)
        self.opt_actor.zero_grad()
        self.opt_critic.zero_grad()
        self.scaler.scale(policy_loss).backward()
        self.scaler.scale(value_loss).backward()
        self.scaler.step(self.opt_actor)
        self.scaler.step(self.opt_critic)
        self.scaler.update()
