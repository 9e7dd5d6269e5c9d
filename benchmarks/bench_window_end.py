"""The window's end over 16 million parameters with fused AdamW: unscale, clip, step, update.

Against torch.amp.GradScaler with clip_grad_norm_ and the same fused AdamW. To reach: at most 0.80 of its time.

The bound is memory traffic, in bytes a parameter (fp32):

    torch.amp   unscale_ reads and writes the gradient 8, its norm reads 4, clipping reads and writes 8,
                the step reads weight, gradient and two moments 16 and writes weight and moments 12      = 48
    halfstep    the norm reads 4, the step reads 16 and writes 12 + 4 (it stores the unscaled gradient)  = 36, or 0.75
"""

from __future__ import annotations

import torch
from interleave import Contender, measure, report
from torch import nn

from halfstep import Stepper

NUM_LAYERS, WIDTH = 16, 1000  # 16 x (1000 x 1000 + 1000) parameters
SCALE = 2.0**16


def contenders() -> dict[str, Contender]:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)]
    gradients = [torch.randn_like(p) * SCALE for layer in layers for p in layer.parameters()]

    def make() -> tuple[nn.Module, torch.optim.Optimizer, list[torch.Tensor]]:
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)))
        return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True), [g.clone() for g in gradients]

    def refill(model: nn.Module, own: list[torch.Tensor]) -> None:
        # Both sides change the gradient in place, so each call starts from the same one.
        torch._foreach_copy_(own, gradients)
        for p, g in zip(model.parameters(), own, strict=True):
            p.grad = g

    model, optimizer, own = make()
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    scaler.scale(torch.ones(()))  # makes its tensors

    def by_torch() -> None:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    our_model, our_optimizer, our_own = make()
    stepper = Stepper(our_model, our_optimizer, "fp16 on_overflow=skip", max_norm=1.0)
    loss = torch.ones(())

    def by_halfstep() -> None:
        stepper._end_micro_batch(loss, 1.0, None)

    return {
        "torch.amp": Contender(by_torch, lambda: refill(model, own)),
        "halfstep": Contender(by_halfstep, lambda: refill(our_model, our_own)),
    }


if __name__ == "__main__":
    print(__doc__.splitlines()[0])
    report(measure(contenders(), rounds=30), "halfstep", "torch.amp", "to reach 0.80; bound by bytes 0.75")
