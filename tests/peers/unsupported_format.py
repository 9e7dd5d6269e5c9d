"""autocast to float64 and to float8."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import SimpleNamespace

import torch
from peers.columns import OURS, THEIRS, Seen, accelerator, batch, fabric_in, net

from halfstep import HalfstepError, Stepper

FORMATS = (torch.float64, torch.float8_e4m3fn)


def judge(runs: list[str]) -> Seen:
    (words,) = set(runs)
    return Seen("float32" in words, words)


def loop(amp: SimpleNamespace) -> Seen:
    model, (x, _) = net(8, 16, 2), batch(0)
    runs = []
    for dtype in FORMATS:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                with amp.autocast("cpu", dtype=dtype):
                    out = model(x)
            except HalfstepError:
                runs.append("HalfstepError")
            else:
                name = str(out.dtype).removeprefix("torch.")
                runs.append(f"{'a warning' if caught else 'silence'}, and computes in {name}")
    return judge(runs)


def torch_amp() -> Seen:
    return loop(THEIRS)


def drop_in() -> Seen:
    return loop(OURS)


def refused(make: Callable[[str], object], names: tuple[str, ...], kind: type[Exception]) -> Seen:
    """Whether settings that name such a format are refused."""
    runs = []
    for name in names:
        try:
            make(name)
        except kind as error:
            runs.append(type(error).__name__)
        else:
            runs.append(f"{name} accepted")
    return judge(runs)


def fabric() -> Seen:
    return refused(fabric_in, ("64-mixed", "fp8-mixed"), ValueError)


def accelerate() -> Seen:
    def make(name: str) -> None:
        with accelerator(mixed_precision=name):
            pass

    return refused(make, ("fp64", "float8"), ValueError)


def stepper() -> Seen:
    model = net(8, 16, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return refused(lambda name: Stepper(model, optimizer, name), ("fp64", "fp8"), HalfstepError)
