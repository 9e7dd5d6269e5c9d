"""The numbers of a window that some ranks have begun, for another number of ranks, or another engine.

Gradients, sums of losses and counts of the step are means over its ranks. Of N ranks that held g_1 ... g_N, each of the
N' that go on holds (g_1 + ... + g_N) / N', so that the sum over all ranks is the one that was saved. A token that the
window still takes in then weighs what one does that was in it before.

A rank that replays alone may have a loss scale of its own. They come together as at a window's end: at the lowest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def factors(states: Sequence[dict[str, Any]], num_ranks: int) -> list[float]:
    """What the gradients of each rank are multiplied by before they are added up: powers of two over ``num_ranks``."""
    scales = [state["scale"]["value"] for state in states]
    return [min(scales) / scale / num_ranks for scale in scales]


def regrouped(states: Sequence[dict[str, Any]], num_ranks: int) -> dict[str, Any]:
    """The state of each of ``num_ranks`` steppers that go on where steppers with ``states`` have stopped."""
    scales = [state["scale"] for state in states]
    lowest = {key: min(scale[key] for scale in scales) for key in ("value", "num_clean") if key in scales[0]}
    windows = [state["window"] for state in states]
    shares = [window["nonfinite_share"] for window in windows if window["nonfinite_share"] is not None]
    window = {
        **windows[0],
        "num_micro_batches": max(window["num_micro_batches"] for window in windows),
        "loss_sum": _share([window["loss_sum"] for window in windows], num_ranks),
        "count": _share([window["count"] for window in windows], num_ranks),
        "num_replays": max(window["num_replays"] for window in windows),
        "nonfinite_share": max(shares, default=None),
        **{key: any(window[key] for window in windows) for key in ("is_left", "is_exhausted")},
    }
    had_hopeless = any(state["had_hopeless"] for state in states)
    return {**states[0], "scale": {**scales[0], **lowest}, "had_hopeless": had_hopeless, "window": window}


def _share(values: Sequence[Any], num_ranks: int) -> Any:
    """The sum of all by ``num_ranks``, in the format that they have; None is nothing."""
    given = [value for value in values if value is not None]
    if not given:
        return None
    first = next((value for value in given if isinstance(value, torch.Tensor)), None)
    share = sum(float(value) for value in given) / num_ranks
    return share if first is None else torch.as_tensor(share, dtype=first.dtype)
