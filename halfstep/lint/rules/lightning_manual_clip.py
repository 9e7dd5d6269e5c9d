"""HS170: Lightning's manual optimization clips gradients that still carry the loss scale."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.lint.rule import Problem, Rule
from halfstep.lint.script import Script
from halfstep.lint.values import Const, Object, options

_FP16 = {"16-mixed", "16", 16}
_CLIPS = {"clip", "lightning.clip_gradients"}


def check(script: Script) -> Iterator[Problem]:
    if not _trains_in_fp16(script) or not _is_manual(script):
        return
    for path in script.paths:
        carries = False
        for event in path:
            if event.what == "lightning.manual_backward":
                carries = True
            elif event.name in {"unscale_", "unscale_gradients"} or event.what == "lightning optimizer.step":
                carries = False
            elif event.what in _CLIPS and carries:
                yield Problem(
                    event.node,
                    "manual optimization under 16-mixed clips gradients that still carry the loss scale, which is "
                    "taken out in the optimizer's step: clip in on_before_optimizer_step, or use bf16-mixed",
                )


def _trains_in_fp16(script: Script) -> bool:
    return any(
        any(
            isinstance(option, Const) and option.value in _FP16
            for option in options(event.result.argument("precision"))
        )
        for event in script.sites
        if event.what == "make" and isinstance(event.result, Object) and event.result.kind == "lightning trainer"
    )


def _is_manual(script: Script) -> bool:
    return any(
        isinstance(node, ast.Assign)
        and getattr(node.targets[0], "attr", "") == "automatic_optimization"
        and getattr(node.value, "value", None) is False
        for node in script.walk(ast.Assign)
    )


RULE = Rule(
    code="HS170",
    name="lightning-manual-clip",
    severity="error",
    summary="Lightning's manual optimization under 16-mixed clips gradients that still carry the loss scale.",
    why="""
With `automatic_optimization = False`, Lightning scales the loss in `manual_backward` and takes the scale out in
`optimizer.step()`. What stands between sees gradients that are 65,536 times too large at the start. A clip to norm 1.0
then leaves a true norm of 1.5e-5: the optimizer moves, by a step that the loss scale decides.

Clip in the hook `on_before_optimizer_step`, which Lightning calls after it has unscaled and before the step. An
`unscale_` by hand does not help: `optimizer.step()` unscales once more, and that raises (Lightning 2.6). `bf16-mixed`
has no scale, and under automatic optimization the Trainer clips at the right place (`gradient_clip_val`).
""",
    bad=(
        """\
import torch
from lightning.pytorch import LightningModule, Trainer


class Net(LightningModule):
    def __init__(self, body):
        super().__init__()
        self.automatic_optimization = False
        self.body = body

    def configure_optimizers(self):
        return torch.optim.Adam(self.body.parameters(), lr=1e-4)

    def training_step(self, batch, batch_idx):
        opt = self.optimizers()
        opt.zero_grad()
        self.manual_backward(self.body(batch).float().pow(2).mean())
        self.clip_gradients(opt, gradient_clip_val=1.0)  # HS170
        opt.step()


def main(body, loader):
    Trainer(precision="16-mixed").fit(Net(body), loader)
""",
        """\
import pytorch_lightning as pl
import torch


class Critic(pl.LightningModule):
    def __init__(self, body):
        super().__init__()
        self.body = body
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        loss = torch.nn.functional.softplus(self.body(batch).float()).mean()
        optimizer.zero_grad()
        self.manual_backward(loss)
        torch.nn.utils.clip_grad_norm_(self.body.parameters(), 0.5)  # HS170
        optimizer.step()


trainer = pl.Trainer(precision=16, max_epochs=3)
""",
    ),
    good=(
        """\
import torch
from lightning.pytorch import LightningModule, Trainer


class Net(LightningModule):
    def __init__(self, body):
        super().__init__()
        self.automatic_optimization = False
        self.body = body

    def configure_optimizers(self):
        return torch.optim.Adam(self.body.parameters(), lr=1e-4)

    def training_step(self, batch, batch_idx):
        opt = self.optimizers()
        opt.zero_grad()
        self.manual_backward(self.body(batch).float().pow(2).mean())
        opt.step()

    def on_before_optimizer_step(self, optimizer):
        self.clip_gradients(optimizer, gradient_clip_val=1.0)


def main(body, loader):
    Trainer(precision="16-mixed").fit(Net(body), loader)
""",
        """\
import torch
from lightning.pytorch import LightningModule, Trainer


class Net(LightningModule):
    def __init__(self, body):
        super().__init__()
        self.automatic_optimization = False
        self.body = body

    def training_step(self, batch, batch_idx):
        opt = self.optimizers()
        opt.zero_grad()
        self.manual_backward(self.body(batch).float().pow(2).mean())
        self.clip_gradients(opt, gradient_clip_val=1.0)
        opt.step()


def main(body, loader):
    Trainer(precision="bf16-mixed").fit(Net(body), loader)
""",
    ),
    check=check,
)
