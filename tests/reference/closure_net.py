"""A net with dropout and a gate, and the optimizers that evaluate its loss themselves."""

from __future__ import annotations

import copy

import torch
from reference.loop import Gate
from reference.nets import CPU
from torch import nn

from halfstep.stepper import Stepper

X = torch.linspace(-2, 2, 192).reshape(24, 8).sin()
Y = X.mean(1, keepdim=True) + 0.5
LBFGS = {
    "plain": {"lr": 0.05, "max_iter": 4},
    "wolfe": {"lr": 0.5, "max_iter": 6, "history_size": 5, "line_search_fn": "strong_wolfe"},
}


class Sam(torch.optim.Optimizer):
    """Sharpness-aware minimisation (Foret et al. 2021, algorithm 1), in the form that most copies of it have."""

    def __init__(self, params, base, rho=0.05, **settings):
        super().__init__(params, dict(rho=rho, **settings))
        self.base_optimizer = base(self.param_groups, **settings)
        self.param_groups = self.base_optimizer.param_groups

    def first_step(self):
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack([g.norm() for g in gradients]))
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["old"] = p.data.clone()
                    p.add_(p.grad * (group["rho"] / (norm + 1e-12)))
                    p.grad = None

    def second_step(self):
        for p, state in self.state.items():
            if "old" in state:
                p.data = state["old"]
        self.base_optimizer.step()

    @torch.no_grad()
    def step(self, closure=None):
        assert closure is not None, "needs a closure"
        self.first_step()
        torch.enable_grad()(closure)()
        self.second_step()


def sgd(parameters):
    return Sam(parameters, torch.optim.SGD, lr=0.05, momentum=0.9)


def adamw(parameters):
    return Sam(parameters, torch.optim.AdamW, lr=0.01)


def adamw_fused(parameters):
    return Sam(parameters, torch.optim.AdamW, lr=0.01, fused=True)


def lbfgs(**settings):
    return lambda parameters: torch.optim.LBFGS(parameters, **settings)


OPTIMIZERS = {name: lbfgs(**settings) for name, settings in LBFGS.items()} | {
    "sam sgd": sgd,
    "sam adamw": adamw,
    "sam fused": adamw_fused,
}


def net(limit=None, seed=0):
    torch.default_generator.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.2), Gate(limit), nn.Linear(16, 1))


def loss_of(model, step=0, factor=1.0):
    return (model(X.roll(step, 0)).float() - Y.roll(step, 0)).square().mean() * factor


def make(optimizer, policy, model=None, **kwargs):
    model = net() if model is None else model
    return Stepper(model, OPTIMIZERS[optimizer](model.parameters()), policy, hardware=CPU, **kwargs)


def state_of(stepper):
    optimizer = stepper.optimizer
    inner = getattr(optimizer, "base_optimizer", optimizer)
    state = {"outer": optimizer.state_dict()["state"], "inner": inner.state_dict()["state"]}
    return copy.deepcopy([[p.detach() for p in stepper.model.parameters()], state])
