"""What a training job did, and what the precision did in it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from halfstep.report import Cell, Report, Sheet, Table, count_text, json_number, number


@dataclass(frozen=True)
class Precision:
    """What the steps of a run were.

    num_steps, num_applied: optimizer steps, and those that moved the weights.
    num_replays:   micro-batches that ran again at a lower scale.
    skipped:       number of a step that was not applied, to the reason; the first few.
    scale_first, scale_last: loss scales, 1.0 without one.
    promoted:      modules that went on in fp32.
    num_alerts:    of the guard.
    """

    num_steps: int
    num_applied: int
    num_replays: int
    skipped: Mapping[int, str]
    scale_first: float
    scale_last: float
    promoted: tuple[str, ...]
    num_alerts: int


@dataclass(frozen=True)
class TrainReport(Report):
    """task, model, data: as asked for. output: folder with the log, the checkpoints and the trained model.

    requested, effective, reason: the policy. device: its name.
    num_trained:  parameters that train, of num_parameters.
    loss_first, loss_last: true losses, each the mean of a tenth of the run; None where no step was applied.
    evaluation:   loss on what was held out, None where nothing was.
    seconds:      of training alone. stopped_at: the step after which Ctrl-C or SIGTERM ended it, None for a whole run.
    notes:        what the user should know besides.
    """

    task: str
    model: str
    data: str
    output: str
    requested: str
    effective: str
    reason: str
    device: str
    num_parameters: int
    num_trained: int
    precision: Precision
    loss_first: float | None
    loss_last: float | None
    evaluation: float | None
    seconds: float
    stopped_at: int | None
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """As JSON takes it: what is not finite is a text."""
        values = {name: json_number(value) for name, value in asdict(self).items()}
        values["precision"]["skipped"] = {str(step): why for step, why in self.precision.skipped.items()}
        return values

    @property
    def found(self) -> bool:
        """Whether the run is not the one that was asked for: stopped, lost, or with more steps skipped than applied."""
        precision = self.precision
        is_lost = self.evaluation is not None and not math.isfinite(self.evaluation)
        return self.stopped_at is not None or is_lost or 2 * precision.num_applied < precision.num_steps

    def sheet(self) -> Sheet:
        precision = self.precision
        num_skipped = precision.num_steps - precision.num_applied
        applied = f"{precision.num_applied} of {precision.num_steps}"
        loss = (
            f"loss {number(self.loss_first)} to {number(self.loss_last)}" if precision.num_steps else "no step was left"
        )
        ended = "" if self.stopped_at is None else f", stopped after step {self.stopped_at}"
        asked = self.effective if self.effective == self.requested else f"{self.requested}, which is {self.effective}"
        rows: list[tuple[str | Cell, ...]] = [
            ("policy", f"{asked} ({self.reason})"),
            ("steps applied", Cell(applied, "open" if num_skipped else "good")),
            ("micro-batches that ran again", str(precision.num_replays)),
            ("loss scale", _scales(precision.scale_first, precision.scale_last)),
            ("modules promoted to fp32", ", ".join(precision.promoted) or "none"),
            ("alerts of the guard", Cell(str(precision.num_alerts), "open" if precision.num_alerts else "")),
        ]
        rows += [(f"step {step} skipped", why) for step, why in precision.skipped.items()]
        share = f"{self.num_trained:,} of {self.num_parameters:,} parameters"
        facts = (
            f"{self.model} on {self.data}, {share}, {count_text(precision.num_steps, 'step')} in "
            f"{self.seconds:.{0 if self.seconds >= 10 else 1}f} s "
            f"on {self.device}"
        )
        held_out = () if self.evaluation is None else (f"On what was held out the loss is {number(self.evaluation)}.",)
        alerts = (f"halfstep watch check {self.output} says what the alerts are.",) if precision.num_alerts else ()
        return Sheet(
            f"{self.task}: {loss}{ended}",
            facts,
            (Table(("precision", ""), rows),),
            (*held_out, *alerts, *self.notes, f"The model and the log are in {self.output}."),
        )


def _scales(first: float, last: float) -> str:
    if first == last == 1.0:
        return "none is needed"
    return f"{first:g}" if first == last else f"{first:g} to {last:g}"
