"""What a forward pass changes besides its output, saved before it and put back when it has to be undone."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn


class RandomState:
    """The random state of torch on the CPU and on one device, from which dropout draws."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._cpu: torch.Tensor | None = None
        self._cuda: torch.Tensor | None = None

    def save(self) -> None:
        self._cpu = torch.get_rng_state()
        if self.device.type == "cuda":
            self._cuda = torch.cuda.get_rng_state(self.device)

    def restore(self) -> None:
        assert self._cpu is not None, "restore comes after save"
        torch.set_rng_state(self._cpu)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda, self.device)


class RunningStatistics:
    """The running means and variances of a model's normalisation layers.

    A forward pass that overflows writes inf or NaN into them, where they stay although the step is skipped, and spoil
    every later evaluation; one that runs twice counts its batch twice.
    """

    def __init__(self, model: nn.Module) -> None:
        named = {
            f"{prefix}.{name}".removeprefix("."): buffer
            for prefix, module in model.named_modules()
            if getattr(module, "running_mean", None) is not None
            for name in ("running_mean", "running_var", "num_batches_tracked")
            if isinstance(buffer := getattr(module, name, None), torch.Tensor)
        }
        self._names, self._buffers = list(named), list(named.values())
        self._saved = [buffer.detach().clone() for buffer in self._buffers]

    def __bool__(self) -> bool:
        return bool(self._buffers)

    @torch.no_grad()
    def save(self) -> None:
        if self._buffers:
            torch._foreach_copy_(self._saved, self._buffers)

    @torch.no_grad()
    def restore(self) -> None:
        if self._buffers:
            torch._foreach_copy_(self._buffers, self._saved)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """What was saved, by name."""
        return {name: saved.clone() for name, saved in zip(self._names, self._saved, strict=True)}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take ``state`` for what was saved; where it has no entry, what the model holds now."""
        self.save()
        for name, saved in zip(self._names, self._saved, strict=True):
            if name in state:
                saved.copy_(state[name])
