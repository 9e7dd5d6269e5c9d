"""Slow plain twin of how ranks that replay alone and together move one loss scale: numbers in, numbers out.

It has no collectives. What a rank may know when it decides is written here as what it is given.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


class Stopped(Exception):
    """The scale is exhausted."""


@dataclass
class Rules:
    init: float = 2.0**8
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 5
    floor: float = 1.0
    ceiling: float = 2.0**12

    def policy(self, start="fp32"):
        names = ("init", "growth", "backoff", "interval", "floor", "ceiling")
        return f"{start} scale=dynamic " + " ".join(f"scale.{name}={getattr(self, name):g}" for name in names)

    def lower(self, scale):
        return max(scale * self.backoff, self.floor)


@dataclass
class Rank:
    """What one rank has of its own until the ranks agree."""

    scale: float
    num_clean: int
    is_left: bool = False
    is_exhausted: bool = False
    num_replays: int = 0


class RankScales:
    """A run of ``num`` ranks.

    alone: whether a micro-batch of this number in its window involves its own rank only.

    A plan says of each rank and micro-batch at which scales its gradient is finite: up to a limit, 0 for none of them,
    and NaN where the loss itself is not finite.
    """

    def __init__(self, num: int, alone: Sequence[bool], rules: Rules) -> None:
        self.num, self.alone, self.rules = num, alone, rules
        self.scale, self.num_clean, self.had_hopeless = rules.init, 0, False

    def window(self, plan: Sequence[Sequence[float]]) -> tuple[bool, float, list[int]]:
        """(applied, the scale it was judged at, replays by rank); raises Stopped where the run stops."""
        ranks = [Rank(self.scale, self.num_clean) for _ in range(self.num)]
        has_agreed, is_lost, has_nan = not self.alone[0], False, False
        for number, is_alone in enumerate(self.alone):
            limits = [plan[rank][number] for rank in range(self.num)]
            if is_alone:
                for rank, limit in zip(ranks, limits, strict=True):
                    self._alone(rank, limit)
                continue
            if not has_agreed:
                self._agree(ranks)
                has_agreed = True
            has_nan |= any(math.isnan(limit) for limit in limits)
            is_lost |= self._together(ranks, limits, has_nan)
        if not has_agreed:
            self._agree(ranks)
            self.had_hopeless &= ranks[0].is_left
        return self._end(ranks, is_lost or ranks[0].is_left)

    def _alone(self, rank: Rank, limit: float) -> None:
        before = rank.scale
        while not rank.scale <= limit and not rank.is_left:
            if rank.scale <= self.rules.floor or math.isnan(limit):
                # It may not decide what becomes of the run, and goes back to where it was.
                rank.is_left, rank.is_exhausted = True, rank.scale <= self.rules.floor
                rank.scale = before
                return
            rank.scale, rank.num_clean = self.rules.lower(rank.scale), 0
            rank.num_replays += 1

    def _agree(self, ranks: list[Rank]) -> None:
        self.scale = min(rank.scale for rank in ranks)
        self.num_clean = min(rank.num_clean for rank in ranks)
        for rank in ranks:
            rank.is_left = any(each.is_left for each in ranks)
            rank.is_exhausted = any(each.is_exhausted for each in ranks)

    def _together(self, ranks: list[Rank], limits: list[float], has_nan: bool) -> bool:
        """Whether the window is lost by it."""
        if ranks[0].is_left:
            return True
        before, limit = self.scale, min(0.0 if math.isnan(limit) else limit for limit in limits)
        while self.scale > limit:
            if self.scale <= self.rules.floor:
                if before == self.scale or self.had_hopeless:
                    raise Stopped
                self.had_hopeless, self.scale = True, before
                return True
            if has_nan:
                return True
            self.scale, self.num_clean = self.rules.lower(self.scale), 0
            for rank in ranks:
                rank.num_replays += 1
        self.had_hopeless = False
        return False

    def _end(self, ranks: list[Rank], is_lost: bool) -> tuple[bool, float, list[int]]:
        judged_at = self.scale
        may_stop = ranks[0].is_left and (
            self.scale <= self.rules.floor or (ranks[0].is_exhausted and self.had_hopeless)
        )
        self.had_hopeless |= ranks[0].is_exhausted
        if is_lost:
            self.scale, self.num_clean = self.rules.lower(self.scale), 0
        else:
            self.num_clean += 1
            if self.num_clean == self.rules.interval:
                self.scale, self.num_clean = min(self.scale * self.rules.growth, self.rules.ceiling), 0
        if may_stop:
            raise Stopped
        return not is_lost, judged_at, [rank.num_replays for rank in ranks]
