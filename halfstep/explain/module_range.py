"""The values of a captured micro-batch at the borders of modules, and what the formats of a policy lose of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch.optim import Optimizer

from halfstep.diagnosis.capture import Capture, Outcome
from halfstep.explain.held_formats import HeldFormats
from halfstep.explain.histogram import Histogram, Loss, best_scale
from halfstep.explain.trial_step import Update, trial_updates
from halfstep.formats import FORMATS, SIXTEEN_BIT, Format
from halfstep.policy import Policy
from halfstep.record import ModuleRecorder, Values

ACTIVATION, GRADIENT, WEIGHT_GRADIENT, UPDATE = "activation", "gradient", "weight gradient", "update"
KINDS = (ACTIVATION, GRADIENT, WEIGHT_GRADIENT, UPDATE)
SCALED = (GRADIENT, WEIGHT_GRADIENT)
FLUSHED_PCT, LOST_SUM_PCT = 1.0, 0.1
"""The share of the values, and of their sum, above which a flush is one that matters."""


@dataclass(frozen=True)
class ModuleRange:
    """The values of one kind at one module, over all its calls or all its parameters.

    module:     its qualified name, empty for the model itself. kind: one of ``KINDS``.
    format:     what the values are laid against: the 16-bit format that they meet when the policy runs, else the
                policy's for this module. meets: whether they meet it; where not, the loss is what it would be.
    scale:      the loss scale that they are multiplied by; 1.0 for activations and updates.
    lost:       of updates, how many would leave their weight where it is if it were kept in ``format``.
    best_scale: for the module's gradients together; None for what is not scaled, and where all are zero.
    """

    module: str
    kind: str
    format: str
    meets: bool
    scale: float
    histogram: Histogram
    lost: int | None = None
    best_scale: float | None = None

    @cached_property
    def loss(self) -> Loss:
        """At the policy's scale."""
        return self._loss_at(self.scale)

    @cached_property
    def unscaled(self) -> Loss:
        return self._loss_at(1.0)

    def _loss_at(self, scale: float) -> Loss:
        loss = self.histogram.loss(FORMATS[self.format], scale)
        return loss if self.lost is None else replace(loss, flushed=self.lost)

    @property
    def zero_pct(self) -> float:
        """Share of the non-zero values that the format rounds to zero; of updates, that move no weight."""
        return self.histogram.share(self.loss.flushed)

    @property
    def overflows(self) -> bool:
        """Whether a value becomes inf when the policy runs."""
        return self.meets and self.loss.overflows

    @property
    def flushes(self) -> bool:
        """Whether a share that matters is flushed to zero when the policy runs."""
        return self.meets and self.zero_pct > FLUSHED_PCT and self.loss.lost_sum_pct > LOST_SUM_PCT

    def to_dict(self) -> dict[str, Any]:
        return {
            "module": self.module,
            "kind": self.kind,
            "format": self.format,
            "meets": self.meets,
            **self._shares(self.loss),
            "exponents": {str(e): n for e, n in self.histogram.exponents.items()},
            "best_scale": self.best_scale,
            "overflows": self.overflows,
            "lost_sum_pct": self.loss.lost_sum_pct,
            "unscaled": self._shares(self.unscaled),
            "largest": self.histogram.largest,
            "num_nonzero": self.histogram.num_nonzero,
            "num_zeros": self.histogram.num_zeros,
            "num_nonfinite": self.histogram.num_nonfinite,
        }

    def _shares(self, loss: Loss) -> dict[str, Any]:
        return {
            "zero_pct": self.histogram.share(loss.flushed),
            "subnormal_pct": self.histogram.share(loss.subnormal),
            "headroom_bits": loss.headroom_bits,
        }


