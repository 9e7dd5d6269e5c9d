"""The JSON twins of the pages: what is known of the runs of a folder, as plain values."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfstep.errors import HalfstepError
from halfstep.report import json_number
from halfstep.watch.entry import Entry
from halfstep.watch.golden import Band
from halfstep.watch.metrics import METRICS
from halfstep.watch.reading import ranks_of
from halfstep.watch.run_state import ENDED, State
from halfstep.watch.runs import Runs
from halfstep.watch.shelf import Busy, Gone, Shelf

EVENTS = ("seam", "promotion", "reduction", "gap", "end", "explanation")
ALERT = ("rule", "step", "rank", "severity", "message", "action", "time")

# Of a look at many stores: for all of them together, for each, and to wait for each.
_LIST_S, _ALERTS_S, _BITE_S, _PATIENCE_S = 1.0, 0.3, 0.05, 0.2

Json = dict[str, Any]


@dataclass(frozen=True)
class View:
    """What a page shows of a run: the steps from ``first`` to ``last``, None for all, in ``points`` buckets."""

    first: int | None = None
    last: int | None = None
    points: int = 1000


class Api:
    """What the pages of the runs in ``folder`` show. Several threads may ask at once.

    golden: the band of the loss. Every answer has a ``version``; one that a page has ``seen`` is not made again, and
    None says so. Gone and Busy of halfstep.watch.shelf tell why there is no answer.
    """

    def __init__(self, folder: Path, golden: Band | None = None) -> None:
        self._folder, self._golden = folder, golden
        self._runs = Runs(folder)
        self._shelf = Shelf(self._runs)
        self._salt = secrets.token_hex(8)  # versions of another process, or of other golden runs, are others
        self._known: dict[str, _Known] = {}
        self._alerts: dict[tuple[str, int], list[Json]] = {}

    def close(self) -> None:
        """Close every store. Safe to call twice."""
        self._shelf.close()

    def has(self, name: str) -> bool:
        """Whether there is a run of this name."""
        try:
            self._shelf.folder_of(name)
        except Gone:
            return False
        return True

    def runs(self, seen: int | None = None) -> Json | None:
        """Every run of the folder in short."""
        deadline = time.monotonic() + _LIST_S
        try:
            names = self._runs.names()
        except HalfstepError:
            raise Gone("the folder of runs", "it is not there any more", "Start halfstep watch with another.") from None
        for name in self._known.keys() - set(names):
            self._forget(name)
        known = [known for name in names if (known := self._short(name, deadline))]
        content = {
            "folder": self._folder.name,
            "runs": [run.content for run in known],
            "is_complete": all(run.is_complete for run in known),
        }
        version = self._version(content)
        return None if version == seen else {**content, "version": version}

    def run(self, name: str, rank: int | None, view: View, seen: int | None = None) -> Json | None:
        """One rank of a run, the lowest unless told; alerts are those of all ranks."""
        ranks = self._ranks(name)
        rank = ranks[0] if rank is None else rank
        alerts = self._alerts_of(name, [other for other in ranks if other != rank])
        with self._shelf.look(name, rank) as (store, is_complete):
            run = {**store.summary(), "name": name}
            alerts = _in_order([*alerts, *map(_alert, store.entries(["alert"]))])
            version = self._version(name, rank, vars(view), store.version, is_complete, run, alerts)
            if version == seen:
                return None
            ranges = store.entries(["ranges"])
            return {
                "run": run,
                "version": version,
                "is_complete": is_complete,
                "range": _range([run], view),
                "series": store.series(METRICS, view.first, view.last, view.points),
                **store.marks(view.first, view.last, view.points),
                "alerts": alerts,
                "events": [_short_event(entry) for entry in store.entries(EVENTS, view.first, view.last)],
                "golden": self._band(view),
                "layers": store.layers(view.first, view.last, view.points),
                "ranges": ranges[-1] if ranges else None,
            }

    def compare(self, names: Sequence[str], metric: str, view: View, seen: int | None = None) -> Json | None:
        """One metric of several runs, each by its lowest rank."""
        ranks = {name: self._ranks(name)[0] for name in names}
        runs, versions = [], []
        for name, rank in ranks.items():
            with self._shelf.look(name, rank, _BITE_S) as (store, is_complete):
                runs.append({**store.summary(), "name": name})
                versions.append([store.version, is_complete])
        version = self._version(metric, vars(view), versions, runs)
        if version == seen:
            return None
        series = {}
        for name, rank in ranks.items():
            with self._shelf.look(name, rank, 0.0) as (store, _):
                series[name] = store.series([metric], view.first, view.last, view.points)[metric]
        return {
            "runs": runs,
            "version": version,
            "is_complete": all(is_complete for _, is_complete in versions),
            "metric": metric,
            "range": _range(runs, view),
            "series": series,
            "golden": self._band(view) if metric == "loss" else None,
        }

    def _ranks(self, name: str) -> Sequence[int]:
        ranks = ranks_of(self._shelf.folder_of(name))
        if not ranks:
            raise Gone(f"run {name}", "its log is not there any more", "Choose another run.")
        return ranks

    def _short(self, name: str, deadline: float) -> _Known | None:
        """A run in short; of one whose log has ended, and has not grown since, what was known of it."""
        known = self._known.get(name)
        try:
            stamp = _stamp(self._shelf.folder_of(name))
            if known and known.stamp == stamp:
                return known
            if time.monotonic() > deadline:
                return known or _unread(name, "it has not been read yet")
            with self._shelf.look(name, self._ranks(name)[0], _BITE_S, _PATIENCE_S) as (store, is_complete):
                run = {**store.summary(), "name": name}
        except (Gone, FileNotFoundError):
            self._forget(name)
            return None
        except Busy as busy:
            return known or _unread(name, busy.why)
        is_settled = is_complete and run["state"] in ENDED
        self._known[name] = _Known(run, is_complete, stamp if is_settled else None)
        return self._known[name]

    def _forget(self, name: str) -> None:
        self._known.pop(name, None)
        self._shelf.drop(name)
        for key in [key for key in self._alerts.copy() if key[0] == name]:
            self._alerts.pop(key, None)

    def _alerts_of(self, name: str, ranks: Sequence[int]) -> list[Json]:
        """Alerts of these ranks: looked for anew where there is time, those longest not looked at first."""
        deadline = time.monotonic() + _ALERTS_S
        places = {key: place for place, key in enumerate(self._alerts.copy())}
        for rank in sorted(ranks, key=lambda rank: places.get((name, rank), -1)):
            if time.monotonic() > deadline:
                break
            try:
                with self._shelf.look(name, rank, _BITE_S, _PATIENCE_S) as (store, _):
                    found = [_alert(entry) for entry in store.entries(["alert"])]
            except (Gone, Busy):
                continue
            self._alerts.pop((name, rank), None)  # so that the dict has the one looked at last at its end
            self._alerts[name, rank] = found
        return [alert for rank in ranks for alert in self._alerts.get((name, rank), [])]

    def _version(self, *parts: Any) -> int:
        text = json.dumps([self._salt, *parts])
        # 48 bits: a whole number of JavaScript has 53.
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest())

    def _band(self, view: View) -> Json | None:
        """The part of the golden band in view, in at most ``points`` blocks, none of them narrower than it was."""
        band = self._golden
        if band is None:
            return None
        first = -1 if view.first is None else view.first
        inside = [i for i, step in enumerate(band.steps) if step >= first]
        if view.last is not None:  # with the block that the last step lies in
            inside = inside[: sum(band.steps[i] < view.last for i in inside) + 1]
        size = max(1, -(-len(inside) // view.points))
        groups = [inside[start : start + size] for start in range(0, len(inside), size)]
        return {
            "steps": [band.steps[group[-1]] for group in groups],
            "low": [json_number(min(band.low[i] for i in group)) for group in groups],
            "high": [json_number(max(band.high[i] for i in group)) for group in groups],
        }


@dataclass(frozen=True)
class _Known:
    """What was last known of a run, whether that was all of its log, and the state of its files if it has ended."""

    content: Json
    is_complete: bool
    stamp: Sequence[object] | None


def _stamp(folder: Path) -> Sequence[object]:
    with os.scandir(folder) as found:
        files = [(file.name, file.stat()) for file in found if file.name.startswith("rank-")]
    return sorted((name, stat.st_size, stat.st_mtime_ns) for name, stat in files)


def _unread(name: str, why: str) -> _Known:
    unknown = (
        "policy effective reason device versions num_ranks first_step last_step num_steps started updated num_skipped "
        "num_replays num_alerts worst loss grad_norm scale seconds session"
    )
    state: State = "reading"
    content = dict.fromkeys(unknown.split()) | {"name": name, "state": state, "why": why, "rank": 0, "ranks": []}
    return _Known(content, False, None)


def _range(runs: Sequence[Json], view: View) -> list[int | None]:
    firsts = [run["first_step"] for run in runs if run["first_step"] is not None]
    lasts = [run["last_step"] for run in runs if run["last_step"] is not None]
    first = min(firsts, default=None) if view.first is None else view.first
    return [first, max(lasts, default=None) if view.last is None else view.last]


def _alert(entry: Entry) -> Json:
    return {"rank": 0, **{key: entry.get(key) for key in ALERT if key in entry or key != "rank"}}


def _in_order(alerts: Sequence[Json]) -> list[Json]:
    """By time; one that several ranks have written stands once."""
    once = {tuple(alert[key] for key in ("rule", "step", "rank", "message")): alert for alert in alerts}
    times = {key: alert["time"] for key, alert in once.items()}  # of which a line may hold anything
    return [once[key] for key in sorted(once, key=lambda key: times[key] if isinstance(times[key], float) else 0.0)]


def _short_event(entry: Entry) -> Json:
    """An entry without what is long: the operations and tables of an explanation."""
    if entry["kind"] != "explanation":
        return entry
    return {key: value for key, value in entry.items() if key == "producer" or not isinstance(value, list | dict)}
