"""The columns of docs/peers.md, what was seen in one, and the small nets and machines that the faults share."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn

from halfstep import GradScaler, autocast, autocast_mode

COLUMNS = {
    "torch.amp": "torch_amp",
    "Fabric": "fabric",
    "Accelerate": "accelerate",
    "halfstep GradScaler, autocast": "drop_in",
    "halfstep Stepper": "stepper",
}
"""Title, and the name of the function in the file of a fault."""
NEEDS = {"torch.amp": "torch", "Fabric": "lightning-fabric", "Accelerate": "accelerate"}
"""The package without which a column stays empty, by its name in the registry."""

THEIRS = SimpleNamespace(autocast=torch.autocast, GradScaler=torch.amp.GradScaler)
OURS = SimpleNamespace(autocast=autocast, GradScaler=GradScaler)
"""One loop serves both: the drop-ins are the same names."""


@dataclass(frozen=True)
class Seen:
    """What a library did.

    fault: whether the fault showed, None where it could not be tried. words: the table's cell.
    """

    fault: bool | None
    words: str


def version_of(column: str) -> str | None:
    """Of the package that the column is about; None where it is not installed."""
    try:
        return version(NEEDS.get(column, "halfstep"))
    except PackageNotFoundError:
        return None


def look(fault: ModuleType, column: str) -> Seen:
    """Run one fault with one library, and leave nothing behind that another column would notice."""
    scenario: Callable[[], Seen] = getattr(fault, COLUMNS[column])
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a fault that only warns is one that the run goes on with
        try:
            return scenario()
        finally:
            autocast_mode._standing.close()


# --- nets -----------------------------------------------------------------------------------------------------------


def net(*widths: int) -> nn.Sequential:
    """Linear layers with ReLU between them, the same weights in every column."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for inner, outer in pairwise(widths):
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
    if num_nan := int(after.isnan().sum()):
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


def accelerate_in_fp16() -> Seen:
    """Under ``mixed_precision="fp16"`` Accelerate has neither a region nor a loss scale on a CPU; it runs in fp32."""
    with accelerator(mixed_precision="fp16") as engine:
        assert engine.mixed_precision == "fp16"
        model = engine.prepare(nn.Linear(8, 2))
        with engine.autocast():
            if engine.scaler is None and (model(batch(0)[0]) @ torch.ones(2, 1)).dtype == torch.float32:
                return Seen(None, "not on a CPU")
    return Seen(True, "has fp16 on a CPU: write this cell")
