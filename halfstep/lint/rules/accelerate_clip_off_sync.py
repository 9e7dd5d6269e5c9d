"""HS171: Accelerate clips on every micro-batch of a window."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.lint.finding import Edit
from halfstep.lint.rule import Problem, Rule
from halfstep.lint.script import Script
from halfstep.lint.values import Const, Object

_CLIPS = {"accelerator.clip_grad_norm_", "accelerator.clip_grad_value_"}


def check(script: Script) -> Iterator[Problem]:
    for path in script.paths:
        if any("sync_gradients" in decision.text for decision in path.decisions):
            continue
        for event in path:
            if event.what not in _CLIPS or not any(c.type == "accelerator.accumulate" for c in event.contexts):
                continue
            accelerator = event.receiver
            assert isinstance(accelerator, Object)
            steps = accelerator.argument("gradient_accumulation_steps")
            if steps in (None, Const(1)) and accelerator.argument("gradient_accumulation_plugin") is None:
                continue
            name = script.source(event.node.func.value)  # type: ignore[attr-defined]
            statement = script.statement(event.node)
            text = "\n    ".join(script.source(statement).splitlines())
            yield Problem(
                event.node,
                f"gradients are clipped on every micro-batch, also before the window is full: put it under "
                f"`if {name}.sync_gradients:`",
                (Edit("replace", script.span(statement), f"if {name}.sync_gradients:\n    {text}"),),
                "unsafe",
            )


RULE = Rule(
    code="HS171",
    name="accelerate-clip-off-sync",
    severity="error",
    summary="accelerator.clip_grad_norm_ runs on every micro-batch of an accumulation window.",
    why="""
Inside `accelerator.accumulate(model)` the optimizer steps on the last micro-batch of a window only, but a clip runs on
every one. In bf16 and fp32 nothing raises: after the first of 4 micro-batches the sum so far is cut to the maximal
norm, and again after the second, so what is stepped is not the clipped mean of the four; early micro-batches count
less. In fp16 the clip calls `unscale_`, which raises the second time in a window.

`accelerator.sync_gradients` is true on the micro-batch that steps.
""",
    bad=(
        """\
import torch
from accelerate import Accelerator


def main(net, loader):
    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=4)
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-5)
    net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    for batch in loader:
        with accelerator.accumulate(net):
            accelerator.backward(net(batch).loss)
            accelerator.clip_grad_norm_(net.parameters(), 1.0)  # HS171
            optimizer.step()
            optimizer.zero_grad()
""",
        """\
import torch
from accelerate import Accelerator


class Job:
    def __init__(self, net, accum):
        self.acc = Accelerator(gradient_accumulation_steps=accum)
        self.net, self.opt = self.acc.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-4))

    def fit(self, loader):
        for x, y in loader:
            with self.acc.accumulate(self.net):
                self.acc.backward(torch.nn.functional.mse_loss(self.net(x).float(), y))
                self.acc.clip_grad_value_(self.net.parameters(), 0.5)  # HS171
                self.opt.step()
                self.opt.zero_grad()
""",
    ),
    good=(
        """\
import torch
from accelerate import Accelerator


def main(net, loader):
    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=4)
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-5)
    net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    for batch in loader:
        with accelerator.accumulate(net):
            accelerator.backward(net(batch).loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
""",
        """\
import torch
from accelerate import Accelerator


def main(net, loader):
    accelerator = Accelerator(mixed_precision="fp16")
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-5)
    net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    for batch in loader:
        accelerator.backward(net(batch).loss)
        accelerator.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
""",
    ),
    check=check,
    fix="unsafe",
    fix_note="It puts the clip under `sync_gradients`, which changes what is trained: to what was most likely meant.",
)
