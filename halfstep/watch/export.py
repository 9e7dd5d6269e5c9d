"""The log of a run into another tool, after the fact: what its exporter would have written while it trained."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from halfstep.errors import HalfstepError
from halfstep.report import Report, Sheet, count_text
from halfstep.watch.entry import Entry, Step
from halfstep.watch.exporters import exporter_of
from halfstep.watch.reading import ranks_of, read_entries
from halfstep.watch.runs import no_run


@dataclass(frozen=True)
class ExportReport(Report):
    """What went where.

    rank: whose entries. num_nonfinite: steps whose loss or gradient norm was NaN or inf. num_alerts: of all ranks.
    """

    run: str
    target: str
    rank: int
    num_steps: int = 0
    num_nonfinite: int = 0
    num_alerts: int = 0

    def sheet(self) -> Sheet:
        return Sheet(
            f"{count_text(self.num_steps, 'step')} and {count_text(self.num_alerts, 'alert')} of {self.run} "
            f"went to {self.target}.",
            f"{count_text(self.num_nonfinite, 'step')} with a loss or a gradient norm that is NaN or inf, "
            f"written as such. Rank {self.rank}, with the alerts of every rank.",
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def found(self) -> bool:
        return False


def export(folder: str | os.PathLike[str], target: str) -> ExportReport:
    """Write the log in ``folder`` to ``target``: the entries of its first rank, and the alerts of every rank.

    target: as halfstep.watch.settings.Watch.exporters has it. A log that is still written is taken as far as it goes.
    HalfstepError if there is no log, ``target`` is none, or the tool fails on the way.
    """
    name = Path(folder).resolve().name
    ranks = ranks_of(folder)
    if not ranks:
        raise no_run(folder)
    entries = _entries(folder, ranks)
    entries = chain([next(entries)], entries)  # a log that holds nothing starts no run elsewhere
    exporter = exporter_of(target, name)
    num_steps = num_nonfinite = num_alerts = 0
    try:
        try:
            for entry in entries:
                exporter.write(entry)
                if entry["kind"] == "step":
                    num_steps += 1
                    num_nonfinite += not Step.from_entry(entry).is_finite
                num_alerts += entry["kind"] == "alert"
        finally:
            exporter.close()
    except HalfstepError:
        raise
    except Exception as error:  # whatever another tool raises
        why = f"it failed after {count_text(num_steps, 'step')} of {name}: {type(error).__name__}: {error}"
        raise HalfstepError(f"exporter {target}", why, "What arrived is not whole: export again.") from error
    return ExportReport(name, target, ranks[0], num_steps, num_nonfinite, num_alerts)


def _entries(folder: str | os.PathLike[str], ranks: list[int]) -> Iterator[Entry]:
    """Those of the first rank, with the alerts of the others before the first entry that is later."""
    others = sorted((e for rank in ranks[1:] for e in _alerts(folder, rank)), key=_time, reverse=True)
    for entry in read_entries(folder, ranks[0]):
        while others and _time(others[-1]) < _time(entry):
            yield others.pop()
        yield entry
    yield from reversed(others)


def _alerts(folder: str | os.PathLike[str], rank: int) -> Iterator[Entry]:
    with suppress(HalfstepError):  # a rank that wrote nothing
        yield from (entry for entry in read_entries(folder, rank) if entry["kind"] == "alert")


def _time(entry: Entry) -> float:
    return float(entry.get("time", 0.0))
