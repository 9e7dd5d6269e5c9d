"""HS150: positions or time steps are rounded to 16 bit."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.lint.rule import Problem, Rule
from halfstep.lint.script import Script
from halfstep.lint.values import Tensor


def check(script: Script) -> Iterator[Problem]:
    for event in script.sites:
        before, after = event.receiver, event.result
        if event.what == "cast" and isinstance(before, Tensor) and isinstance(after, Tensor):
            if before.is_16_bit or "divided" in before.tags or not after.is_16_bit:
                continue
        elif event.what == "call" and isinstance(event.result, Tensor) and "literal" in event.result.tags:
            after = before = event.result
        else:
            continue
        assert isinstance(before, Tensor)
        assert isinstance(after, Tensor)
        exact = _rounded(before, after)
        if exact is not None:
            yield Problem(
                event.node,
                f"positions or time steps are kept in {exact[0]}, which is exact for whole numbers up to {exact[1]} "
                "only: compute with them in fp32, and cast what comes out",
            )


def _rounded(before: Tensor, after: Tensor) -> tuple[str, int] | None:
    """The format that cannot hold these numbers, and how far it counts; None when it holds them."""
    if after.formats == {"fp16"}:
        return ("fp16", 2048) if "long grid" in before.tags else None
    return ("bf16", 256) if after.is_16_bit and "bf16" in after.formats and "grid" in before.tags else None


RULE = Rule(
    code="HS150",
    name="positions-in-16-bit",
    severity="error",
    summary="Positions or time steps are kept in 16 bit, which cannot count that far.",
    why="""
bf16 has 8 significant bits: it counts exactly to 256, then in steps of 2, and between 512 and 1024 in steps of 4.
Rounded to bf16, the time steps 1 to 1000 of a diffusion model fall onto 506 values, and the positions of a sequence of
4096 onto 769: neighbours share an embedding. fp16 has 11 bits and counts to 2048.

A sinusoid of a rounded position is off by up to 2, its whole range, wherever the phase turns fast. Keep positions, time
steps and the frequencies they are multiplied with in fp32 or int64, and cast the finished embedding.
""",
    bad=(
        """\
import torch
from torch import nn

dtype = torch.bfloat16
sigmas = torch.linspace(1000, 1, 1000)


def loss_of(unet: nn.Module, latents, noise):
    pick = torch.randint(0, 1000, (latents.shape[0],))
    t = sigmas[pick].to(dtype)  # HS150
    with torch.autocast("cuda", dtype=dtype):
        return nn.functional.mse_loss(unet(latents, t).float(), noise)
""",
        """\
import torch
from torch import nn


class Rotary(nn.Module):
    def __init__(self, width, max_len=8192):
        super().__init__()
        self.register_buffer("inv_freq", 10000.0 ** (-torch.arange(0, width, 2).float() / width))
        self.max_len = max_len

    def forward(self, x):
        pos = torch.arange(self.max_len, device=x.device).half()  # HS150
        return torch.outer(pos, self.inv_freq)
""",
    ),
    good=(
        """\
import torch
from torch import nn

dtype = torch.bfloat16
sigmas = torch.linspace(1000, 1, 1000)


def loss_of(unet: nn.Module, latents, noise):
    pick = torch.randint(0, 1000, (latents.shape[0],))
    t = sigmas[pick]
    with torch.autocast("cuda", dtype=dtype):
        return nn.functional.mse_loss(unet(latents, t).float(), noise)
""",
        """\
import torch
from torch import nn


class Rotary(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.register_buffer("inv_freq", 10000.0 ** (-torch.arange(0, width, 2).float() / width))

    def forward(self, x):
        pos = torch.arange(x.shape[1], device=x.device).float()
        angle = torch.outer(pos, self.inv_freq)
        weekday = torch.arange(7, device=x.device).to(torch.bfloat16)
        return angle.sin().to(x.dtype), weekday
""",
    ),
    check=check,
)
