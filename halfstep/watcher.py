"""What the stepper tells about its steps: read late, handed to the session that judges and keeps it, and acted on."""

from __future__ import annotations

import atexit
import logging
import math
import os
import platform
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, NamedTuple

import torch

from halfstep.errors import HalfstepError
from halfstep.events import Alert, RunInfo, StepReport
from halfstep.policy import Policy
from halfstep.ranks.one import Ranks
from halfstep.readback import Readback
from halfstep.report import json_number
from halfstep.scale import NoScale
from halfstep.watch.entry import LAYERS_EVERY, Entry, RunStart, Step
from halfstep.watch.session import Session
from halfstep.watch.settings import Watch
from halfstep.window import Verdict, why_skipped

logger = logging.getLogger("halfstep")

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
        is_news = error is not None and error is not watcher.error_before
        watcher.close(error if is_news else None)


class _Waiting(NamedTuple):
    """A step whose numbers are on their way."""

    report: StepReport
    time: float
    parameters: tuple[torch.Tensor, ...]
    unit: float
    held: float | None
    """The count; None where it comes with the numbers."""
    nonfinite_share: float | None


class Watcher:
    """Watches the steps of one process, for a Stepper.

    Nothing is waited for in a step: numbers are read when they have arrived, and at every EVERY-th step those that were
    sent until the EVERY-th before it, which is long ago for the device. Then it is decided about the loss scale, by all
    ranks of a model in the same step. Ranks that no engine brings together decide nothing, since scales that part spoil
    gradients that are summed.
    """

    def __init__(
        self,
        ranks: Ranks,
        scale: NoScale,
        policy: Policy,
        info: RunInfo,
        settings: Watch,
        log: str | os.PathLike[str] | None,
        on_alert: Callable[[Alert], None],
        may_lower: bool,
    ) -> None:
        self._scale, self._may_lower = scale, may_lower
        self._device = scale.value.device
        self._ranks = ranks
        self._names = {id(parameter): name for name, parameter in ranks.module.named_parameters()}
        rank, num_ranks = _rank()
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
            num_elements=sum(p.numel() for p in ranks.module.parameters() if p.requires_grad),
            can_lower=may_lower,
        )
        # Weakly, since a stepper and its watcher would keep each other, and an open region, until a garbage collection.
        self._on_alert = weakref.WeakMethod(on_alert)
        self._untold: list[Alert] = []
        self.session = Session(run, settings, log, self._on_alert, partial(_lost, ranks.report))
        # Ahead of the hooks that an exporter's package has registered by now: wandb's ends its service.
        atexit.unregister(_close_all)
        atexit.register(_close_all)
        _open.add(self)
        self.error_before = getattr(sys, "last_value", None)
        self._pid = os.getpid()
        self._readback: Readback[_Waiting | None] = Readback()
        self._num_sent = 0  # at the decision before
        self._agrees = False
        self._failure: str | None = None
        self._memory_mib = _memory_mib(self._device)
        self._last_read = time.monotonic()
        ranks.at_end(self.fail)

    def step(self, report: StepReport, verdict: Verdict, nonfinite_share: float | None) -> None:
        """A window has ended."""
        if self._pid != os.getpid():
            return  # forked: the run is that of the parent
        self._failure = None
        # Of the verdict only what is read: tensors that outlive a step take the place of warm memory.
        count = verdict.count
        if isinstance(count, float):
            waiting = _Waiting(report, time.time(), verdict.parameters, verdict.unit, count, nonfinite_share)
            self._readback.put(waiting, verdict.numbers, verdict.norms)
        else:
            waiting = _Waiting(report, time.time(), verdict.parameters, verdict.unit, None, nonfinite_share)
            self._readback.put(waiting, verdict.numbers, verdict.norms, count)
        now = time.monotonic()
        if now - self._last_read > _LONGEST_S:
            self._last_read = now
            self._memory_mib = _memory_mib(self._device)
            self._readback.send()
            self._read()
        if report.step % EVERY == 0:
            self._read(self._num_sent)
            self._decide(report.step)
            self._num_sent = self._readback.send()
            self._read()
        for entry in self._ranks.news():
            self._keep(entry)
        if self._untold:
            self._tell()

    def event(self, kind: str, event: Mapping[str, Any]) -> None:
        """Anything else that the stepper tells, as an entry of ``kind``."""
        if self._pid == os.getpid():
            self._keep({"kind": kind, "time": time.time(), **event})
            self._tell()

    def resume(self, step: int) -> None:
        """The run goes on after ``step``, from a state."""
        self.flush()
        self._agrees = False
        self.event("seam", {"step": step})

    def alert(self, rule: str, step: int, error: HalfstepError) -> None:
        """The run ends with ``error``, unless it goes on all the same."""
        self.flush()
        self._failure = _text(error)
        alert = Alert(rule, step, "error", f"{error.what}: {error.why}", error.fix, self.session.rank)
        self.session.alert(alert)
        self._untold.append(alert)
        self._tell()

    def close(self, error: BaseException | None = None) -> None:
        """End the session, with the ``error`` that one failed with."""
        if self._pid == os.getpid():
            self.flush()
            self.session.close(self._failure if error is None else _text(error))

    def fail(self, reason: str) -> None:
        """End the session now, with what has arrived: nobody waits for a device that may wait for a rank."""
        if self._pid == os.getpid():
            self._readback.send()
            self._read()
            self._tell()
            self.session.close(reason)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()  # a copy of a stepper is another run, which nobody watches

    def __del__(self) -> None:
        if hasattr(self, "_last_read") and self.session.is_kept:
            self.close()

    def flush(self) -> None:
        """Read what is still on its way; waits for the device."""
        self._read(self._readback.send())
        self._tell()

    def _keep(self, entry: Entry | Step) -> None:
        self._untold += self.session.see(entry)

    def _tell(self) -> None:
        """Last of all: an exception out of a sink is the caller's, and loses nothing of the log."""
        alerts, self._untold = self._untold, []
        tell = self._on_alert()
        for alert in alerts:
            if tell is not None:
                tell(alert)

    def _read(self, waits_for: int = 0) -> None:
        for waiting, vectors in self._readback.take(waits_for):
            if waiting is None:
                self._agrees = bool(vectors[0][0])
            else:
                self._keep_step(waiting, *vectors)

    def _keep_step(
        self, waiting: _Waiting, numbers: Sequence[float], norms: Sequence[float], counts: Sequence[float] = ()
    ) -> None:
        report, parameters, share = waiting.report, waiting.parameters, waiting.nonfinite_share
        report.arrived(numbers)
        loss, grad_norm, scale, skipped, *faults = numbers
        count = counts[0] if waiting.held is None else waiting.held
        bad = _not_finite(parameters, norms) if skipped else []
        self._keep(
            Step(
                report.step,
                waiting.time,
                loss,
                grad_norm,
                scale,
                not skipped,
                why_skipped(count, loss, grad_norm, *faults) if skipped else None,
                report.num_replays,
                0.0 if share is None and not skipped else share,
                _num_elements(bad) / max(1, _num_elements(parameters)) if bad else 0.0,
                tuple(self._name(parameter) for parameter in bad),
                count,
                int(faults[1]) if faults and faults[0] == 1 else None,
                self._memory_mib,
            )
        )
        if report.step % LAYERS_EVERY == 0 and count:
            unit = waiting.unit / (scale * count)
            true = [json_number(norm * unit) for norm in norms]
            names = [self._name(parameter) for parameter in parameters]
            entry = {"kind": "layers", "time": waiting.time, "step": report.step, "parameters": names, "norms": true}
            self._keep(entry)

    def _name(self, parameter: torch.Tensor) -> str:
        return self._names.get(id(parameter), "")

    def _decide(self, step: int) -> None:
        """Lower the scale if the guard asks for it: of replicas, if it asks on every rank.

        The ranks' answers are put together on the device and known at the next decision, so that nobody waits.
        """
        if not self._may_lower:
            return
        lowers = self.session.lowers_scale
        if self._ranks.num > 1:
            lowers, self._agrees = self._agrees, False
            answer = torch.full((), float(self.session.lowers_scale and not lowers), device=self._device)
            self._readback.put(None, self._ranks.lowest(answer))
        if lowers and self._scale.back_off() is not None:
            self._keep({"kind": "reduction", "time": time.time(), "step": step, "scale": self._scale.value.item()})


