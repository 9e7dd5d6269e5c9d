"""The columns of docs/peers.md, what was seen in one, and the small nets and machines that the faults share."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn

from halfstep import autocast_mode
from halfstep.autocast_mode import autocast
from halfstep.grad_scaler import GradScaler

COLUMNS = {
    "torch.amp": "torch_amp",
    "Fabric": "fabric",
    "Accelerate": "accelerate",
    "halfstep GradScaler, autocast": "drop_in",
    "halfstep Stepper": "stepper",
}
"""Title, and the name of the function in the file of a fault."""
NEEDS = {"Fabric": "lightning_fabric", "Accelerate": "accelerate"}
"""The package without which a column stays empty."""

THEIRS = SimpleNamespace(autocast=torch.autocast, GradScaler=torch.amp.GradScaler)
OURS = SimpleNamespace(autocast=autocast, GradScaler=GradScaler)
"""One loop serves both: the drop-ins are the same names."""


@dataclass(frozen=True)
class Seen:
    """What a library did. fault: whether the fault showed, None where it could not be tried. words: the table's cell."""

    fault: bool | None
    words: str


def not_on_a_cpu() -> Seen:
    """The library has no loss scale, or no such setting, on a CPU."""
    return Seen(None, "not on a CPU")


def look(fault: ModuleType, column: str) -> Seen:
    """Run one fault with one library, and leave nothing behind that another column would notice."""
    scenario: Callable[[], Seen] = getattr(fault, COLUMNS[column])
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a fault that only warns is one that the run goes on with
        torch.manual_seed(0)
        try:
            return scenario()
        finally:
            autocast_mode._standing.close()


# --- nets -----------------------------------------------------------------------------------------------------------


def net(*widths: int) -> nn.Sequential:
    """Linear layers with ReLU between them, the same weights in every column."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for inner, outer in zip(widths, widths[1:], strict=False):
        layers += [nn.Linear(inner, outer), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def batch(seed: int, size: int = 8, inner: int = 8, outer: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, inner, generator=generator), torch.randn(size, outer, generator=generator)


def weights_of(model: nn.Module) -> torch.Tensor:
    """A copy of all of them, flat."""
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def fate(before: torch.Tensor, after: torch.Tensor) -> str:
    """In words, what became of weights that a bad gradient must not reach."""
    if num_nan := int((~after.isfinite()).sum()):
        return f"{num_nan} of {after.numel()} weights NaN"
    return "weights intact" if torch.equal(before, after) else "weights moved"


# --- the other libraries --------------------------------------------------------------------------------------------


def fabric_in_fp16() -> Any:
    """Fabric with fp16 and torch's loss scale. By ``precision="16-mixed"`` it would compute in bf16 on a CPU."""
    from lightning_fabric import Fabric
    from lightning_fabric.plugins import MixedPrecision

    return Fabric(accelerator="cpu", devices=1, plugins=MixedPrecision("16-mixed", device="cpu"))


def fabric_in(precision: str) -> Any:
    from lightning_fabric import Fabric

    return Fabric(accelerator="cpu", devices=1, precision=precision)


@contextmanager
def accelerator(**settings: Any) -> Iterator[Any]:
    """An Accelerator of its own; the library shares its state between all that a process makes."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    def forget() -> None:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()

    forget()
    try:
        yield Accelerator(cpu=True, **settings)
    finally:
        forget()
