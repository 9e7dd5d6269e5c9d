"""Train the same workload under several policies and seeds: same weights, same data, same order in every policy."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from halfstep.compare.memory import LiveBytes
from halfstep.compare.report import CompareReport, check_margin
from halfstep.compare.trial import Trial, together
from halfstep.errors import HalfstepError, ScaleExhausted
from halfstep.events import StepReport
from halfstep.hardware import detect
from halfstep.interruption import Interruption
from halfstep.loop import make_stepper, windows
from halfstep.policy import resolve
from halfstep.share import num_ranks, share
from halfstep.source import Source
from halfstep.stepper import Stepper
from halfstep.workload import Workload

WARM_UP = 0.1
"""Share of the windows, from the start, that throughput leaves out (at least one where there are two)."""

MEASURED_WINDOWS = 2
"""Windows over which the live bytes are followed; the second has the optimizer's states from its start."""

Progress = Callable[[str, int], None]
"""Called after each window with the policy's text and the seed."""


def compare(
    source: Source,
    policies: Sequence[str],
    steps: int,
    seeds: int,
    device: str | None = None,
    margin_pct: float | None = None,
    progress: Progress = lambda policy, seed: None,
) -> tuple[CompareReport, list[Trial]]:
    """Train every policy from every seed and judge each against the first policy.

    Seeds are 0 to ``seeds - 1``; each runs through all policies before the next, so that a slow phase of the machine
    meets all of them. Ctrl-C keeps the trials that have ended and marks the report; with none it is raised again.

    Where a process group of several ranks is open, all of them call it, train each trial together (see
    :func:`halfstep.share.share`) and get the same report.
    """
    for name, value in (("steps", steps), ("seeds", seeds)):
        if value < 1:
            raise HalfstepError(f"{name}={value}", "a comparison needs at least one", f"Use --{name} 1 or more.")
    check_margin(margin_pct)
    hardware = detect(device)
    if not policies:
        raise HalfstepError("no policies", "there is nothing to compare", "Name some, such as fp32,bf16,fp16.")
    for policy in policies:
        resolve(policy, hardware)
    trials: list[Trial] = []
    interrupted = False
    place = device or hardware.kind
    memory: dict[str, float] = {}
    with Interruption() as interruption:
        try:
            for seed in range(seeds):
                for policy in policies:
                    if hardware.kind != "cuda" and policy not in memory:
                        memory[policy] = live_mib(source, policy, place)
                    peak = memory.get(policy)
                    trials.append(run_trial(source, policy, seed, steps, place, peak, progress, interruption))
        except KeyboardInterrupt:
            if not trials:
                raise
            interrupted = True
    several = f"{num_ranks()} ranks, " if num_ranks() > 1 else ""
    report = CompareReport.from_trials(
        source.spec, f"{several}{hardware.name}", steps, seeds, trials, margin_pct=margin_pct, interrupted=interrupted
    )
    return report, trials


def run_trial(
    source: Source,
    policy: str,
    seed: int,
    steps: int,
    device: str,
    peak_memory_mib: float | None = None,
    progress: Progress = lambda policy, seed: None,
    interruption: Interruption | None = None,
) -> Trial:
    """Train one policy from one seed for ``steps`` windows. An exhausted loss scale ends the trial, and it says so."""
    is_cuda = device.startswith("cuda")
    with _deterministic() if is_cuda else contextlib.nullcontext():
        workload = share(source.under(policy)(seed), device)
        stepper = make_stepper(workload, policy, device)
        if is_cuda:
            torch.cuda.reset_peak_memory_stats(device)
        reports: list[StepReport] = []
        stopped = None
        warm_up = max(1, round(WARM_UP * steps)) if steps > 1 else 0
        samples, start = 0, time.perf_counter()
        try:
            for report, num in windows(workload, stepper, steps):
                reports.append(report)
                samples += num
                progress(policy, seed)
                if interruption is not None:
                    interruption.check(stepper)
                if len(reports) == warm_up:
                    if is_cuda:
                        torch.cuda.synchronize(device)
                    samples, start = 0, time.perf_counter()
        except ScaleExhausted as error:
            stopped = str(error)
        if is_cuda:
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - start
        evaluated = _evaluate(workload, stepper) if stopped is None else None
        if is_cuda:
            peak_memory_mib = torch.cuda.max_memory_allocated(device) / 2**20
    trial = Trial(
        policy=policy,
        effective=str(stepper.policy),
        seed=seed,
        steps=steps,
        losses=tuple(report.loss for report in reports),
        scales=tuple(report.scale for report in reports),
        applied=tuple(report.applied for report in reports),
        replays=tuple(report.num_replays for report in reports),
        evaluated=evaluated,
        stopped=stopped,
        peak_memory_mib=peak_memory_mib,
        samples_per_s=samples / seconds if samples else None,
        why=stepper.info.reason,
    )
    return together(stepper.ranks.gather(trial))


def live_mib(source: Source, policy: str, device: str) -> float:
    """Peak MiB of live tensors in a training step: weights, gradients, states, activations, casts."""
    workload, live = share(source.under(policy)(0), device), LiveBytes()
    with live:
        stepper = make_stepper(workload, policy, device)
        live.count([*stepper.model.parameters(), *stepper.model.buffers()])
        # A policy whose scale is exhausted at once has used its memory all the same.
        with contextlib.suppress(ScaleExhausted):
            for _ in windows(workload, stepper, MEASURED_WINDOWS):
                pass
    return live.peak / 2**20


def _evaluate(workload: Workload, stepper: Stepper) -> float | None:
    """The workload's own evaluation, in the formats of the policy."""
    if workload.evaluate is None:
        return None
    stepper.model.eval()
    with stepper.inference():
        return float(workload.evaluate(stepper.ranks.module))  # without DDP around it, which would wait for others


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    """Deterministic kernels where CUDA has them, so that the same call gives the same losses to the bit."""
    saved: tuple[Any, ...] = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cudnn.benchmark,
    )
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(saved[0], warn_only=saved[1])
        torch.backends.cudnn.benchmark = saved[2]
