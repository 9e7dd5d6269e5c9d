"""What is in a log: one JSON object a line, each with its ``kind`` and the ``time`` that it was written, in seconds.

    run          the start of a process that writes: see RunStart
    seam         a run goes on from a checkpoint: ``step`` is the last step that counts; later ones of before do not
    step         what one optimizer step did: see Step
    layers       every LAYERS_EVERY steps: ``step``, ``parameters`` and the true 2-norms of their gradients, ``norms``
    overflow, promotion, alert    the records of halfstep.events, as their to_dict() gives them
    updates, ranges               reports that a loop recorded: ``step`` and the report's to_dict()
    explanation                   of a bad step, by Stepper(explain=True)
    gap          the log was lost for a while: ``num_lost`` entries were never written
    end          the process ended: ``state`` is finished or failed, ``reason`` why

NaN and inf are the strings "NaN", "Infinity" and "-Infinity", which float() of Python and Number() of JavaScript read;
a key that is left out has its default.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from halfstep.report import json_number

Entry = dict[str, Any]
LAYERS_EVERY = 100


@dataclass(frozen=True, slots=True)
class Step:
    """One optimizer step, as the log keeps it. The names of StepReport mean what they mean there.

    time:              when its numbers were asked for, in seconds since 1970.
    nonfinite_share:   share of the gradient's elements that were inf or NaN, replayed micro-batches included; None
                       where nobody counted.
    nonfinite_at_most: share of the elements in parameters whose gradient had a norm that was not finite.
    parameters:        the names of those parameters.
    count:             what the window held, in the unit of the loss's count: tokens, samples, or micro-batches.
    memory_mib:        CUDA: the most that was allocated so far; CPU: what the process holds. None where unknown.
    """

    step: int
    time: float
    loss: float
    grad_norm: float
    scale: float = 1.0
    applied: bool = True
    reason: str | None = None
    num_replays: int = 0
    nonfinite_share: float | None = 0.0
    nonfinite_at_most: float = 0.0
    parameters: tuple[str, ...] = ()
    count: float = 1.0
    memory_mib: float | None = None

    @property
    def is_finite(self) -> bool:
        """Whether the loss and the gradient were."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)

    def to_entry(self) -> Entry:
        entry: Entry = {"kind": "step"}
        for name, default in _DEFAULTS.items():
            value = getattr(self, name)
            if value != default:
                entry[name] = json_number(value)
        return entry

    @classmethod
    def from_entry(cls, entry: Mapping[str, Any]) -> Step:
        """The step of a line; ValueError, TypeError or KeyError when it is none."""
        known = {name: entry[name] for name in _DEFAULTS if name in entry}
        for name in ("loss", "grad_norm", "scale", "time", "nonfinite_at_most", "count"):
            if name in known:
                known[name] = float(known[name])
        if "parameters" in known:
            known["parameters"] = tuple(known["parameters"])
        return cls(**known)


_NEEDED = object()
_DEFAULTS = {f.name: _NEEDED if f.name in ("step", "time", "loss", "grad_norm") else f.default for f in fields(Step)}


@dataclass(frozen=True)
class RunStart:
    """The line that a process writes first.

    rank, num_ranks: of the process. session: names this process among those that wrote to the log.
    host, pid:       where it runs. policy: the policy in effect; info: RunInfo.to_dict(). scale: settings of the
                     loss scale, of halfstep.policy.LossScale. num_elements: of the trainable parameters.
    """

    time: float
    rank: int = 0
    num_ranks: int = 1
    session: str = ""
    host: str = ""
    pid: int = 0
    policy: str = ""
    scale: Mapping[str, Any] = field(default_factory=dict)
    info: Mapping[str, Any] = field(default_factory=dict)
    num_elements: int = 0

    @property
    def has_dynamic_scale(self) -> bool:
        return self.scale.get("kind") == "dynamic"

    def to_entry(self) -> Entry:
        return {"kind": "run", **asdict(self)}

    @classmethod
    def from_entry(cls, entry: Mapping[str, Any]) -> RunStart:
        names = {f.name for f in fields(cls)}
        return cls(**{name: value for name, value in entry.items() if name in names})
