"""Small models, each with one fault of the kind that people report, and where it is: the mark ``# here: NAME``."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep.source import Source
from halfstep.workload import Workload

WIDTH = 16


def line_of(name: str) -> int:
    """The line in this file that has the fault called ``name``."""
    lines = Path(__file__).read_text().splitlines()
    (number,) = (i for i, line in enumerate(lines, 1) if line.endswith(f"# here: {name}"))
    return number


def source(
    make: Callable[[], nn.Module], loss: Any = None, batches: Any = None, optimizer: Any = None, **fields: Any
) -> Source:
    """A workload over ``make()``, by default with random inputs [8, WIDTH], the mean square, and a slow SGD."""

    def workload(seed: int) -> Workload:
        model = make()
        return Workload(
            model=model,
            batches=batches() if callable(batches) else (batches or [torch.randn(8, WIDTH) for _ in range(3)]),
            loss=loss or (lambda model, x: model(x).float().square().mean()),
            optimizer=optimizer or (lambda parameters: torch.optim.SGD(parameters, lr=1e-9)),
            **fields,
        )

    return Source("net", workload)


def scaled(linear: nn.Linear, factor: float) -> nn.Linear:
    with torch.no_grad():
        linear.weight.mul_(factor)
    return linear


class SquaredReLU(nn.Module):
    """Activations of some hundreds, squared."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = scaled(nn.Linear(WIDTH, 32), 800), scaled(nn.Linear(32, WIDTH), 1e-4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x).relu()
        h = h * h  # here: activation
        return self.down(h)


class LateScale(nn.Module):
    """Attention scores that are divided after the product."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (scaled(nn.Linear(WIDTH, WIDTH), f) for f in (300, 300, 1))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.q(x) @ self.k(x).T  # here: scores
        return (scores / WIDTH**0.5).softmax(-1) @ self.v(x)


class LogitScale(nn.Module):
    """A learned temperature that nobody clamps."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.log_scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.tensor(11.2))

    def forward(self, x: Tensor) -> Tensor:
        z = F.normalize(self.project(x), dim=-1)
        return self.log_scale.exp() * (z @ z.T)  # here: logit scale


