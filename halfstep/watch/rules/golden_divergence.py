"""A loss that leaves the band of golden runs, upward."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping

from halfstep.watch.golden import Band
from halfstep.watch.rule import Finding, Rule
from halfstep.watch.window import SIZE, Block, Window

NUM_OUT = 2
"""Blocks in a row that have to be above the band."""


def check(window: Window, limits: Mapping[str, float]) -> Finding | None:
    blocks, band = window.blocks, window.golden
    if band is None or len(blocks) < NUM_OUT or blocks[-1].last != window.last.step:
        return None
    first, last = blocks[-NUM_OUT], blocks[-1]
    if any(block.loss is None or block.loss <= _high(block, band) for block in blocks[-NUM_OUT:]):
        return None
    return Finding(
        f"the median loss is {last.loss:.4g}, where golden runs have {_high(last, band):.4g} at most: steps"
        f" {first.first} to {last.last} lie above their band",
        "Compare it with a golden run: halfstep watch draws both, halfstep diff names the operation where they part.",
    )


def _high(block: Block, band: Band) -> float:
    """The upper end of ``band`` over ``block``; inf where the band says nothing."""
    first, last = bisect_left(band.steps, block.first), bisect_left(band.steps, block.last)
    if last == len(band.steps) or band.steps[first] - SIZE >= block.first or band.steps[last] - SIZE >= block.last:
        return math.inf
    return max(band.high[first : last + 1])


RULE = Rule(
    name="golden-divergence",
    severity="warning",
    summary="The loss lies above the band of the golden runs.",
    why="""\
A golden run is one that went well: the same training in fp32, or last week's. `golden` names one or more of them in the
settings. Of each, every 100 steps give a median loss and its spread there (1.4826 x the median distance from the
median); its own band is the median give or take that spread, at least 1 % of the loss. The band is from the lowest to
the highest of the runs' own bands.

One run knows its own noise and nothing of another seed's. The median of 100 steps varies by about an eighth of the
spread, so the band leaves room for a seed whose level is off by most of one step's noise. Several runs of different
seeds say better where good runs lie: two runs that differ in one bit of one weight end as far apart as two seeds
(Summers and Dinneen, arXiv 2103.04514).

Two blocks in a row above the band are an alert; one may be chance. Below the band is none. Where the golden runs have
ended nothing is known, and nothing is said; after a resume within a block, the block is compared with both that it
overlaps.
""",
    check=check,
)
