"""Inference in fp32, under autocast and with cast weights: bytes of live tensors, error of the logits, time.

Memory is counted, not sampled: every tensor's storage while it lives, so the figures are the same on every machine.
A buffer inside a kernel is not in them.

    python benchmarks/bench_inference.py                                the table
    python benchmarks/bench_inference.py --figure docs/inference.svg    and its picture, of bf16 at batch 1
"""

from __future__ import annotations

import argparse
import contextlib
import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import torch
import torch.nn.functional as F
from interleave import Contender, measure, report
from torch import Tensor, nn

from halfstep import Region
from halfstep.compare.memory import LiveBytes
from halfstep.inference import cast_for_inference
from halfstep.workloads.charlm import GPT

CONTEXT = 128
MODES = {
    "fp32": "fp32",
    "no_grad": "autocast in no_grad",
    "inference": "autocast in inference_mode",
    "cast": "cast_for_inference",
}
"""How a model is served: name to what the table calls it."""
Rows = dict[tuple[str, str], tuple[float, float]]
"""Net and mode to MiB of weights, and of everything at the peak."""


class Block(nn.Module):
    """relu(x + bn(conv(relu(bn(conv(x)))))); x is [batch, width, height, width of the image]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.bn1, self.bn2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))


def resnet() -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, 2, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    layers += [Block(64), Block(64), nn.Conv2d(64, 256, 3, 2, padding=1), Block(256), Block(256)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10))


def gpt() -> nn.Module:
    return GPT(width=256, depth=6, context=CONTEXT)


def tokens(batch: int) -> Tensor:
    return torch.randint(256, (batch, CONTEXT))


def images(batch: int) -> Tensor:
    return torch.randn(batch, 3, 32, 32)


def make(model: nn.Module, mode: str, policy: str) -> tuple[nn.Module, Callable[[], AbstractContextManager[object]]]:
    """A copy of ``model`` for ``mode``, and the context that it is called in."""
    model = copy.deepcopy(model)
    if mode == "cast":
        cast_for_inference(model, policy)
        return model, torch.inference_mode
    region = Region(model, policy)

    @contextlib.contextmanager
    def no_grad() -> Iterator[None]:
        with torch.no_grad(), region:
            yield

    return model, {"fp32": torch.inference_mode, "no_grad": no_grad, "inference": region.inference}[mode]


def memory(model: nn.Module, context: Callable[[], AbstractContextManager[object]], x: Tensor) -> tuple[float, float]:
    """MiB of parameters and buffers, and of all that lives at the peak of one forward pass, its input included."""
    live = LiveBytes()
    live.count([*model.parameters(), *model.buffers()])
    weights = live.now
    live.count([x])
    with live, context():
        model(x)
    return weights / 2**20, live.peak / 2**20


def compare(name: str, build: Callable[[], nn.Module], inputs: Callable[[int], Tensor], policy: str) -> Rows:
    """Print the table of one net, and return its rows at batch 1."""
    torch.manual_seed(0)
    model = build().eval()
    served = {mode: make(model, mode, policy) for mode in MODES}
    rows: Rows = {}
    for batch, rounds in ((1, 20), (32, 5)):
        x = inputs(batch)
        print(f"{name}, {policy}, batch {batch}")
        with torch.inference_mode():
            exact = model(x)
        for mode, (net, context) in served.items():
            weights, peak = memory(net, context, x)
            rows.setdefault((name, mode), (weights, peak))
            with context():
                error = (net(x).float() - exact).abs().max() / exact.abs().max()
            figures = f"weights {weights:6.2f} MiB  peak {peak:7.2f} MiB  error {error:.1e} of the largest logit"
            print(f"  {MODES[mode]:26}  {figures}")
        times = measure({mode: Contender(caller(*served[mode], x)) for mode in MODES}, rounds)
        report(times, "inference", "fp32", "no goal")
        report(times, "cast", "fp32", "no goal")
        report(times, "cast", "inference", "to reach 1.05")
    return rows


def caller(net: nn.Module, context: Callable[[], AbstractContextManager[object]], x: Tensor) -> Callable[[], None]:
    def call() -> None:
        with context():
            net(x)

    return call


def figure(rows: Rows) -> str:
    """Bars of MiB at the peak of one forward pass, weights in dark and what comes beside them in light, as SVG."""
    left, unit, step, top = 250, 380 / max(peak for _, peak in rows.values()), 24, 34
    lines = ['<text x="10" y="20" font-weight="bold">MiB at the peak of one forward pass, bf16, batch 1</text>']
    for i, ((name, mode), (weights, peak)) in enumerate(rows.items()):
        y = top + step * i + 12 * (i // len(MODES))
        end = left + peak * unit
        lines += [
            f'<text x="{left - 8}" y="{y + 13}" text-anchor="end">{name}, {MODES[mode]}</text>',
            f'<rect x="{left}" y="{y}" width="{weights * unit:.1f}" height="18" fill="#2f5d8a"/>',
            f'<rect x="{left + weights * unit:.1f}" y="{y}" width="{(peak - weights) * unit:.1f}" height="18" '
            'fill="#9dc3e6"/>',
            f'<text x="{end + 6:.1f}" y="{y + 13}">{weights:.1f} + {peak - weights:.1f}</text>',
        ]
    height = y + step + 28
    lines.append(
        f'<text x="{left}" y="{height - 12}">dark: parameters and buffers; light: casts and activations</text>'
    )
    style = 'font-family="sans-serif" font-size="12" fill="#222"'
    body = "\n".join(lines)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 740 {height}" {style}>\n'
        f'<rect width="740" height="{height}" fill="white"/>\n{body}\n</svg>\n'
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--figure", type=Path)
    arguments = parser.parse_args()
    print(__doc__.splitlines()[0])
    torch.set_num_threads(arguments.threads)
    rows = compare("GPT", gpt, tokens, "bf16") | compare("ResNet", resnet, images, "bf16")
    if arguments.figure:
        arguments.figure.write_text(figure(rows), encoding="utf-8")
    compare("GPT", gpt, tokens, "fp16")
    compare("ResNet", resnet, images, "fp16")
