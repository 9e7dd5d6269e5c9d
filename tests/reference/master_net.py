"""A net with a tied embedding, its optimizers and batches, and exact weights, that master weights are tested on."""

import torch
from torch import nn

from halfstep import Stepper
from halfstep.layouts import LAYOUTS

NAMES = list(LAYOUTS)
OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1),
    "adamw fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1, fused=True),
    "adamw loop": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1, foreach=False),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9, nesterov=True),
    "sgd fused": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9, fused=True),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=1e-2),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=1e-3, centered=True, momentum=0.5),
}


class Net(nn.Module):
    """Embedding and head share a weight; a norm and biases stay fp32."""

    def __init__(self, width=24, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(40, width)
        self.up, self.norm = nn.Linear(width, 2 * width), nn.LayerNorm(2 * width)
        self.down, self.head = nn.Linear(2 * width, width), nn.Linear(width, 40, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.down(self.norm(self.up(self.embed(tokens)).relu())))


def loss_of(model, tokens):
    return nn.functional.cross_entropy(model(tokens).float().flatten(0, 1), tokens.roll(1, 1).flatten())


def batches(count, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(40, (4, 6), generator=generator) for _ in range(count)]


def build(policy, make=OPTIMIZERS["adamw"], model=None, **settings):
    model = Net() if model is None else model
    stepper = Stepper(model, make(model.parameters()), policy, **settings)
    return model, stepper


def train(stepper, model, tokens):
    reports = [stepper.step(lambda batch=batch: loss_of(model, batch)) for batch in tokens]
    return [report for report in reports if report is not None]


def exact(stepper):
    return {name: weight.clone() for name, weight in stepper.weights()}


def assert_same(first, second):
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name


def watch_gradients(stepper, divisor=lambda: 1.0):
    """What an fp32 optimizer would be given in each step: the gradients, widened, then divided."""
    seen = {}
    names = {parameter: name for name, parameter in stepper.model.named_parameters()}

    def look(optimizer, args, kwargs):
        seen.clear()
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                seen[names[parameter]] = parameter.grad.float() / divisor()

    stepper.optimizer.register_step_pre_hook(look)
    return seen
