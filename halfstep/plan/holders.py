"""Who holds the memory: storages by component, module and operation, and the peak of each phase."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PureWindowsPath

from halfstep.plan.size import size_text
from halfstep.plan.step_trace import BACKWARD, COMPONENTS, FORWARD, STEP, Moment, StepTrace, Storage
from halfstep.report import Table

NUM_SHOWN = 12
"""Rows of a table of holders; the rest share the last one."""
_DEPTH = 3
"""Parts that are left of the name of a module outside of repeated blocks."""


@dataclass(frozen=True)
class Holder:
    """Storages with a component, an operation and a group of modules in common.

    module:       a name as :func:`module_patterns` gives it, None outside of the model.
    op, phase:    where they were made; None for what was there before the step.
    num_modules:  modules of the group that hold any of it, 0 outside of the model.
    num_storages, nbytes: how many, and how large they are together.
    """

    component: str
    module: str | None
    op: str | None
    phase: str | None
    num_modules: int
    num_storages: int
    nbytes: int


@dataclass(frozen=True)
class PhasePeak:
    """The peak of one phase. maker: the storage that made it, None where nothing was born in the phase."""

    phase: str
    moment: Moment
    maker: Storage | None


def module_patterns(names: Iterable[str]) -> dict[str, str]:
    """The group of each module of ``names``: ``blocks.3.attention.out`` is in ``blocks.*.attention``.

    A number is replaced by ``*`` where modules differ in it that have parts of their own, as the blocks of a model do
    and the layers of a Sequential do not. A name ends one part after its last ``*``, and after three without one.
    """
    paths = {name: name.split(".") for name in names}
    numbers: dict[tuple[str, ...], set[str]] = {}
    has_parts = set()
    for parts in paths.values():
        for at, parent in _numbered(parts):
            numbers.setdefault(parent, set()).add(parts[at])
            if at + 1 < len(parts):
                has_parts.add(parent)
    patterns = {}
    for name, parts in paths.items():
        stars = [at for at, parent in _numbered(parts) if parent in has_parts and len(numbers[parent]) > 1]
        shown = ["*" if at in stars else part for at, part in enumerate(parts)]
        patterns[name] = ".".join(shown[: stars[-1] + 2 if stars else _DEPTH])
    return patterns


def _numbered(parts: Sequence[str]) -> list[tuple[int, tuple[str, ...]]]:
    """Where ``parts`` has a number, with what is before it, in which one number is as good as another."""
    alike = ["*" if part.isdigit() else part for part in parts]
    return [(at, tuple(alike[:at])) for at, part in enumerate(parts) if part.isdigit()]


def holders_of(trace: StepTrace, time: int) -> list[Holder]:
    """Who holds what is alive after the event at ``time``, largest first. Sizes sum to ``trace.at(time).nbytes``."""
    return grouped(trace.alive(time), module_patterns({s.module for s in trace.storages if s.module}))


def grouped(storages: Iterable[Storage], patterns: Mapping[str, str]) -> list[Holder]:
    """``storages`` in groups, largest first; ``patterns`` as of :func:`module_patterns`."""
    groups: dict[tuple[str, str | None, str | None, str | None], list[Storage]] = {}
    for s in storages:
        module = patterns[s.module] if s.module else s.module
        groups.setdefault((s.component, module, s.op, s.phase), []).append(s)
    holders = [
        Holder(
            *key,
            num_modules=len({s.module for s in group if s.module is not None}),
            num_storages=len(group),
            nbytes=sum(s.nbytes for s in group),
        )
        for key, group in groups.items()
    ]
    return sorted(holders, key=lambda holder: (-holder.nbytes, COMPONENTS.index(holder.component)))


def sections(trace: StepTrace) -> list[tuple[str, int, int]]:
    """The phases of the step as (phase, first event, last event), which cover all of it from event 1 on.

    What happens before the last backward pass has ended belongs to a pass: moving a batch to the next forward pass, the
    casts that a region gives back at its end to the forward pass that made them.
    """
    last = max((at for at, (phase, _) in enumerate(trace.phases) if phase == BACKWARD), default=-1)
    starts: list[tuple[str, int]] = []
    for at, (phase, start) in enumerate(trace.phases):
        if phase == STEP and at < last:
            # Of the forward pass that was before it, else of the one that comes.
            phase = FORWARD if not starts or starts[-1][0] == FORWARD else BACKWARD
        if not starts or starts[-1][0] != phase:
            starts.append((phase, start))
    ends = [start - 1 for _, start in starts[1:]] + [trace.num_events]
    return [(phase, start, end) for (phase, start), end in zip(starts, ends, strict=True)]


def phase_peaks(trace: StepTrace) -> list[PhasePeak]:
    """The peak of each phase that the step has, in the order forward, backward, step."""
    totals = [nbytes for _, nbytes in trace.totals()]
    peaks = []
    for phase in (FORWARD, BACKWARD, STEP):
        times = [time for name, start, end in sections(trace) if name == phase for time in range(start, end + 1)]
        if times:
            time = max(times, key=lambda at: (totals[at], -at))
            peaks.append(PhasePeak(phase, trace.at(time), trace.born_at(time)))
    return peaks


def peak_phase(trace: StepTrace) -> str:
    """The phase of :func:`sections` in which the trace's peak falls."""
    time = trace.peak.time
    return next((phase for phase, start, end in sections(trace) if start <= time <= end), FORWARD)


