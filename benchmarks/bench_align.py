"""What padding an output layer to a multiple of 8 costs or gains: forward, loss and backward of a head of odd size.

Three heads over the same rows, in bf16 on a CUDA device with tensor cores for it (fp16 on one without), in fp32 on a
CPU:

    plain       the true vocabulary
    padded      the same, padded by halfstep.align: same outputs and gradients
    larger      a head that was built with the padded vocabulary: other outputs, no copies

padded / plain below 1 is what padding gains, larger / plain what changing the model would. The last size is so small
that the calls of the copies are all one sees. What bounds the cost is the copies: in 16 bit 4 N (M + K) bytes, in fp32
twice as many, beside 6 M K N operations, where M rows of K numbers meet N outputs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
from interleave import Contender, measure, report
from torch import nn

from halfstep import Region
from halfstep.alignment import align

# Rows, width, vocabulary.
ON_CARD = [(8192, 768, 50257), (8192, 2048, 50257), (8192, 4096, 32001), (32, 64, 50)]
ON_CPU = [(512, 256, 5003), (512, 768, 5003), (128, 768, 50257), (32, 64, 50)]


def contenders(num_rows: int, width: int, vocabulary: int, device: str, policy: str) -> dict[str, Contender]:
    torch.manual_seed(0)
    x = torch.randn(num_rows, width, device=device)
    targets = torch.randint(vocabulary, (num_rows,), device=device)
    plain = nn.Linear(width, vocabulary, bias=False, device=device)
    padded = copy.deepcopy(plain)
    (layer,) = align(padded, pad=True).layers
    larger = nn.Linear(width, layer.sizes[1].padded, bias=False, device=device)

    def step_of(head: nn.Module) -> Callable[[], None]:
        region, start = Region(head, policy), x.clone().requires_grad_()

        def step() -> None:
            start.grad = None
            head.zero_grad()
            with region:
                loss = F.cross_entropy(head(start).float(), targets)
            with region.backward():
                loss.backward()
            if device == "cuda":
                torch.cuda.synchronize()

        return step

    heads = {"plain": plain, "padded": padded, "larger": larger}
    return {name: Contender(step_of(head), calls=1 if vocabulary > 1000 else 100) for name, head in heads.items()}


def main() -> None:
    print(__doc__.splitlines()[0])
    has_card = torch.cuda.is_available()
    policy = "auto" if has_card else "fp32"
    for num_rows, width, vocabulary in ON_CARD if has_card else ON_CPU:
        found = contenders(num_rows, width, vocabulary, "cuda" if has_card else "cpu", policy)
        print(f"{num_rows} rows, {width} to {vocabulary}, {policy} on {'the card' if has_card else 'the CPU'}")
        times = measure(found, rounds=50 if has_card else 20)
        for name in ("padded", "larger"):
            report(times, name, "plain", "below 1 is a gain")


if __name__ == "__main__":
    main()