def make_watcher(
    ranks: Ranks,
    scale: NoScale,
    policy: Policy,
    info: RunInfo,
    log: str | os.PathLike[str] | None,
    watch: Watch | str | os.PathLike[str] | bool,
    on_alert: Callable[[Alert], None],
) -> Watcher | None:
    """The watcher that the arguments ``log`` and ``watch`` of a stepper ask for; ``on_alert`` is a method of it."""
    lowers = may_lower(ranks, scale, watch is not False)
    if watch is False:
        if log is not None:
            raise HalfstepError(
                f"log={str(log)!r} with watch=False", "the log is what is watched", "Leave one of them out."
            )
        return None
    if not isinstance(watch, bool | str | os.PathLike | Watch):
        raise HalfstepError(
            f"watch={watch!r}",
            "it is a halfstep.Watch, the name of its TOML file, True or False",
            "Leave it out for the defaults.",
        )
    settings = watch if isinstance(watch, Watch) else Watch() if isinstance(watch, bool) else Watch.read(watch)
    return Watcher(ranks, scale, policy, info, settings, log, on_alert, lowers)


def may_lower(ranks: Ranks, scale: NoScale, watches: bool) -> bool:
    """Whether the guard may lower the scale: in one process alone, or on ranks that are all watched.

    Ranks find that out together, so each of them asks, also one that ``watches`` nothing.
    """
    if scale.kind != "dynamic" or ranks.num == 1:
        return scale.kind == "dynamic" and _rank()[1] == 1
    return bool(ranks.lowest(torch.full((), float(watches), device=scale.value.device)).item())


def _lost(report: Callable[[str], None], line: str) -> None:
    """The log's thread could not write: told here, and by rank 0."""
    logger.warning(line)
    report(line)


def _text(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "stopped by Ctrl-C"
    return f"{type(error).__name__}: {error}".rstrip(": ")


def _not_finite(parameters: Sequence[torch.Tensor], norms: Sequence[float]) -> list[torch.Tensor]:
    return [parameter for parameter, norm in zip(parameters, norms, strict=True) if not math.isfinite(norm)]


def _num_elements(parameters: Sequence[torch.Tensor]) -> int:
    return sum(parameter.numel() for parameter in parameters)


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
