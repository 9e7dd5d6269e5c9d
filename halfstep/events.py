"""The records that travel from the engine to whoever watches: StepReport, Overflow, Promotion, Alert, RunInfo.

They hold plain numbers once read. A StepReport keeps its numbers on the device until somebody asks for one, so that a
step which nobody looks at costs no wait for the device; nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


class StepReport:
    """What one optimizer step did. Reading ``loss``, ``grad_norm``, ``scale`` or ``applied`` waits for the device once.

    step:        number of the window, from 1; a skipped one counts.
    loss:        the true loss of the window, never the scaled one: the sum over its micro-batches by their true count.
    grad_norm:   the true global 2-norm of the gradient before clipping; inf or NaN when it was not finite.
    scale:       the loss scale that this step ran with, 1.0 without scaling.
    applied:     whether the optimizer moved the weights.
    reason:      why it did not, else None.
    num_replays: how many times a micro-batch of this window ran again at a lower scale.
    nonfinite_share: share of the gradient's elements that were inf or NaN, 0.0 on an applied step; None on a skipped
                 step whose verdict stayed on the device, where nobody counted.
    """

    __slots__ = ("_explain", "_read", "_share", "_values", "num_replays", "step")

    def __init__(
        self,
        step: int,
        read: Callable[[], Sequence[float]],
        explain: Callable[..., str],
        num_replays: int = 0,
        nonfinite_share: float | None = None,
    ) -> None:
        """``read`` gives (loss, grad_norm, scale, 1.0 if skipped else 0.0, and what more ``explain`` takes).

        ``explain(loss, norm, *more)`` says why the step was skipped.
        """
        self.step, self.num_replays = step, num_replays
        self._read, self._explain = read, explain
        self._values: Sequence[float] | None = None
        self._share = nonfinite_share

    def _get(self) -> Sequence[float]:
        if self._values is None:
            self._values = self._read()
        return self._values

    def arrived(self, values: Sequence[float]) -> None:
        """Its numbers have come from the device without anybody waiting."""
        self._values = values

    @property
    def loss(self) -> float:
        return self._get()[0]

    @property
    def grad_norm(self) -> float:
        return self._get()[1]

    @property
    def scale(self) -> float:
        return self._get()[2]

    @property
    def applied(self) -> bool:
        return self._get()[3] == 0.0

    @property
    def reason(self) -> str | None:
        return None if self.applied else self._explain(self.loss, self.grad_norm, *self._get()[4:])

    @property
    def nonfinite_share(self) -> float | None:
        return 0.0 if self.applied else self._share

    def to_dict(self) -> dict[str, Any]:
        names = ("step", "loss", "grad_norm", "scale", "applied", "reason", "num_replays", "nonfinite_share")
        return {name: getattr(self, name) for name in names}

    def __repr__(self) -> str:
        fate = "applied" if self.applied else f"skipped: {self.reason}"
        replays = f", {self.num_replays} replays" if self.num_replays else ""
        return (
            f"step {self.step}: loss {self.loss:.6g}, gradient norm {self.grad_norm:.4g}, "
            f"scale {self.scale:g}{replays}, {fate}"
        )


@dataclass(frozen=True)
class Overflow:
    """One micro-batch whose gradient was not finite, and which runs again.

    step: the window it belongs to. micro_batch: its place in the window, from 0. scale: the loss scale that it runs
    with next. parameters: names of the parameters whose gradient was not finite and is computed again.
    nonfinite_share: share of the gradient's elements that were inf or NaN. overflowed_at: the loss scale of that run.
    """

    step: int
    micro_batch: int
    scale: float
    parameters: tuple[str, ...]
    nonfinite_share: float
    overflowed_at: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Promotion:
    """One module that computes in fp32 from now on, since no loss scale mends what it makes.

    step: the window that it happened in. module: its qualified name. policy: the line to keep, which starts the next
    run with what this one has become. reason: what the module made, and where.
    """

    step: int
    module: str
    policy: str
    reason: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Alert:
    """Something that a person should know about a run: which rule, when, how bad, and what to do."""

    rule: str
    step: int
    severity: str
    message: str
    action: str
    rank: int = 0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class RunInfo:
    """What a run is: the policy asked for and the one in effect, why they differ, and the machine."""

    requested: str
    effective: str
    reason: str
    device: str
    versions: Mapping[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
