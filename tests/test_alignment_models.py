"""A padded language model against the plain one: its softmax, fifty steps of training, checkpoints, its tokens."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from reference.nets import CPU, FULL
from torch import nn

from halfstep.alignment import align
from halfstep.stepper import Stepper


class TiedNet(nn.Module):
    """A language model of 13 tokens whose embedding and head share one weight; token 0 is padding."""

    def __init__(self, vocabulary=13, width=10, hidden=15):
        super().__init__()
        self.wte = nn.Embedding(vocabulary, width, padding_idx=0)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, tokens):
        x = self.wte(tokens)
        return self.head(x + self.down(F.gelu(self.up(x))))


def tied_twins(dtype=torch.float64):
    torch.manual_seed(0)
    net = TiedNet().to(dtype)
    padded = copy.deepcopy(net)
    assert align(padded, pad=True).num_off == 0
    return net, padded


def test_sums_over_a_softmax_do_not_see_the_padding():
    net, padded = tied_twins()
    tokens = torch.arange(13)[None]
    p = F.softmax(padded(tokens), -1)
    assert p.shape == (1, 13, 13)
    torch.testing.assert_close(p.sum(-1), torch.ones(1, 13, dtype=torch.float64))
    torch.testing.assert_close(p, F.softmax(net(tokens), -1))


# ---- training


OPTIMIZERS = {
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
    "fused AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1, fused=True),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=1e-3),
}


def train(net, make, num_steps=50):
    optimizer = make(net.parameters())
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(num_steps):
        tokens = torch.randint(13, (4, 7), generator=generator)
        loss = F.cross_entropy(net(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return optimizer, losses


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fifty_steps_give_the_same_weights_and_states(name):
    net, padded = tied_twins()
    twin_optimizer, twin_losses = train(net, OPTIMIZERS[name])
    optimizer, losses = train(padded, OPTIMIZERS[name])
    assert losses[-1] < losses[0]
    # fp64 rounds at 1e-16; fifty steps of an optimizer that divides by small roots may lose six digits of it.
    close = {"rtol": 1e-9, "atol": 1e-10}
    torch.testing.assert_close(losses, twin_losses, **close)
    assert padded.head.weight is padded.wte.weight
    for key, value in net.state_dict().items():
        torch.testing.assert_close(padded.state_dict()[key], value, **close)
    twin_state = twin_optimizer.state_dict()["state"]
    for number, state in optimizer.state_dict()["state"].items():
        torch.testing.assert_close(state, twin_state[number], **close)
    # Checkpoints go both ways, of the optimizer too.
    fresh = TiedNet().double()
    fresh.load_state_dict(padded.state_dict(), strict=True)
    padded.load_state_dict(net.state_dict(), strict=True)
    twin_optimizer.load_state_dict(optimizer.state_dict())
    assert [*padded.state_dict()] == [*net.state_dict()]
    torch.testing.assert_close(fresh(torch.arange(13)), padded(torch.arange(13)), **close)


def test_padding_in_the_middle_of_a_run_keeps_optimizer_and_parameters():
    net = TiedNet().double()
    optimizer, _ = train(net, OPTIMIZERS["AdamW"], 3)
    before = {name: id(parameter) for name, parameter in net.named_parameters()}
    twin = copy.deepcopy(net)
    align(net, pad=True)
    assert before == {name: id(parameter) for name, parameter in net.named_parameters()}
    tokens = torch.arange(13)
    net(tokens).sum().backward()
    optimizer.step()
    assert not torch.equal(net.up.weight, twin.up.weight)


@pytest.mark.parametrize("policy", ["fp32", "bf16", "fp16"])
def test_a_stepper_trains_both_alike(policy):
    net, padded = tied_twins(FULL)
    reports = []
    for model in (padded, net):
        torch.manual_seed(1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        stepper = Stepper(model, optimizer, policy, accumulate=2, max_norm=1.0, hardware=CPU)
        found = []
        for _ in range(50):
            tokens = torch.randint(13, (4, 7))
            report = stepper.step(
                lambda tokens=tokens, model=model: F.cross_entropy(
                    model(tokens).float().flatten(0, 1), tokens.roll(-1, 1).flatten()
                )
            )
            if report:
                found.append((report.loss, report.grad_norm, report.scale, report.applied))
        reports.append(found)
    for ours, twin in zip(*reports, strict=True):
        # Sums in another order may round a 16-bit value to its neighbour, which training carries on: 1% of the loss.
        assert ours[0] == pytest.approx(twin[0], rel=1e-2 if policy != "fp32" else 1e-4)
        assert ours[2:] == twin[2:]
    assert reports[0][-1][0] < reports[0][0][0]


def test_tokens_beyond_the_vocabulary_are_refused_and_padding_idx_stays():
    _, padded = tied_twins()
    for token in (13, 15, 16, -1):
        with pytest.raises(IndexError):
            padded(torch.tensor([token]))
    embedding = padded.wte(torch.tensor([0, 1]))
    embedding.sum().backward()
    assert padded.wte.padding_idx == 0
    assert padded.wte.weight.grad[0].abs().sum() == 0
    assert padded.wte.weight.grad.shape == (13, 10)
