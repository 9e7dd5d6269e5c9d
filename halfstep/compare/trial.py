"""One training run of a comparison: one policy, one seed, and everything that the report needs of it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

TAIL = 0.1
"""Share of the losses, from the end, whose mean is the final loss of a workload that has no evaluation."""


@dataclass(frozen=True)
class Trial:
    """One policy trained from one seed.

    policy:    the text asked for. effective: the text of what really ran. why: how it came to that, and through what.
    steps:     windows asked for; a trial that stopped has fewer losses.
    losses:    the true loss of every window that ran, in order; NaN and inf stay as they are.
    scales, applied, replays: of the same windows: the loss scale, whether the weights moved, how often it was replayed.
    evaluated: loss on held-out data after the last step, None for a workload that cannot evaluate.
    stopped:   what ended the trial before its last step, such as a loss scale at its floor; None if nothing did.
    peak_memory_mib, samples_per_s: as measured, None where the device cannot tell.
    """

    policy: str
    effective: str
    seed: int
    steps: int
    losses: tuple[float, ...]
    scales: tuple[float, ...]
    applied: tuple[bool, ...]
    replays: tuple[int, ...]
    evaluated: float | None = None
    stopped: str | None = None
    peak_memory_mib: float | None = None
    samples_per_s: float | None = None
    why: str = "as asked for"

    def __post_init__(self) -> None:
        lengths = {len(self.losses), len(self.scales), len(self.applied), len(self.replays)}
        assert len(lengths) == 1, f"one loss, scale, applied and replays for each window, not {sorted(lengths)}"
        assert len(self.losses) <= self.steps, f"{len(self.losses)} losses of {self.steps} steps"

    @property
    def final_loss(self) -> float:
        """The measure that is judged, lower is better.

        The evaluated loss if there is one, else the mean of the last tenth of the losses (at least one). NaN for a
        trial that stopped early: it has no final loss, and a mean over fewer steps would not be comparable.
        """
        if self.stopped is not None or not self.losses:
            return math.nan
        if self.evaluated is not None:
            return self.evaluated
        tail = max(1, round(TAIL * len(self.losses)))
        return fmean(self.losses[-tail:])

    @property
    def diverged(self) -> str | None:
        """Why this trial has no finite final loss; None if it has one."""
        if self.stopped is not None:
            return f"stopped after {len(self.losses)} of {self.steps} steps: {self.stopped}"
        if math.isfinite(self.final_loss):
            return None
        first = next((step for step, loss in enumerate(self.losses, 1) if not math.isfinite(loss)), None)
        since = f", the first non-finite loss came at step {first} of {self.steps}" if first else ""
        return f"the final loss is {self.final_loss}{since}"

    @property
    def steps_applied(self) -> int:
        return sum(self.applied)

    @property
    def steps_skipped(self) -> int:
        return len(self.applied) - sum(self.applied)

    @property
    def num_replays(self) -> int:
        return sum(self.replays)


def together(trials: Sequence[Trial]) -> Trial:
    """One trial of several ranks as each of them has it, by rank.

    Losses, scales and what was applied are those of all ranks already. Evaluations are averaged, memory is the largest
    of a rank, and samples per second add up.
    """
    first = trials[0]
    evaluated = [trial.evaluated for trial in trials if trial.evaluated is not None]
    peaks = [trial.peak_memory_mib for trial in trials if trial.peak_memory_mib is not None]
    rates = [trial.samples_per_s for trial in trials if trial.samples_per_s is not None]
    return replace(
        first,
        evaluated=fmean(evaluated) if len(evaluated) == len(trials) else None,
        peak_memory_mib=max(peaks, default=None),
        samples_per_s=sum(rates) if rates else None,
    )


def by_policy(trials: Iterable[Trial]) -> dict[str, list[Trial]]:
    """The trials of each policy, by seed, policies in the order in which they first appear.

    A policy that was asked for twice has each seed twice; its second set is called ``"fp32 (2)"``. That is how FP32 is
    compared with itself.
    """
    arms: dict[str, list[Trial]] = {}
    seen: dict[tuple[str, int], int] = {}
    for trial in trials:
        turn = seen[trial.policy, trial.seed] = seen.get((trial.policy, trial.seed), 0) + 1
        arms.setdefault(trial.policy if turn == 1 else f"{trial.policy} ({turn})", []).append(trial)
    return {name: sorted(arm, key=lambda trial: trial.seed) for name, arm in arms.items()}
