"""Every operation of a pass against float64: on the inputs that it had, and against a step that is float64 throughout.

Both runs follow the operation as it comes, so that nothing is kept of it but the figures.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Self

import torch
from torch import nn

from halfstep.explain.error import scale_of, unit_of
from halfstep.explain.exact import NotExact, arguments, is_plain, is_random, run_magnitude
from halfstep.explain.replay import (
    ACCUMULATION,
    CANCELLATION,
    OVERFLOW,
    PRODUCTS,
    SHADOW,
    SUMS,
    UNDERFLOW,
    Call,
    Replay,
    Source,
    matched,
)
from halfstep.explain.shadow import Drift, History, Shadow
from halfstep.formats import FORMATS
from halfstep.policy import Policy
from halfstep.record.recorder import floats, is_uninitialised, op_name, written_to
from halfstep.record.walk import Site, Walk

AMPLIFIES = 16.0
"""An operation fails if the drift of its output is this many times that of its inputs (of 1 u at least)."""

BUILDS_UP = 4.0
"""The same for a line that adds up in turns, over all of them."""

_MANY_TURNS = 8
_ALSO = 8.0
"""Of the inputs, those whose drift is at least this part of the worst are named as sources."""
_VANISHED = 0.999
"""Relative drift of a result that is zero, where float64 has its largest."""
_MATTERS = 2.0**-8
"""Relative drift below which nothing is lost that 16 bit would keep."""
_NOTHING = 2.0**-36
"""A result that is this small beside its inputs is zero but for rounding, as the gradient of a bias before a norm."""

# The result of these is one of their inputs, element by element: it has lost what that one had lost before.
_SELECTS = frozenset(
    {"copy", "clone", "where", "masked_fill", "masked_select", "index", "index_select", "gather", "take", "embedding"}
    | {"scatter", "select_backward", "slice_backward", "index_put", "_index_put_impl", "cat", "stack", "max", "min"}
    | {"amax", "amin", "maximum", "minimum", "clamp", "clamp_min", "clamp_max", "relu", "threshold_backward"}
    | {"max_pool2d_with_indices", "constant_pad_nd", "repeat", "flip", "roll", "tril", "triu", "topk", "sort"}
    | {"native_dropout", "native_dropout_backward"}
)
# Each element of theirs is as right, relative to itself, as what it was made of: they lose it by flushing it to zero
# alone. Not so exp and its kind, where a rounded x costs |x| times as much. But x has lost that, and no way is better.
_KEEPS = frozenset(
    {"_to_copy", "mul", "div", "reciprocal", "sqrt", "rsqrt", "neg", "abs", "norm", "linalg_vector_norm"}
    | {"exp", "exp2", "expm1", "_softmax", "_log_softmax", "logsumexp"}
)
# Of what these take, a part cancels by construction: the mean that a norm removes, what all keys have in common. Their
# gradient may be nothing but the rest, which is no loss.
_PROJECTS = frozenset(
    {"_softmax_backward_data", "native_batch_norm_backward", "cudnn_batch_norm_backward", "miopen_batch_norm_backward"}
    | {"native_layer_norm_backward", "native_group_norm_backward", "_fused_rms_norm_backward"}
    | {f"_scaled_dot_product_{kind}_backward" for kind in ("flash_attention_for_cpu", "flash_attention")}
    | {f"_scaled_dot_product_{kind}_backward" for kind in ("efficient_attention", "cudnn_attention")}
)

Key = tuple[str | None, str, str, str | None, int | None]
"""Module, operation, phase, file and line."""


class Auditor:
    """Audits every operation while it is open: ``with Auditor(model, policy) as auditor: ...``, then ``calls``."""

    sees_views = False

    def __init__(self, model: nn.Module, policy: Policy) -> None:
        self._walk = Walk(model, self)
        self._unit = unit_of(FORMATS[policy.compute])
        self._shadow = Shadow(FORMATS[policy.compute])
        self._uses_tf32 = policy.uses_tf32
        self.calls: dict[Key, list[Call]] = {}

    def __enter__(self) -> Self:
        self._walk.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._walk.__exit__(*exception)

    def visit(self, site: Site, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name, named = op_name(func), arguments(func, args, kwargs)
        read = [tensor for tensor in floats(list(named.values())) if is_plain(tensor)]
        if is_uninitialised(name) or not read:
            return func(*args, **kwargs)
        written = [tensor for tensor in floats(written_to(func, args, kwargs)) if is_plain(tensor)]
        if is_random(func, args, kwargs):
            result = func(*args, **kwargs)
            self._restart(name, named, floats(result), written)
            return result
        key = (site.module, name.removesuffix("_"), site.phase, site.file, site.line)
        before, history, sources = self._inputs(read, key)
        replay = Replay(func, named, self._uses_tf32)
        shadows = self._run_shadow(func, named, written)
        result = func(*args, **kwargs)
        outputs = floats(result) or written
        if not outputs:
            return result
        call = replay.judge(outputs)
        call.sources = sources
        for output, exact in zip(outputs, matched(outputs, shadows), strict=True):
            self._shadow.store(output, exact)
        self._follow(call, func, named, read, outputs, before, history, is_forward=site.phase == "forward")
        if call.growth >= 2.0 or call.distance >= call.drift * self._unit / 2 or history.source is None:
            history = replace(history, source=(site, name))
        for output in outputs:
            self._shadow.note(output, history)
        self.calls.setdefault(key, []).append(call)
        return result

    def _restart(
        self, name: str, named: dict[str, Any], outputs: list[torch.Tensor], written: list[torch.Tensor]
    ) -> None:
        """After a random operation. Dropout alone keeps its shadow, with the mask that was drawn."""
        if name == "native_dropout":
            kept = outputs[0] != 0
            self._shadow.store(outputs[0], self._shadow.of(named["input"]) * kept / max(1.0 - named["p"], 1e-30))
            return
        for tensor in (*outputs, *written):
            self._shadow.store(tensor, None)

    def _inputs(self, read: list[torch.Tensor], maker: Key) -> tuple[Drift, History, tuple[Source, ...]]:
        """The worst drift among the inputs, the history of what ``maker`` makes of them, and where they drifted."""
        inputs = [(self._shadow.drift(tensor), self._shadow.history(tensor)) for tensor in read]
        inputs.sort(key=lambda pair: -pair[0].error)
        base, turns = 0.0, 0
        for drift, history in inputs:
            is_own = history is not None and history.maker == maker
            base = max(base, history.base if history is not None and is_own else drift.error)
            turns = max(turns, history.turns if history is not None and is_own else 0)
        drifts = [drift for drift, _ in inputs]
        error = drifts[0].error if drifts else 0.0
        lost, zero = any(d.lost for d in drifts), any(d.zero for d in drifts)
        before = Drift(error, lost, zero)
        found = [h.source for drift, h in inputs if h is not None and h.source and 0 < error <= _ALSO * drift.error]
        sources = tuple(dict.fromkeys((op, site.file, site.line) for site, op in found))
        return before, History(found[0] if found else None, maker, base, turns + 1), sources

    def _run_shadow(self, func: Any, named: dict[str, Any], written: list[torch.Tensor]) -> Any:
        try:
            result = self._shadow.run(func, named, written)
        except NotExact:
            return None
        return [self._shadow.of(tensor) for tensor in written] if written and not func._schema.returns else result

    def _follow(
        self,
        call: Call,
        func: Any,
        named: dict[str, Any],
        read: list[torch.Tensor],
        outputs: list[torch.Tensor],
        before: Drift,
        history: History,
        is_forward: bool,
    ) -> None:
        """Add to ``call`` what the step in float64 says."""
        name = op_name(func).removesuffix("_")
        if name == "_log_softmax_backward_data":  # it takes exp of the log probabilities
            size = scale_of(self._shadow.of(named["output"]))
            before = replace(before, error=before.error * max(size, 1.0))
        drifts = [self._shadow.drift(output) for output in outputs]
        worst = max(drifts, key=lambda drift: drift.error)
        vanishes = name in _KEEPS and worst.zero and worst.error * self._unit >= _VANISHED
        loses = name not in _SELECTS | _PROJECTS and self._grows(worst, before) and (vanishes or name not in _KEEPS)
        if loses and name in PRODUCTS | SUMS:
            # A sum of many terms cancels by chance, and what it is in the end may be zero by construction, as the
            # gradients of a softmax are in sum. In backward that cannot be told from a loss.
            loses = is_forward and not func._schema.is_mutable
            scales = self._chance(func, named, outputs) if loses else [0.0] * len(outputs)
            worst = max(map(self._shadow.drift, outputs, scales), key=lambda drift: drift.error)
            loses = loses and self._grows(worst, before)
        loses = loses and not self._is_nothing(worst, read)
        base = max(history.base, 1.0)
        call.drift, call.growth = worst.error, worst.error / max(before.error, 1.0)
        if call.kind is not None:
            return
        if any(drift.lost for drift in drifts) and not before.lost:
            call.kind = UNDERFLOW if before.zero else OVERFLOW
            call.is_mask = not any(drift.lost_up for drift in drifts)
            call.error, call.unit, call.limit = math.inf, SHADOW, AMPLIFIES
            call.note = f"{max(d.missed for d in drifts):.3g} in float64"
        elif loses:
            call.kind = UNDERFLOW if vanishes else CANCELLATION
            call.error, call.unit, call.limit = worst.error, SHADOW, AMPLIFIES * max(before.error, 1.0)
        elif history.turns >= _MANY_TURNS and worst.error >= BUILDS_UP * base and worst.error * self._unit >= _MATTERS:
            call.kind = ACCUMULATION
            call.error, call.unit, call.limit = worst.error, SHADOW, BUILDS_UP * base
            call.growth = worst.error / base
            call.note = f"its rounding builds up over {history.turns} turns"

    def _grows(self, drift: Drift, before: Drift) -> bool:
        return drift.error * self._unit >= _MATTERS and drift.error >= AMPLIFIES * max(before.error, 1.0)

    def _is_nothing(self, drift: Drift, read: list[torch.Tensor]) -> bool:
        return drift.scale < _NOTHING * max(scale_of(self._shadow.of(tensor)) for tensor in read)

    def _chance(self, func: Any, named: dict[str, Any], outputs: list[torch.Tensor]) -> list[float]:
        """Of each output the size that its n terms would have if their signs were random: sqrt(n) times theirs."""
        try:
            sizes = matched(outputs, run_magnitude(func, named, self._shadow.of))
            counts = matched(outputs, run_magnitude(func, named, lambda t: torch.ones_like(t, dtype=torch.float64)))
        except NotExact:
            return [0.0] * len(outputs)
        if op_name(func) == "mean":  # of ones it is 1
            counts = [
                None if s is None else torch.full_like(s, named["self"].numel() / max(s.numel(), 1)) for s in sizes
            ]
        pairs = zip(sizes, counts, strict=True)
        return [0.0 if s is None or n is None else scale_of(s / n.clamp(min=1.0).sqrt()) for s, n in pairs]