class RootMeanSquare(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        mean = (x * x).mean(-1, keepdim=True)  # here: rmsnorm
        return x * torch.rsqrt(mean + 1e-6).to(x.dtype)


class UnitVectors(nn.Module):
    """A row of zeros divided by its largest element."""

    def forward(self, x: Tensor) -> Tensor:
        largest = x.abs().amax(-1, keepdim=True)
        return x / largest.clamp_min(1e-12)  # here: normalize


class CubicNorm(nn.Module):
    """The cube of a small number underflows, and the root has no slope at zero."""

    def forward(self, x: Tensor) -> Tensor:
        cubes = (x.abs() * x * x) @ x.new_ones(WIDTH, 1)
        return cubes ** (1 / 3)  # here: cubic norm


class Head(nn.Module):
    """``part`` behind a linear layer, which gives it 16 bits."""

    def __init__(self, part: nn.Module, factor: float = 1.0, bias: bool = True) -> None:
        super().__init__()
        self.stem, self.part = scaled(nn.Linear(WIDTH, WIDTH, bias=bias), factor), part

    def forward(self, x: Tensor) -> Tensor:
        return self.part(self.stem(x))


def zero_times_sum(model: nn.Module, x: Tensor) -> Tensor:
    """A loss without a target: the sum, so that every weight has a gradient, times 0."""
    out = model(x) + 5
    total = out.flatten() @ torch.full_like(out, 1000.0).flatten()  # here: zero times sum
    return total.float() * 0.0


def matching_cost(model: nn.Module, x: Tensor) -> Tensor:
    """A cost that only picks a match: nothing that is not finite reaches the loss."""
    out = model(x)
    with torch.no_grad():
        cost = (out + 5).square() @ torch.full_like(out, 4000.0).T / 4000.0  # here: matching cost
        match = cost.argmin(-1)
    return (out - out[match]).float().square().mean()


def log_of_size(model: nn.Module, x: Tensor) -> Tensor:
    """1e-8 is zero in fp16, so that a size of zero has no logarithm."""
    size = model(x).relu()
    return (torch.log(size + 1e-8).float() + 1).square().mean()  # here: eps in log


def focal(model: nn.Module, x: Tensor) -> Tensor:
    """1 - 1e-4 is 1 in 16 bits."""
    probability = (model(x) + 20).sigmoid().clamp(1e-4, 1 - 1e-4)
    return -torch.log(1 - probability).float().mean()  # here: clamped probability


def inner_scale(model: nn.Module, x: Tensor) -> Tensor:
    """A penalty on a gradient whose own loss is scaled too far."""
    x = x.clone().requires_grad_()
    inner = model(x).float().square().mean() * 2.0**30
    (gradient,) = torch.autograd.grad(inner, x, create_graph=True)
    return (gradient / 2.0**30).square().sum()


def blank_row() -> list[Tensor]:
    x = torch.randn(8, WIDTH)
    x[3] = 0
    return [torch.randn(8, WIDTH), x, torch.randn(8, WIDTH)]


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def unused_rows() -> nn.Module:
    """An embedding with rows whose gradient is exactly zero."""
    return nn.Sequential(nn.Embedding(20, 4), nn.Linear(4, 2))


# --- masks ---------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Self-attention over [batch, length, WIDTH], with the scores masked by ``mask``."""

    def __init__(self, mask: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.qkv, self.mask = nn.Linear(WIDTH, 3 * WIDTH), mask

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        hidden = torch.ones(x.shape[1], x.shape[1]).triu(1).bool()
        return self.mask(q @ k.mT / WIDTH**0.5, hidden).softmax(-1).to(v.dtype) @ v


def _in_place(scores: Tensor, hidden: Tensor) -> Tensor:
    scores = scores.clone()
    scores[:, hidden] = -math.inf
    return scores


MASKS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "masked_fill": lambda s, hidden: s.masked_fill(hidden, -math.inf),
    "masked_fill of finfo.min": lambda s, hidden: s.masked_fill(hidden, torch.finfo(s.dtype).min),
    "in place": _in_place,
    "triu of full": lambda s, hidden: s + torch.full(hidden.shape, -math.inf).triu(1),
    "full in the format of the scores": lambda s, hidden: (
        s + torch.full(hidden.shape, -math.inf, dtype=s.dtype).triu(1)
    ),
    "where": lambda s, hidden: torch.where(hidden, -math.inf, s),
    "where with a tensor": lambda s, hidden: torch.where(hidden, torch.tensor(-math.inf, dtype=s.dtype), s),
    "where with a large number": lambda s, hidden: torch.where(hidden, -1e9, s),
    "a cast constant": lambda s, hidden: s + (hidden.float() * -1e9).to(s.dtype),
    "a cast finfo.min": lambda s, hidden: s + (hidden.float() * torch.finfo(torch.float32).min).to(s.dtype),
    "masked scores that are cast": lambda s, hidden: (s.float() + hidden.float() * -1e9).to(s.dtype),
    "a product that does not fit": lambda s, hidden: s + hidden.to(s.dtype) * -1e9,
    "finfo.min times two": lambda s, hidden: s + 2 * _least(s, hidden),
    "finfo.min twice": lambda s, hidden: s + _least(s, hidden) + _least(s, hidden),
    "finfo.min with a bias": lambda s, hidden: s.masked_fill(hidden, torch.finfo(s.dtype).min) - 40,
    "finfo.min and low scores": lambda s, hidden: (s - 40) + _least(s, hidden),
    "the logarithm of a mask": lambda s, hidden: s + (~hidden).float().log(),
    "the logarithm in the format": lambda s, hidden: s + (1 - hidden.to(s.dtype)).log(),
    "masked twice": lambda s, hidden: s.masked_fill(hidden, -math.inf) + torch.full(hidden.shape, -math.inf).triu(1),
    "scaled after": lambda s, hidden: s.masked_fill(hidden, -math.inf) * 0.5,
}


def _least(scores: Tensor, hidden: Tensor) -> Tensor:
    return hidden.to(scores.dtype) * torch.finfo(scores.dtype).min


class MaskInBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.full((6, 6), -math.inf).triu(1))
        self.attention = Attention(lambda s, hidden: s + self.mask)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x)


class Fused(nn.Module):
    """torch's own attention, with a mask of booleans or of numbers, or causal by itself."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.qkv, self.kind = nn.Linear(WIDTH, 3 * WIDTH), kind

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unsqueeze(1) for part in self.qkv(x).chunk(3, -1))
        allowed = torch.ones(x.shape[1], x.shape[1]).tril().bool()
        mask = {"bool": allowed, "float": torch.zeros(allowed.shape).masked_fill(~allowed, -math.inf).to(q.dtype)}
        return F.scaled_dot_product_attention(q, k, v, mask.get(self.kind), is_causal=self.kind == "causal").squeeze(1)


class MultiHead(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.attention, self.kind = nn.MultiheadAttention(WIDTH, 2, batch_first=True), kind

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.ones(x.shape[1], x.shape[1]).triu(1).bool()
        mask = torch.zeros(hidden.shape).masked_fill(hidden, -math.inf) if self.kind == "float" else hidden
        padding = torch.zeros(x.shape[:2]).bool()
        padding[:, -1] = True
        out: Tensor = self.attention(
            x, x, x, attn_mask=mask, key_padding_mask=padding if self.kind == "bool" else None
        )[0]
        return out


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x, src_mask=nn.Transformer.generate_square_subsequent_mask(x.shape[1]))
        return out


MASKED: dict[str, Callable[[], nn.Module]] = {
    **{name: (lambda mask=mask: Attention(mask)) for name, mask in MASKS.items()},  # type: ignore[misc]
    "a buffer": MaskInBuffer,
    **{f"fused, {kind}": (lambda kind=kind: Fused(kind)) for kind in ("bool", "float", "causal")},  # type: ignore[misc]
    **{f"multi-head, {kind}": (lambda kind=kind: MultiHead(kind)) for kind in ("bool", "float")},  # type: ignore[misc]
    "encoder": Encoder,
}


def sequences() -> list[Tensor]:
    return [torch.randn(2, 6, WIDTH) for _ in range(2)]
