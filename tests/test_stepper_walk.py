"""Random walks: whatever happens on the way, the weights are those of a plain fp32 run over the batches that finished.

A power of two changes no bit of an fp32 gradient, so a run with a dynamic scale that overflows, replays, is
interrupted, saved, loaded and asked for predictions ends with the very weights of one without a scale that saw none of
that.
"""

from __future__ import annotations

import copy
import io
import random

import pytest
import torch
from reference.loop import Gate
from torch import nn

from halfstep.stepper import Stepper

X = torch.linspace(-2, 2, 256).reshape(32, 8).sin()
Y = X.mean(1, keepdim=True) + 0.5
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.001, momentum=0.9, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
}
EVENTS = {
    "overflow": 4,
    "large": 2,
    "nothing": 6,
    "forward raises": 1,
    "backward raises": 1,
    "replay raises": 1,
    "bad loss": 1,
    "predict": 2,
    "reload": 2,
    "flush": 2,
}


class Net(nn.Module):
    def __init__(self):
        torch.default_generator.manual_seed(0)
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 12), nn.BatchNorm1d(12), nn.Tanh())
        self.gate, self.drop, self.side, self.head = Gate(), nn.Dropout(0.2), nn.Linear(12, 12), nn.Linear(12, 1)

    def forward(self, x, use_side):
        h = self.drop(self.gate(self.body(x)))
        return self.head(self.side(h) if use_side else h)


class Walker:
    """One stepper and what may happen to it. ``is_calm``: the twin, to which nothing does."""

    def __init__(self, optimizer, policy, accumulate, max_norm, is_calm):
        self.model = Net()
        self.make = lambda: Stepper(
            self.model,
            self.optimizer,
            policy,
            accumulate=accumulate,
            max_norm=max_norm,
            keep_casts=not is_calm,
        )
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.stepper, self.is_calm = self.make(), is_calm

    def loss(self, seed, factor):
        draw = random.Random(seed)
        num, use_side = draw.randrange(2, 12), draw.random() < 0.7
        x, y = X.roll(seed, 0)[:num], Y.roll(seed, 0)[:num]
        loss = (self.model(x, use_side) - y).square().sum() * factor
        return (loss, num) if draw.random() < 0.5 else (loss, torch.tensor(num))

    def micro_batch(self, seed, event):
        torch.default_generator.manual_seed(seed)
        gate, factor = self.model.gate, 64.0 if event == "large" else 1.0
        if not self.is_calm:
            if event == "overflow":
                gate.limit = gate.largest / 5 or None
            report = self.stepper.step(lambda: self.loss(seed, factor))
            gate.limit = None
            return report
        return self.stepper.step(lambda: self.loss(seed, factor))

    def disturb(self, seed, event):
        """An attempt that fails; the calm one knows nothing of it."""
        gate, calls = self.model.gate, []
        if event in ("forward raises", "backward raises"):
            gate.where, gate.raises = (
                event.replace("forward raises", "output").replace("backward raises", "gradient"),
                OSError,
            )

        def closure():
            calls.append(1)
            if event == "replay raises" and len(calls) == 2:
                raise OSError
            return self.loss(seed, 1.0)

        if event == "replay raises":
            gate.limit = 1e-9
        with pytest.raises(OSError):  # noqa: PT011
            self.stepper.step(closure)
        gate.where, gate.raises, gate.limit = "nowhere", None, None

    def reload(self):
        file = io.BytesIO()
        torch.save([self.model.state_dict(), self.optimizer.state_dict(), self.stepper.state_dict()], file)
        file.seek(0)
        for p in self.model.parameters():
            p.data.fill_(3.0)
            p.grad = None
        self.stepper = self.make()
        for part, state in zip(
            (self.model, self.optimizer, self.stepper), torch.load(file, weights_only=True), strict=True
        ):
            part.load_state_dict(state)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("accumulate", "max_norm"), [(1, None), (2, 0.3), (3, None), (5, 0.3)])
def test_a_random_walk_ends_where_the_calm_run_does(optimizer, accumulate, max_norm):
    draw = random.Random(f"{optimizer} {accumulate} {max_norm}")
    policy = f"fp32 scale=dynamic scale.init=1048576 scale.floor={2.0**-60} scale.interval=2"
    wild = Walker(optimizer, policy, accumulate, max_norm, is_calm=False)
    calm = Walker(optimizer, "fp32", accumulate, max_norm, is_calm=True)
    num_replays = num_applied = 0
    for seed in range(40):
        (event,) = draw.choices(list(EVENTS), EVENTS.values())
        reports = [None, None]
        if event.endswith("raises"):
            wild.disturb(seed, event)
        elif event == "predict":
            wild.model.eval()
            with wild.stepper.inference():
                wild.model(X, True)
            wild.model.train()
        elif event == "reload":
            wild.reload()
        elif event == "flush":
            reports = [wild.stepper.flush(), calm.stepper.flush()]
        elif event == "bad loss":
            with pytest.raises(ValueError, match="a loss that is"):
                wild.stepper.step(lambda: (wild.loss(0, 1.0)[0].reshape(1, 1).repeat(2, 1), 1))
        else:
            reports = [wild.micro_batch(seed, event), calm.micro_batch(seed, event)]
        assert (reports[0] is None) == (reports[1] is None)
        if reports[0] is not None:
            num_replays += reports[0].num_replays
            num_applied += reports[0].applied
            assert reports[0].applied, event
            assert (reports[0].loss, reports[0].grad_norm) == (reports[1].loss, reports[1].grad_norm)
        for (name, left), right in zip(wild.model.state_dict().items(), calm.model.state_dict().values(), strict=True):
            assert torch.equal(left, right), (seed, event, name)
    assert num_replays > 0
    assert num_applied > 3
    states = [copy.deepcopy(walker.optimizer.state_dict()["state"]) for walker in (wild, calm)]
    for key in states[1]:
        for name, value in states[1][key].items():
            assert torch.equal(states[0][key][name], value), name
