"""The window's end with master weights, against fp32 weights: 5 million parameters, fused AdamW, clipping.

To reach: split16 at most 2.0 times fp32's time. The bound is memory traffic, in bytes a parameter:

    fp32      the norm reads the gradient 4, the step reads weight, gradient and two moments 16 and writes 12       = 32
    split16   the norm reads 2, the step reads weight and rest 4, gradient 2, moments 8, and writes 4 + 8           = 28

That is what has to move. On the way a chunk's fp32 weight and gradient pass through torch's operations, in the
processor's cache where they fit: widening is one, joining 2, splitting 5, and the norm of 16-bit numbers widens them
once more. So it is not reached: 3.0 to 3.3 was seen on one thread of an AMD EPYC.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from interleave import Contender, measure, report
from torch import nn

from halfstep import Stepper

NUM_LAYERS, WIDTH = 5, 1000  # 5 x (1000 x 1000 + 1000) parameters
LAYOUTS = ("fp32", "copy", "split16", "split8", "kahan", "stochastic")


def contender(layout: str) -> Contender:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    stepper = Stepper(model, optimizer, f"bf16 master={layout}", max_norm=1.0)
    gradients = [torch.randn_like(p) for p in model.parameters()]
    loss = torch.ones(())

    def refill() -> None:
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient.clone()

    def end() -> None:
        stepper._end_micro_batch(loss, 1.0, None)

    return Contender(end, refill)


def contenders(build: Callable[[str], Contender] = contender) -> dict[str, Contender]:
    return {layout: build(layout) for layout in LAYOUTS}


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(__doc__.splitlines()[0])
    times = measure(contenders(), rounds=20)
    for layout in LAYOUTS[1:]:
        report(times, layout, "fp32", "to reach 2.0; bound by bytes 0.88" if layout == "split16" else "for comparison")
