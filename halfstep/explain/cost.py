"""What keeping parts of a model in fp32 costs: time and memory of a step against other policies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from halfstep.compare.run import live_mib, run_trial
from halfstep.explain.probe import changed
from halfstep.policy import LossScale, Policy
from halfstep.source import Source

NUM_ROUNDS, NUM_WINDOWS = 5, 8


def time_ratios(source: Source, policy: Policy, others: Sequence[Policy], device: str) -> list[float | None]:
    """How many times as long a window takes under ``policy`` as under each of ``others``, None for one that raises.

    The policies take turns, so that a slow phase of the machine meets all of them; the median of the rounds counts.
    They are timed without a loss scale: one that fails would train the same window again, or stop.
    """
    bare = changed(source, lambda workload: replace(workload, evaluate=None))
    rounds = [[_speed(bare, p, device) for p in (policy, *others)] for _ in range(NUM_ROUNDS)]
    ratios = [[other / own for own, *theirs in rounds if own and (other := theirs[i])] for i in range(len(others))]
    return [median(column) if column else None for column in ratios]


def memory_ratios(source: Source, policy: Policy, others: Sequence[Policy], device: str) -> list[float | None]:
    """How many times as many bytes tensors hold at the peak of a step under ``policy`` as under each of ``others``."""
    own, *theirs = [_memory(source, p, device) for p in (policy, *others)]
    return [own / other if own and other else None for other in theirs]


def _speed(source: Source, policy: Policy, device: str) -> float | None:
    try:
        return run_trial(source, str(_unscaled(policy)), 0, NUM_WINDOWS, device).samples_per_s
    except Exception:  # a loss that refuses what is not finite
        return None


def _memory(source: Source, policy: Policy, device: str) -> float | None:
    try:
        return live_mib(source, str(_unscaled(policy)), device)
    except Exception:
        return None


def _unscaled(policy: Policy) -> Policy:
    return replace(policy, scale=LossScale(), on_overflow="skip")
