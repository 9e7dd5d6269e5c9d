"""Short training runs that are judged against fp32 from the same seed: does a policy work?

A run fails if its loss scale is exhausted, if a loss is not finite (it ends there), or if its final loss is above
fp32's by more than the margin. The margin is the one of ``halfstep compare``, the lower 95 % bound of the spread of
fp32's own final losses over the seeds, or a share of their mean that the caller gives. One pair of runs has to bear
it, so one that is learned is never below three times the gap that a changed last bit makes in fp32: the larger gap of
two twins, whose parameters have their first weight moved up or down by one bit.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import torch

from halfstep.compare.run import run_trial
from halfstep.compare.trial import Trial
from halfstep.compare.verdict import sd_lower_bound
from halfstep.errors import HalfstepError
from halfstep.explain.search import Stopped
from halfstep.policy import Policy
from halfstep.source import Source
from halfstep.workload import Workload

Progress = Callable[[str, int], None]
"""Called after each window with what is running, and how many windows of it have ended."""

TWIN_FACTOR = 3.0
"""How far a margin stands above the gap of twins. Where a changed bit spreads runs like a normal deviate, a policy that
only adds noise of its own fails one time in thirty."""


@dataclass(frozen=True)
class Probe:
    """One training run of a policy from one seed.

    why:   what is wrong with it, None if nothing is. step: the first window with a loss that is not finite, if any.
    trial: the run, None where it was cut short.
    """

    policy: str
    seed: int
    why: str | None
    step: int | None = None
    trial: Trial | None = None

    @property
    def works(self) -> bool:
        return self.why is None


class Bench:
    """Runs of ``source`` for ``steps`` windows on ``device``: fp32 from every seed, and policies against it.

    max_probes, minutes: when they are used up, a run is not begun, or not ended, and :class:`Stopped` is raised. Runs
    of fp32, and those that only confirm, are no probes.
    """

    def __init__(
        self,
        source: Source,
        steps: int,
        seeds: int,
        device: str,
        *,
        margin_pct: float | None = None,
        max_probes: int | None = None,
        minutes: float | None = None,
        progress: Progress = lambda what, num_windows: None,
    ) -> None:
        self.source, self.steps, self.device = source, steps, device
        self._max_probes, self.progress = max_probes, progress
        self._minutes = minutes
        self._deadline = math.inf if minutes is None else time.monotonic() + 60 * minutes
        self.known: dict[tuple[str, int], Probe] = {}
        self.num_probes = 0
        self.references = [self._run(source, "fp32", seed, "fp32") for seed in range(seeds)]
        finite = [trial.final_loss for trial in self.references if trial.diverged is None]
        self.margin, self.margin_from = 0.0, "no run of fp32 ended"
        if finite and margin_pct is not None:
            self.margin, self.margin_from = abs(fmean(finite)) * margin_pct / 100, f"{margin_pct:g} % of fp32's mean"
        elif finite:
            self._learn_margin(finite)

    @property
    def seeds(self) -> list[int]:
        """Those from which fp32 trains: what another policy does from the others says nothing about it."""
        return [trial.seed for trial in self.references if trial.diverged is None]

    def __call__(self, policy: Policy, seed: int, what: str, confirms: bool = False) -> Probe:
        """Train ``policy`` from ``seed`` and judge it, once; ``what`` tells the reader of the progress which it is."""
        key = (str(policy), seed)
        if key not in self.known:
            if not confirms:
                if self._max_probes is not None and self.num_probes >= self._max_probes:
                    raise Stopped(f"after {self.num_probes} probes, as many as it was given")
                what = f"probe {self.num_probes + 1}: {what}"
            self.known[key] = self._probe(policy, seed, what)
            self.num_probes += not confirms
        return self.known[key]

    def _probe(self, policy: Policy, seed: int, what: str) -> Probe:
        text, reference = str(policy), self.references[seed]
        # Where fp32 has a loss that is not finite and goes on, a policy may as well.
        source = _watched(self.source) if all(map(math.isfinite, reference.losses)) else self.source
        try:
            trial = self._run(source, text, seed, what)
        except Stopped:
            raise
        except _NotFinite as error:
            step = self._num_windows + 1
            return Probe(text, seed, f"the loss is {error.value:g} at step {step}", step)
        except Exception as error:  # fp32 has run, so that it is the policy's doing
            step = self._num_windows + 1
            return Probe(text, seed, f"{type(error).__name__} at step {step}: {error}", step)
        if trial.stopped:
            step = len(trial.losses) + 1
            return Probe(text, seed, f"the loss scale is exhausted at step {step}", step, trial)
        if trial.diverged:
            return Probe(text, seed, trial.diverged, None, trial)
        gap = trial.final_loss - reference.final_loss
        if gap > self.margin:
            limit = f"more than the margin {self.margin:.2g}"
            why = f"the final loss {trial.final_loss:.4g} is {gap:.2g} above fp32's, {limit}"
            return Probe(text, seed, why, None, trial)
        return Probe(text, seed, None, None, trial)

    def _run(self, source: Source, policy: str, seed: int, what: str) -> Trial:
        self._num_windows = 0

        def after_window(*_: Any) -> None:
            self._num_windows += 1
            self.progress(what, self._num_windows)
            self._check_time()

        self._check_time()
        return run_trial(source, policy, seed, self.steps, self.device, progress=after_window)

    def _check_time(self) -> None:
        if time.monotonic() > self._deadline:
            raise Stopped(f"after {self._minutes:g} minutes, as many as it was given")

    def _learn_margin(self, finite: list[float]) -> None:
        if len(finite) < 2:
            raise HalfstepError(
                f"seeds={len(self.references)}",
                "the margin is learned from the spread of fp32 over the seeds that train, which takes two",
                "Use --seeds 3 or more, or give --margin.",
            )
        self.margin, self.margin_from = sd_lower_bound(finite), "the lower 95 % bound of fp32's own sd over the seeds"
        seed = self.seeds[0]
        gaps = [
            self._run(_twin(self.source, towards), "fp32", seed, "fp32 with changed bits").final_loss
            - self.references[seed].final_loss
            for towards in (math.inf, -math.inf)
        ]
        noise = TWIN_FACTOR * max(map(abs, gaps))
        if noise > self.margin:
            self.margin, self.margin_from = noise, "three times the gap that changed bits make in fp32"


class _NotFinite(Exception):
    """A loss that is not finite ends a run that is watched."""

    def __init__(self, value: float) -> None:
        self.value = value


def _watched(source: Source) -> Source:
    """The same workload, whose run ends at the first loss that is not finite."""

    def watch(workload: Workload) -> Workload:
        def loss(model: torch.nn.Module, batch: Any) -> Any:
            result = workload.loss(model, batch)
            value = result[0] if isinstance(result, tuple) else result
            if not torch.isfinite(value).all():
                raise _NotFinite(float(value.detach().sum()))
            return result

        return replace(workload, loss=loss)

    return changed(source, watch)


def _twin(source: Source, towards: float) -> Source:
    """The same workload with the first weight of each trainable parameter moved by one bit."""

    def nudge(workload: Workload) -> Workload:
        with torch.no_grad():
            for parameter in workload.model.parameters():
                if parameter.requires_grad and parameter.numel():
                    first = parameter[(0,) * parameter.dim()]
                    first.copy_(torch.nextafter(first, torch.full_like(first, towards)))
        return workload

    return changed(source, nudge)


def changed(source: Source, change: Callable[[Workload], Workload]) -> Source:
    """A source whose workloads are those of ``source`` after ``change``."""
    return Source(source.spec, lambda seed: change(source(seed)))
