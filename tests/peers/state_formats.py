"""An fp32 master and an int16 remainder, saved and loaded."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from peers.columns import Seen, accelerator, batch, fabric_in, net
from torch import nn

from halfstep import Stepper

NUM_STEPS = 3


class MasterSGD(torch.optim.Optimizer):
    """SGD for bf16 weights that keeps what they cannot hold in its state, in both of the usual ways."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                master = state.setdefault("master", p.float())
                master.sub_(p.grad.float(), alpha=group["lr"])
                bits = master.view(torch.int32)
                state["remainder"] = (bits & 0xFFFF).to(torch.int16)
                p.copy_((bits >> 16 << 16).view(torch.float32))


def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = net(8, 16, 2).bfloat16()
    return model, MasterSGD(model.parameters(), lr=0.01)


def train(model: Any, optimizer: Any) -> None:
    for i in range(NUM_STEPS):
        x, y = batch(i)
        optimizer.zero_grad()
        F.mse_loss(model(x.bfloat16()).float(), y).backward()
        optimizer.step()


def judge(saved: Any, loaded: Any) -> Seen:
    before, after = saved.state[saved.param_groups[0]["params"][0]], loaded.state[loaded.param_groups[0]["params"][0]]
    assert (before["master"].dtype, before["remainder"].dtype) == (torch.float32, torch.int16)
    is_exact = all(a.dtype == after[k].dtype and torch.equal(a, after[k]) for k, a in before.items())
    return Seen(not is_exact, f"master comes back {name_of(after['master'])}, remainder {name_of(after['remainder'])}")


def name_of(value: torch.Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")


def torch_amp() -> Seen:
    (model, saved), (_, loaded) = parts(), parts()
    train(model, saved)
    loaded.load_state_dict(saved.state_dict())
    return judge(saved, loaded)


def drop_in() -> Seen:
    return Seen(None, "holds no weights")


def fabric() -> Seen:
    engine = fabric_in("bf16-true")
    (model, saved), (other, loaded) = engine.setup(*parts()), engine.setup(*parts())
    train(model, saved)
    with tempfile.TemporaryDirectory() as folder:
        engine.save(Path(folder) / "state.ckpt", {"model": model, "optimizer": saved})
        engine.load(Path(folder) / "state.ckpt", {"model": other, "optimizer": loaded})
    return judge(saved, loaded)


def accelerate() -> Seen:
    with tempfile.TemporaryDirectory() as folder:
        with accelerator() as engine:
            model, saved = engine.prepare(*parts())
            train(model, saved)
            engine.save_state(folder)
        with accelerator() as engine:
            _, loaded = engine.prepare(*parts())
            engine.load_state(folder)
    return judge(saved, loaded)


def stepper() -> Seen:
    runs = []
    for _ in range(2):
        model = net(8, 16, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        runs.append((model, optimizer, Stepper(model, optimizer, "bf16 master=split16")))
    (model, _, trainer), (_, _, resumed) = runs
    for i in range(NUM_STEPS):
        x, y = batch(i)
        trainer.step(lambda x=x, y=y: F.mse_loss(model(x).float(), y))
    for saved, loaded in zip(*runs, strict=True):
        loaded.load_state_dict(saved.state_dict())
    exact, again = dict(trainer.weights()), dict(resumed.weights())
    assert not all(torch.equal(weight, weight.bfloat16().float()) for weight in exact.values())
    is_exact = all(torch.equal(weight, again[name]) for name, weight in exact.items())
    (rest,) = {name_of(rest) for rest in resumed.state_dict()["masters"]["rests"].values()}
    weights = "the same to the bit" if is_exact else "changed"
    return Seen(not is_exact, f"rest comes back {rest}, fp32 weights {weights}")
