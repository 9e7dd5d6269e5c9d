"""What the stepper tells about its steps: read late, handed to the session that judges and keeps it, and acted on."""

from __future__ import annotations

import atexit
import math
import os
import platform
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from halfstep.errors import HalfstepError
from halfstep.events import Alert, RunInfo, StepReport
from halfstep.policy import Policy
from halfstep.readback import Readback
from halfstep.report import json_number
from halfstep.scale import NoScale
from halfstep.watch.entry import LAYERS_EVERY, RunStart, Step
from halfstep.watch.session import Session
from halfstep.watch.settings import Watch
from halfstep.window import Verdict

EVERY = 10
"""Steps that are read together, and from one decision about the loss scale to the next."""
_LONGEST_S = 1.0
"""Seconds after which steps are read although they are fewer."""
_MIB = 2.0**20
_open: weakref.WeakSet[Watcher] = weakref.WeakSet()


def _close_all() -> None:
    """The process ends: with what ended the script, if anything did."""
    error = getattr(sys, "last_value", None)
    for watcher in list(_open):
        watcher.close(None if error is None else f"{type(error).__name__}: {error}")


class _Waiting(NamedTuple):
    """A step whose numbers are on their way."""

    report: StepReport
    time: float
    held: float | torch.Tensor
    parameters: Sequence[torch.Tensor]
    nonfinite_share: float | None


