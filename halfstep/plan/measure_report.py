"""``halfstep measure``: what each policy takes on the device that is here, beside what the plan says.

This side needs no torch; the processes that it starts do.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

from halfstep.errors import HalfstepError
from halfstep.plan.subject import Subject
from halfstep.plan.worker import Call, Workers
from halfstep.policy import Policy
from halfstep.report import Cell, Report, Sheet, Table, count_text

_MIB = 2**20


class WindowTime(NamedTuple):
    """Seconds of one window by part; ``halfstep.plan.measure.Parts`` says what belongs to which."""

    forward: float
    backward: float
    optimizer: float

    @property
    def step(self) -> float:
        return sum(self)


@dataclass(frozen=True)
class Memory:
    """Of one window. peak: bytes of its tensors, on CUDA of the blocks that hold them.

    reserved: bytes that CUDA's allocator holds, None on a CPU. is_applied: whether the optimizer moved the weights.
    """

    peak: int
    reserved: int | None
    is_applied: bool


@dataclass(frozen=True)
class Prepared:
    """A policy that has warmed up on the device, and the memory of its step.

    device, torch, num_threads: where it runs. effective: the policy that really runs.
    num_samples: of a window.
    """

    device: str
    torch: str
    num_threads: int
    effective: str
    num_samples: int
    memory: Memory


@dataclass(frozen=True)
class PolicyMeasure:
    """One policy. ``windows`` are those of all turns, warm-up left out.

    refused:     why it did not run on the device, None if it did.
    predicted:   peak bytes of the tensors by the plan; None where there is no plan, and ``unpredicted`` says why.
    """

    policy: str
    prepared: Prepared | None = None
    windows: tuple[WindowTime, ...] = ()
    predicted: int | None = None
    unpredicted: HalfstepError | None = None
    refused: HalfstepError | None = None

    @property
    def error_pct(self) -> float | None:
        """How far the prediction is above the measurement, in percent of the measurement."""
        if self.prepared is None or self.predicted is None:
            return None
        return 100 * (self.predicted - self.prepared.memory.peak) / self.prepared.memory.peak

    @property
    def samples_per_s(self) -> float | None:
        """By the median step; drawing batches and moving them to the device is left out."""
        median = self.quartiles()["median"]
        return None if median is None or self.prepared is None else 1e3 * self.prepared.num_samples / median

    def quartiles(self) -> dict[str, float | None]:
        """Milliseconds of a window: the median, and the quartiles below and above it."""
        steps = [1e3 * window.step for window in self.windows]
        if not steps:
            return {"median": None, "low": None, "high": None}
        low, median, high = statistics.quantiles(steps, method="inclusive") if len(steps) > 1 else steps * 3
        return {"median": median, "low": low, "high": high}

    def part_ms(self, part: str) -> float | None:
        """The median of ``forward``, ``backward`` or ``optimizer`` over the windows, in milliseconds."""
        values = [1e3 * getattr(window, part) for window in self.windows]
        return statistics.median(values) if values else None

    def to_dict(self) -> dict[str, Any]:
        prepared = self.prepared
        return {
            "policy": self.policy,
            "effective": prepared and prepared.effective,
            "peak_mib": _mib(prepared.memory.peak if prepared else None),
            "predicted_mib": _mib(self.predicted),
            "error_pct": self.error_pct,
            "reserved_mib": _mib(prepared.memory.reserved if prepared else None),
            "samples_per_s": self.samples_per_s,
            "step_ms": self.quartiles(),
            "forward_ms": self.part_ms("forward"),
            "backward_ms": self.part_ms("backward"),
            "optimizer_ms": self.part_ms("optimizer"),
            "windows": len(self.windows),
            "refused": None if self.refused is None else str(self.refused),
        }


@dataclass(frozen=True)
class MeasureReport(Report):
    """What ``halfstep measure`` returns. The first policy is what the others are set against.

    repeats: turns that were asked for. interrupted: some are missing.
    """

    workload: str
    policies: tuple[PolicyMeasure, ...]
    repeats: int
    interrupted: bool = False

    @property
    def found(self) -> bool:
        """Whether a policy failed."""
        return any(row.refused is not None for row in self.policies)

    @property
    def _any(self) -> Prepared | None:
        return next((row.prepared for row in self.policies if row.prepared), None)

    def to_dict(self) -> dict[str, Any]:
        known = self._any
        return {
            "workload": self.workload,
            "device": known and known.device,
            "torch": known and known.torch,
            "threads": known and known.num_threads,
            "samples": known and known.num_samples,
            "repeats": self.repeats,
            "interrupted": self.interrupted,
            "found": self.found,
            "policies": [row.to_dict() for row in self.policies],
            "notes": self._notes(),
        }

    def sheet(self) -> Sheet:
        known = self._any
        tables = [self._memory_table(), self._time_table()] if known else []
        return Sheet(self.headline, self._facts(known) if known else "", tables, self._notes())

    @property
    def headline(self) -> str:
        errors = [row.error_pct for row in self.policies if row.error_pct is not None]
        if not errors:
            return f"{self.workload}: nothing could be set against a plan."
        worst = max(errors, key=abs)
        if worst == 0:
            return f"{self.workload}: the plan's peak is what was measured, to the byte."
        return f"{self.workload}: the plan's peak is off by {abs(worst):.2g} % at most."

    def _facts(self, known: Prepared) -> str:
        threads = f" ({count_text(known.num_threads, 'thread')})" if known.memory.reserved is None else ""
        return (
            f"{known.device}{threads}, torch {known.torch}, {count_text(known.num_samples, 'sample')} a step,"
            f" {count_text(self.repeats, 'turn')} of each policy, each in a process of its own."
        )

    def _notes(self) -> list[str]:
        notes = [f"{row.policy} did not run. {row.refused}" for row in self.policies if row.refused]
        notes += [f"{row.policy} has no prediction. {row.unpredicted}" for row in self.policies if row.unpredicted]
        for row in self.policies:
            if row.prepared and not row.prepared.memory.is_applied:
                notes.append(
                    f"No step of {row.policy} was applied, as in an overflow that no loss scale mends: the optimizer"
                    " did not run, which the prediction takes for granted."
                )
        if self.interrupted:
            notes.append("Interrupted: the figures are those of the turns that had ended.")
        if self._any and self._any.memory.reserved is not None:
            notes.append(
                "Allocated bytes hold the workspaces of libraries and are rounded up to 512 a tensor; the prediction is"
                " of the tensors alone."
            )
        return notes

    def _memory_table(self) -> Table:
        is_cuda = any(row.prepared and row.prepared.memory.reserved is not None for row in self.policies)
        first = self.policies[0].prepared and self.policies[0].prepared.memory
        columns = ["policy", ">predicted, MiB", f">{'allocated' if is_cuda else 'measured'}, MiB", ">error"]
        columns += [">reserved, MiB"] if is_cuda else []
        rows: list[Sequence[str | Cell]] = []
        for row in self.policies:
            if row.prepared is None:
                continue
            mine = row.prepared.memory
            cells = [row.policy, _mib_text(row.predicted), _mib_text(mine.peak), _percent(row.error_pct)]
            cells += [_mib_text(mine.reserved)] if is_cuda else []
            rows.append((*cells, f"{100 * mine.peak / first.peak:.0f} %" if first else "-"))
        return Table((*columns, f">of {self.policies[0].policy}"), rows, title="Memory at the step's peak")

    def _time_table(self) -> Table:
        columns = (">samples per s", ">step, ms", ">quartiles", ">forward, ms", ">backward, ms", ">optimizer, ms")
        fastest = self.policies[0].samples_per_s
        rows: list[Sequence[str | Cell]] = []
        for row in self.policies:
            if row.prepared is None:
                continue
            of_step = row.quartiles()
            spread = f"{_text(of_step['low'], 2)} to {_text(of_step['high'], 2)}" if row.windows else "-"
            parts = [_text(row.part_ms(part), 2) for part in WindowTime._fields]
            speed = row.samples_per_s
            rows.append(
                (
                    row.policy,
                    _text(speed, 0),
                    _text(of_step["median"], 2),
                    spread,
                    *parts,
                    f"{speed / fastest:.2f}" if speed and fastest else "-",
                )
            )
        return Table(("policy", *columns, f">x {self.policies[0].policy}"), rows, title="Time of a step, medians")


# --- measuring -----------------------------------------------------------------------------------------------------


def measure(
    spec: str,
    policies: Sequence[str],
    *,
    batch_size: int | None = None,
    repeats: int = 5,
    device: str | None = None,
    progress: Callable[[str], None] | None = None,
) -> MeasureReport:
    """Measure each of ``policies`` on ``device``, in a process of its own and in turns, and predict it.

    A policy that fails is a row with its reason; where all fail for the same one it is raised. Ctrl-C keeps the turns
    that have ended; with none it is raised again. ``progress`` is called with a policy's text ``repeats + 2`` times for
    each policy that runs.
    """
    if repeats < 1:
        raise HalfstepError(f"repeats={repeats}", "there is nothing to measure", "Use --repeats 1 or more.")
    if not policies:
        raise HalfstepError("no policies", "there is nothing to measure", "Name some, such as fp32,bf16,fp16.")
    for policy in policies:
        Policy.parse(policy)
    subject, interrupted = Subject(spec, batch_size), False
    with _Turns(policies, progress) as turns:
        try:
            turns.take("prepare", "prepared", "refused", lambda policy: (subject, policy, device))
            turns.raise_if_all_fail_alike()
            for _ in range(repeats):
                turns.take("timed", "windows", "refused", lambda policy: ())
            turns.take("predicted", "predicted", "unpredicted", lambda policy: (subject, policy, device))
        except KeyboardInterrupt:
            if not any(row.windows for row in turns.rows):
                raise
            interrupted = True
    return MeasureReport(spec, tuple(turns.rows), repeats, interrupted)


class _Turns:
    """A process for each policy, which take turns so that none disturbs another. To be used as a context."""

    def __init__(self, policies: Sequence[str], progress: Callable[[str], None] | None) -> None:
        self.rows = [PolicyMeasure(policy) for policy in policies]
        self._progress = progress
        self._opened = ExitStack()

    def __enter__(self) -> Self:
        self._workers = [self._opened.enter_context(Workers(1, computes=True)) for _ in self.rows]
        return self

    def __exit__(self, *exception: object) -> None:
        self._opened.close()

    def take(self, function: str, found: str, failed: str, args: Callable[[str], tuple[Any, ...]]) -> None:
        """Call ``function`` for each policy that still runs; what it gives is added to its field ``found``."""
        for at, row in enumerate(self.rows):
            if row.refused is not None:
                continue
            if self._progress is not None:
                self._progress(row.policy)
            call = Call(f"halfstep.plan.measure:{function}", args(row.policy), about=f"measuring {row.policy}")
            result = self._workers[at].run([call])[0]
            change: dict[str, Any] = {failed: result}
            if not isinstance(result, HalfstepError):
                before = getattr(row, found)
                change = {found: (*before, *result) if isinstance(before, tuple) else result}
            self.rows[at] = replace(row, **change)

    def raise_if_all_fail_alike(self) -> None:
        """A workload that cannot be built is no matter of a policy."""
        refusals = [row.refused for row in self.rows]
        if refusals[0] is not None and {str(refusals[0])} == {str(refusal) for refusal in refusals}:
            raise refusals[0]


def _mib(nbytes: int | None) -> float | None:
    return None if nbytes is None else nbytes / _MIB


def _text(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _mib_text(nbytes: int | None) -> str:
    value = _mib(nbytes)
    return _text(value, 2 if value is None or value >= 1 else 4)


def _percent(value: float | None) -> str:
    """An error that is not 0 never looks like 0."""
    if not value:
        return "-" if value is None else "0.0 %"
    return f"{value:+.1f} %" if abs(value) >= 0.1 else f"{value:+.1g} %"
