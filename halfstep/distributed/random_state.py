"""Random state of a process: what dropout, shuffling and augmentation draw from."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch


def save(device: torch.device) -> dict[str, Any]:
    """The state of torch's generators, on the CPU and on ``device``, of Python's, and of numpy's where it is loaded."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    if numpy := sys.modules.get("numpy"):
        state["numpy"] = numpy.random.get_state()
    return state


def restore(state: Mapping[str, Any], device: torch.device) -> None:
    """Go on drawing from ``state``, where this process has the generators that it was saved of."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
    if (numpy := sys.modules.get("numpy")) and "numpy" in state:
        numpy.random.set_state(state["numpy"])