class Watcher:
    """Watches the steps of one process, for a Stepper.

    A decision about the loss scale falls at every EVERY-th step, from the steps up to the decision before: then their
    numbers have long arrived, and every rank of a replicated model decides the same in the same step.
    """

    def __init__(
        self,
        model: nn.Module,
        scale: NoScale,
        policy: Policy,
        info: RunInfo,
        settings: Watch,
        log: str | os.PathLike[str] | None,
        on_alert: Callable[[Alert], None],
    ) -> None:
        self._scale = scale
        self._group = None
        if isinstance(model, DistributedDataParallel):
            self._group, model = model.process_group, cast(nn.Module, model.module)
        self._parameters = {id(p): (name, p.numel()) for name, p in model.named_parameters()}
        rank, num_ranks = _rank()
        num_elements = sum(p.numel() for p in model.parameters() if p.requires_grad)
        run = RunStart(
            time=time.time(),
            rank=rank,
            num_ranks=num_ranks,
            session=os.urandom(6).hex(),
            host=platform.node(),
            pid=os.getpid(),
            policy=str(policy),
            scale=asdict(scale.settings),
            info=info.to_dict(),
            num_elements=num_elements,
        )
        # Weakly, since a stepper and its watcher would keep each other, and an open region, until a garbage collection.
        tell = weakref.WeakMethod(on_alert)
        self.session = Session(run, settings, log, lambda alert: _call(tell(), alert))
        # Ahead of the hooks that an exporter's package has registered by now: wandb's ends its service.
        atexit.unregister(_close_all)
        atexit.register(_close_all)
        self._num_elements = max(1, num_elements)
        self._device = scale.value.device
        self._readback: Readback[_Waiting | None] = Readback()
        self._agrees: bool | None = None
        self._failure: str | None = None
        self._memory_mib = _memory_mib(self._device)
        _open.add(self)
        self._last_read = time.monotonic()

    def step(
        self, report: StepReport, verdict: Verdict, parameters: Sequence[torch.Tensor], nonfinite_share: float | None
    ) -> None:
        """A window has ended. parameters: those that had a gradient, in the order of the verdict's norms."""
        count = verdict.count
        tensors = [count] if isinstance(count, torch.Tensor) else []
        waiting = _Waiting(report, time.time(), count, parameters, nonfinite_share)
        self._readback.put(waiting, verdict.numbers, verdict.norms, *tensors)
        self._failure = None
        is_due = report.step % EVERY == 0
        if is_due:
            self._see(waits=True)
            self._decide(report.step)
        now = time.monotonic()
        is_late = now - self._last_read > _LONGEST_S
        if is_late:
            self._last_read = now
            self._memory_mib = _memory_mib(self._device)
        if is_due or is_late:
            self._readback.send()
            self._see()

    def event(self, kind: str, event: Mapping[str, Any]) -> None:
        """Anything else that the stepper tells, as an entry of ``kind``."""
        self.session.see({"kind": kind, "time": time.time(), **event})

    def resume(self, step: int) -> None:
        """The run goes on after ``step``, from a state."""
        self.flush()
        self._agrees = None
        self.event("seam", {"step": step})

    def alert(self, rule: str, step: int, error: HalfstepError) -> None:
        """The run ends with ``error``, unless it goes on all the same."""
        self.flush()
        self._failure = f"{type(error).__name__}: {error}"
        self.session.alert(Alert(rule, step, "error", f"{error.what}: {error.why}", error.fix, self.session.rank))

    def close(self, reason: str | None = None) -> None:
        """End the session, with the ``reason`` of one that failed."""
        self.flush()
        self.session.close(reason or self._failure)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()  # a copy of a stepper is another run, which nobody watches

    def __del__(self) -> None:
        if hasattr(self, "session") and self.session.is_kept:
            self.close()

    def flush(self) -> None:
        """Read what is still on its way; waits for the device."""
        self._readback.send()
        self._see(waits=True)

    def _see(self, waits: bool = False) -> None:
        for waiting, tensors in self._readback.take(waits):
            if waiting is None:
                self._agrees = bool(tensors[0].item())
            else:
                self._see_step(waiting, tensors)

    def _see_step(self, waiting: _Waiting, tensors: Sequence[torch.Tensor]) -> None:
        report, share = waiting.report, waiting.nonfinite_share
        loss, grad_norm, scale, skipped = tensors[0].tolist()
        report.arrived((loss, grad_norm, scale, skipped))
        count = tensors[-1].item() if isinstance(waiting.held, torch.Tensor) else waiting.held
        names, at_most = self._not_finite(waiting, tensors) if skipped else ((), 0.0)
        self.session.see(
            Step(
                report.step,
                waiting.time,
                loss,
                grad_norm,
                scale,
                not skipped,
                report.reason if skipped else None,
                report.num_replays,
                0.0 if share is None and not skipped else share,
                at_most,
                names,
                count,
                self._memory_mib,
            )
        )
        if report.step % LAYERS_EVERY == 0:
            self._see_layers(waiting, tensors[1].tolist(), grad_norm)

    def _not_finite(self, waiting: _Waiting, tensors: Sequence[torch.Tensor]) -> tuple[tuple[str, ...], float]:
        """The parameters whose gradient had a norm that was not finite, and their share of all elements."""
        bad = [
            self._parameters.get(id(parameter), ("", 0))
            for parameter, norm in zip(waiting.parameters, tensors[1].tolist(), strict=True)
            if not math.isfinite(norm)
        ]
        return tuple(name for name, _ in bad), sum(size for _, size in bad) / self._num_elements

    def _see_layers(self, waiting: _Waiting, norms: list[float], grad_norm: float) -> None:
        # Those of the scaled sums; their whole has the true norm.
        unit = grad_norm / math.hypot(*norms) if any(norms) else 1.0
        names = [self._parameters.get(id(parameter), ("", 0))[0] for parameter in waiting.parameters]
        true = [json_number(norm * unit) for norm in norms]
        self.event("layers", {"step": waiting.report.step, "parameters": names, "norms": true})

    def _decide(self, step: int) -> None:
        """Lower the scale if the guard asks for it: of a replicated model, if it asks on every rank.

        The ranks' answers are put together on the device and known at the next decision, so that nobody waits.
        """
        guard = self.session.guard
        lowers = guard.lowers_scale
        if self._group is not None:
            lowers, self._agrees = bool(self._agrees), None
            answer = torch.full((), float(guard.lowers_scale and not lowers), device=self._device)
            torch.distributed.all_reduce(answer, torch.distributed.ReduceOp.MIN, self._group)
            self._readback.put(None, answer)
        if lowers and self._scale.back_off() is not None:
            self.event("reduction", {"step": step, "scale": self._scale.value.item()})


def _call(tell: Callable[[Alert], None] | None, alert: Alert) -> None:
    if tell is not None:
        tell(alert)


def _rank() -> tuple[int, int]:
    """Rank of this process, and how many there are."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def _memory_mib(device: torch.device) -> float | None:
    """CUDA: the most that was allocated so far; CPU: what the process holds, where the system tells."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / _MIB
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / _MIB
    except OSError:
        return None