def peak_text(trace: StepTrace) -> str:
    """The peak in words: how much, in which phase, made by which operation and module."""
    maker = maker_text(trace.born_at(trace.peak.time))
    where = f"{size_text(trace.peak.nbytes)} in the {phase_text(peak_phase(trace))}"
    return f"{where}, made by {maker}" if maker else where


def phase_text(phase: str) -> str:
    """A phase in a sentence, after "the"."""
    return "optimizer step" if phase == STEP else f"{phase} pass"


def maker_text(maker: Storage | None) -> str:
    """Which operation made ``maker``, and where; empty for what was there before the step."""
    if maker is None or maker.op is None:
        return ""
    return f"{op_text(maker.op)} {_place(maker)}".rstrip()


def op_text(op: str) -> str:
    """``aten.mm`` of ``aten.mm.default``; an overload is kept where it says something."""
    return op.removesuffix(".default")


def _place(storage: Storage) -> str:
    if storage.module:
        return f"in {storage.module}"
    if storage.phase == STEP:
        return ""
    line = f" ({PureWindowsPath(storage.file).name}:{storage.line})" if storage.file else ""
    return ("in the model itself" if storage.module == "" else "outside the model") + line


def holders_table(trace: StepTrace, num_shown: int = NUM_SHOWN) -> Table:
    """Who holds the memory at the peak of ``trace``."""
    holders = holders_of(trace, trace.peak.time)
    total = trace.peak.nbytes
    shown = holders if len(holders) <= num_shown else holders[: num_shown - 1]
    rows = [(h.component, _module_cell(h), _made_cell(h), *_size_cells(h.num_storages, h.nbytes, total)) for h in shown]
    if rest := holders[len(shown) :]:
        sizes = _size_cells(sum(h.num_storages for h in rest), sum(h.nbytes for h in rest), total)
        rows.append((f"{len(rest):,} more groups", "", "", *sizes))
    columns = ("held for", "module", "made by", ">storages", ">memory", ">share")
    return Table(columns, rows, title=f"At the peak of {trace.policy}: {peak_text(trace)}")


def phases_table(traces: Sequence[StepTrace]) -> Table:
    """The peak of each phase of each trace by component, with the temporaries of all phases in one column."""
    peaks = [(trace, peak, _parts(peak.moment)) for trace in traces for peak in phase_peaks(trace)]
    names = [
        name
        for name in dict.fromkeys(map(_column, COMPONENTS))
        if any(100 * part.get(name, 0) >= peak.moment.nbytes for _, peak, part in peaks)
    ]
    rows = []
    for trace, peak, part in peaks:
        sizes = [size_text(part[name]) if name in part else "-" for name in names]
        made_by = maker_text(peak.maker) or "-"
        rows.append((trace.policy, peak.phase, size_text(peak.moment.nbytes), *sizes, made_by))
    columns = ("policy", "phase", ">peak", *(f">{name}" for name in names), "made by")
    note = "What holds less than one percent of each of these peaks has no column."
    return Table(columns, rows, title="The peak of each phase", note=note)


def _parts(moment: Moment) -> dict[str, int]:
    parts: dict[str, int] = {}
    for name, nbytes in moment.components.items():
        parts[_column(name)] = parts.get(_column(name), 0) + nbytes
    return parts


def _column(component: str) -> str:
    return "temporaries" if component.endswith("temporaries") else component


def _module_cell(holder: Holder) -> str:
    if holder.module is None:
        return "-"
    count = f" ({holder.num_modules})" if holder.num_modules > 1 else ""
    return (holder.module or "the model itself") + count


def _made_cell(holder: Holder) -> str:
    return "before the step" if holder.op is None else f"{op_text(holder.op)}, {holder.phase}"


def _size_cells(num_storages: int, nbytes: int, total: int) -> tuple[str, str, str]:
    return f"{num_storages:,}", size_text(nbytes), f"{100 * nbytes / total:.1f} %" if total else "-"
