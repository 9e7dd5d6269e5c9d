"""Linear layers under split16 master weights, and one step of them, for tests with models and Steppers of their own."""

import itertools

import torch
from torch import nn

from halfstep import Stepper

POLICY = "bf16 master=split16"
X = torch.linspace(-2, 2, 64).reshape(8, 8).sin()


def net(*sizes):
    torch.manual_seed(0)
    sizes = sizes or (8, 16, 8)
    layers = [nn.Linear(a, b) for a, b in itertools.pairwise(sizes)]
    return nn.Sequential(*(part for layer in layers for part in (layer, nn.Tanh())))


def adamw(parameters, **settings):
    return torch.optim.AdamW(parameters, **({"lr": 1e-3} | settings))


def build(model=None, policy=POLICY, make=adamw, **settings):
    model = net() if model is None else model
    return model, Stepper(model, make(model.parameters()), policy, **settings)


def step(stepper, x=X, model=None):
    model = stepper.model if model is None else model
    return stepper.step(lambda: (model(x).float() - 1).square().mean())


def named(model):
    return list(model.named_parameters())
