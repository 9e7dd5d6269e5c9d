"""HS172: a gradient scaler is driven by hand beside a framework that drives its own."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.lint.event import Event, Path
from halfstep.lint.rule import Problem, Rule
from halfstep.lint.script import Script
from halfstep.lint.values import Instance, Object

_DRIVES = {"scaler.scale", "scaler.step", "scaler.update"}


def check(script: Script) -> Iterator[Problem]:
    has_trainer = any(
        isinstance(event.result, Object) and event.result.kind == "lightning trainer"
        for event in script.sites
        if event.what == "make"
    )
    for path in script.paths:
        wrapper = _wrapper(path, has_trainer)
        driven: set[object] = set()
        for event in path:
            scaler = event.receiver
            if event.what not in _DRIVES or not isinstance(scaler, Object) or scaler.ident in driven or not wrapper:
                continue
            driven.add(scaler.ident)
            whose = "the scaler of the wrapper" if scaler.type == "accelerate.scaler" else "a second scaler"
            yield Problem(
                event.node,
                f"{whose} is driven by hand although {wrapper} scales, unscales and updates by itself: remove it",
            )


def _wrapper(path: Path, has_trainer: bool) -> str:
    """What drives the scale on this path; "" when the source does it alone."""
    for event in path:
        if event.what in {"accelerator.backward", "fabric.backward"}:
            return "Accelerate" if event.what.startswith("accelerator") else "Fabric"
    if has_trainer and any(_in_training_step(event) for event in path):
        is_manual = any(event.what == "attribute" and event.name == "automatic_optimization" for event in path)
        return "" if is_manual else "Lightning's Trainer"
    return ""


def _in_training_step(event: Event) -> bool:
    owner = event.receiver
    return event.what == "local" and event.name == "training_step" and isinstance(owner, Instance) and owner.is_module


RULE = Rule(
    code="HS172",
    name="own-scaler-beside-wrapper",
    severity="error",
    summary="A GradScaler is driven by hand beside Accelerate, Fabric or Lightning, which drive one themselves.",
    why="""
The wrapped optimizer unscales, steps and updates its own scaler. A second `update()` of that scaler raises
`AssertionError: No inf checks were recorded prior to update.` (torch 2.13). A second scaler multiplies the loss by
65,536 once more: scaled by 65,536^2 = 4.3e9 the fp16 gradients overflow, and the steps are skipped.

Use the wrapper's `backward` and `step` alone; `accelerator.optimizer_step_was_skipped` tells of a skip.
""",
    bad=(
        """\
import torch
from accelerate import Accelerator
from torch import nn

accelerator = Accelerator(mixed_precision="fp16")
net = nn.Linear(8, 2)
opt = torch.optim.Adam(net.parameters(), lr=1e-3)
net, opt = accelerator.prepare(net, opt)

for _ in range(10):
    loss = net(torch.randn(4, 8, device=accelerator.device)).float().pow(2).mean()
    accelerator.backward(loss)
    opt.step()
    accelerator.scaler.update()  # HS172
    opt.zero_grad()
""",
        """\
import torch
from lightning.pytorch import LightningModule, Trainer


class Net(LightningModule):
    def __init__(self, body):
        super().__init__()
        self.body = body
        self.grad_scaler = torch.amp.GradScaler("cuda")

    def training_step(self, batch, batch_idx):
        loss = torch.nn.functional.mse_loss(self.body(batch).float(), batch)
        return self.grad_scaler.scale(loss)  # HS172


def main(body, loader):
    Trainer(precision="16-mixed").fit(Net(body), loader)
""",
    ),
    good=(
        """\
import torch
from accelerate import Accelerator
from torch import nn

accelerator = Accelerator(mixed_precision="fp16")
net = nn.Linear(8, 2)
opt = torch.optim.Adam(net.parameters(), lr=1e-3)
net, opt = accelerator.prepare(net, opt)

for _ in range(10):
    loss = net(torch.randn(4, 8, device=accelerator.device)).float().pow(2).mean()
    accelerator.backward(loss)
    opt.step()
    opt.zero_grad()
""",
        """\
import torch
from lightning.pytorch import LightningModule, Trainer


class Net(LightningModule):
    def __init__(self, body):
        super().__init__()
        self.body = body

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.mse_loss(self.body(batch).float(), batch)


def main(body, loader):
    Trainer(precision="16-mixed").fit(Net(body), loader)
""",
    ),
    check=check,
)