class Measured:
    """One run of a captured micro-batch in fp32, recorded module by module, and one trial step from its gradient.

    A model that runs under autocast alone, since its own code casts to 16 bit, is recorded in the policy of the capture
    instead; what that run flushed is not seen.

    is_finite:  whether the fp32 run was; None if there was none. why_not: what it failed with, else empty.
    no_updates: why the optimizer's step could not be tried, else empty.
    """

    def __init__(self, capture: Capture, optimizer: Optimizer | None, max_norm: float | None) -> None:
        self.capture = capture
        self.is_finite: bool | None = None
        self.why_not, self._scale = "", 1.0
        recorder = ModuleRecorder(capture.model)
        try:
            outcome = capture.run(Policy("fp32"), self._scale, under=[recorder])
            self.is_finite = outcome.is_finite
        except RuntimeError as error:
            self.why_not, self._scale = str(error).partition("\n")[0], capture.scale
            recorder = ModuleRecorder(capture.model)
            outcome = capture.run(under=[recorder])
        self._values: dict[tuple[str, str], list[Values]] = {}
        for found in recorder.read().modules:
            self._values.setdefault((found.module, found.kind), []).append(found.values)
        self._updates: dict[str, Update] = {}
        self.no_updates = "there is no optimizer"
        if optimizer is not None:
            self._updates, self.no_updates = trial_updates(capture.model, optimizer, outcome, max_norm)

    def rows(self, policy: Policy, scale: float, held: HeldFormats | None) -> tuple[ModuleRange, ...]:
        """All of it against the formats of ``policy``, in the model's order."""
        rows: list[ModuleRange] = []
        for name, module in self.capture.model.named_modules():
            own = policy.format_of(name)
            gradients = [row for kind in SCALED if (row := self._row(name, kind, own, scale, held))]
            best = best_scale([(row.histogram, FORMATS[row.format]) for row in meeting(gradients)])
            activations = [row] if (row := self._row(name, ACTIVATION, own, 1.0, held)) else []
            rows += [*activations, *(replace(row, best_scale=best) for row in gradients)]
            prefix = f"{name}." if name else ""
            names = [prefix + parameter for parameter, _ in module.named_parameters(recurse=False)]
            if updates := [self._updates[n] for n in names if n in self._updates]:
                histogram = Histogram.of(update.values for update in updates)
                lost = sum(update.lost.get(own, 0) for update in updates)
                rows.append(ModuleRange(name, UPDATE, own, False, 1.0, histogram, lost))
        return tuple(rows)

    def _row(self, name: str, kind: str, own: str, scale: float, held: HeldFormats | None) -> ModuleRange | None:
        values = self._values.get((name, kind))
        if not values:
            return None
        low = held.of(name, kind) if held else None
        histogram = self._histogram(values, kind)
        return ModuleRange(name, kind, low or own, low is not None, scale, histogram)

    def _histogram(self, values: Iterable[Values], kind: str) -> Histogram:
        distinct = {id(value.row): value for value in values}  # of one tensor, wherever it is seen, it is one object
        return Histogram.of(distinct.values(), self._scale if kind in SCALED else 1.0)

    def total(self, rows: Iterable[ModuleRange], kinds: Iterable[str]) -> Histogram:
        """The values of these kinds together, each tensor once.

        A container gives what its last part gave, and a tied weight has several owners.
        """
        used = [row for row in rows if row.kind in kinds]
        return self._histogram((v for r in used for v in self._values[r.module, r.kind]), next(iter(kinds)))

    def gradients(self, rows: Iterable[ModuleRange]) -> list[tuple[Histogram, Format]]:
        """All gradients that a loss scale has to suit, by format."""
        used = meeting(row for row in rows if row.kind in SCALED)
        names = dict.fromkeys(row.format for row in used)
        return [(self.total((r for r in used if r.format == name), SCALED), FORMATS[name]) for name in names]


def meeting(rows: Iterable[ModuleRange]) -> list[ModuleRange]:
    """Those whose values meet a 16-bit format when the policy runs; all where none does."""
    rows = list(rows)
    return [row for row in rows if row.meets] or rows


def watch(capture: Capture, policy: Policy, scale: float) -> tuple[HeldFormats | None, Outcome]:
    """Run ``policy`` at ``scale`` as it is: the formats that its values meet, and what comes out."""
    if not policy.formats & SIXTEEN_BIT:
        return None, capture.run(policy, scale)
    held = HeldFormats(capture.model)
    return held, capture.run(policy, scale, under=[held])
