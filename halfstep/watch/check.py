"""``halfstep watch check``: the rules of the guard over a run that has been, from its log."""

from __future__ import annotations

import os
import time
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfstep.events import Alert
from halfstep.report import Cell, Report, Sheet, Table, count_text
from halfstep.watch.entry import Entry, RunStart
from halfstep.watch.golden import Band, read_band
from halfstep.watch.guard import Guard, all_rules
from halfstep.watch.log import file_of
from halfstep.watch.reading import Tail, ranks_of
from halfstep.watch.rules.stalled import RULE as STALLED
from halfstep.watch.rules.stalled import usual_pause
from halfstep.watch.run_state import STATES, state_of
from halfstep.watch.runs import no_run
from halfstep.watch.settings import Watch

_TONES = {"error": "bad", "warning": "open", "note": ""}


@dataclass(frozen=True)
class CheckReport(Report):
    """What ``halfstep watch check`` returns.

    run:        name of the run's folder. state, why: of the run, as :func:`halfstep.watch.run_state.state_of` has them.
    num_steps:  steps that count, of the rank that has most; num_ranks: logs that were read.
    num_sessions: processes that wrote to a log one after the other, at most.
    num_torn:   lines that were no entry and were dropped. num_lost: entries that never reached the log.
    unread:     ranks whose log holds no entry, or cannot be read.
    alerts:     by step, then rank. A step that a resumed run replaced keeps its alerts: they were told.
    """

    run: str
    state: str
    why: str
    num_steps: int
    num_ranks: int
    num_sessions: int
    num_torn: int
    num_lost: int
    unread: tuple[int, ...]
    alerts: tuple[Alert, ...]

    @property
    def found(self) -> bool:
        """Whether there is an alert."""
        return bool(self.alerts)

    def to_dict(self) -> dict[str, Any]:
        return {
            "run": self.run,
            "state": self.state,
            "why": self.why,
            "num_steps": self.num_steps,
            "num_ranks": self.num_ranks,
            "num_sessions": self.num_sessions,
            "num_torn": self.num_torn,
            "num_lost": self.num_lost,
            "unread": list(self.unread),
            "found": self.found,
            "alerts": [alert.to_dict() for alert in self.alerts],
        }

    def sheet(self) -> Sheet:
        number = count_text(len(self.alerts), "alert") if self.alerts else "no alerts"
        steps = f"{self.num_steps:,} step" + ("" if self.num_steps == 1 else "s")
        facts = f"{self.run}: {self.state}, {self.why}; {count_text(self.num_sessions, 'session')}."
        lost = []
        if self.num_torn:
            lost.append(f"{count_text(self.num_torn, 'line')} of the log could not be read and had to be left out.")
        if self.num_lost:
            lost.append(f"{self.num_lost:,} entries were never written, since the log was lost for a while.")
        headline = f"{number} in {steps} of {count_text(self.num_ranks, 'rank')}"
        if self.unread:
            ranks = ", ".join(map(str, self.unread))
            lost.append(f"No entry can be read in the log of rank {ranks}: nothing is known of what happened there.")
        return Sheet(headline, facts, [self._table()] if self.alerts else [], lost)

    def _table(self) -> Table:
        """One row for what several ranks have in common."""
        ranks: dict[tuple[Any, ...], list[int]] = {}
        for alert in self.alerts:
            key = (alert.step, alert.rule, alert.severity, alert.message, alert.action)
            ranks.setdefault(key, []).append(alert.rank)
        rows = [
            [", ".join(map(str, of)), str(step), rule, Cell(severity, _TONES.get(severity, "")), message, action]
            for (step, rule, severity, message, action), of in ranks.items()
        ]
        return Table([">rank", ">step", "rule", "severity", "message", "action"], rows)


def check(folder: str | os.PathLike[str], settings: Watch | None = None) -> CheckReport:
    """Replay the rules over every rank of the run in ``folder``. HalfstepError where there is no log.

    A run that has not ended is judged by how long it has been silent until now.
    """
    settings = settings or Watch()
    band = read_band(settings.golden) if settings.golden else None
    replays = [_Replay(folder, rank, settings, band) for rank in ranks_of(folder)]
    unread = tuple(replay.rank for replay in replays if replay.is_empty)
    if len(unread) == len(replays):
        raise no_run(folder)
    alerts = [alert for replay in replays for alert in replay.alerts]
    worst = min(replays, key=lambda replay: STATES.index(replay.state))
    return CheckReport(
        Path(folder).resolve().name,
        worst.state,
        worst.why,
        max(len(replay.steps) for replay in replays),
        len(replays),
        max(len(replay.sessions) for replay in replays),
        sum(replay.num_torn for replay in replays),
        sum(replay.num_lost for replay in replays),
        unread,
        tuple(sorted(alerts, key=lambda alert: (alert.step, alert.rank))),
    )


class _Replay:
    """One rank: its guard through the sessions of its log.

    steps: numbers of those that count; later ones of before a seam, or of a start anew, do not, nor do their alerts.
    """

    def __init__(self, folder: str | os.PathLike[str], rank: int, settings: Watch, band: Band | None) -> None:
        self.rank = rank
        self.steps: list[int] = []
        self.alerts: list[Alert] = []
        self.num_lost = 0
        self.is_empty = True
        self.sessions: list[str] = []
        self._settings = settings
        self._guard = Guard(RunStart(0.0, rank, session="of a log without its first line"), settings, band)
        self._run: Entry | None = None
        self._end: Entry | None = None
        tail = Tail(file_of(folder, rank))
        for entry in tail.rest():
            self._see(entry)
        self.num_torn = tail.num_torn
        self._judge_end(time.time())

    def _see(self, entry: Entry) -> None:
        kind, self.is_empty = entry["kind"], False
        if kind == "step":
            self._keep_before(entry["step"])
            self.steps.append(entry["step"])
        elif kind == "seam":
            self._keep_before(entry["step"] + 1, is_seam=True)
        elif kind == "run":
            self._run, self._end = entry, None
            if (session := entry.get("session", "")) not in self.sessions:
                self.sessions.append(session)
        elif kind == "end":
            self._end = entry
        elif kind == "gap":
            self.num_lost += entry["num_lost"]
        elif kind == "alert" and entry["rule"] not in all_rules():  # the engine's own, which no rule makes again
            rule, step, severity = entry["rule"], entry["step"], entry["severity"]
            self.alerts.append(Alert(rule, step, severity, entry["message"], entry["action"], self.rank))
        self.alerts += self._guard.see(entry)

    def _keep_before(self, step: int, is_seam: bool = False) -> None:
        """What was said of steps that are made again counts no more, as on the page."""
        at = bisect_left(self.steps, step)
        if is_seam or at < len(self.steps):
            del self.steps[at:]
            self.alerts = [alert for alert in self.alerts if alert.step < step]

    def _judge_end(self, now: float) -> None:
        """The state that the log ends in; a run that is lost or stalled is an alert."""
        window, setting = self._guard.window, self._settings.rules.get(STALLED.name)
        limits = {**STALLED.limits, **(setting if isinstance(setting, Mapping) else {})}
        pause_s = usual_pause([step.time for step in window.steps])
        self.state, self.why = state_of(self._run, self._end, bool(self.steps), now - window.now, pause_s, limits)
        if self.state == "lost" and setting is not False:
            step = self.steps[-1] if self.steps else 0
            action = "Look in the system's log for what ended it: out of memory, a signal, a machine that went down."
            self.alerts.append(Alert(STALLED.name, step, "error", self.why, action, self.rank))
        elif self._end is None:
            self.alerts += self._guard.tick(now)
