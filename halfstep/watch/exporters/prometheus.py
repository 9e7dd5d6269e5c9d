"""Runs in Prometheus' text format, by the package ``prometheus_client``: for /metrics, and for the node exporter."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from halfstep.files import write_whole
from halfstep.watch.entry import Entry
from halfstep.watch.exporters.fact import Facts
from halfstep.watch.exporters.package import load
from halfstep.watch.run_state import STATES

_LABELS = {"run": "name", "rank": "rank", "policy": "policy"}
_GAUGES = {
    "step": ("last_step", "Last optimizer step."),
    "loss": ("loss", "True loss of the last step."),
    "grad_norm": ("grad_norm", "True global 2-norm of the gradient of the last step, before clipping."),
    "loss_scale": ("scale", "Loss scale of the last step."),
    "seconds_per_step": ("seconds", "Median time between two of the last 100 steps."),
    "last_entry_timestamp_seconds": ("updated", "When the run last wrote to its log, in seconds since 1970."),
}
_COUNTERS = {
    "skipped_steps": ("num_skipped", "Steps that left the weights alone."),
    "replays": ("num_replays", "Micro-batches that ran again at a lower loss scale."),
}
_EVERY_S = 5.0


def metrics_text(runs: Sequence[Mapping[str, Any]]) -> str:
    """The page of metrics of ``runs``, as halfstep.watch.runs describes each; what is not known is left out.

    ``alert_counts``, a list of [rule, severity, count], gives alerts their labels.
    HalfstepError when prometheus_client is not installed.
    """
    exposition = load("prometheus_client.exposition", "prometheus-client")
    text: bytes = exposition.generate_latest(_Collector(runs))
    return text.decode()


class _Collector:
    def __init__(self, runs: Sequence[Mapping[str, Any]]) -> None:
        self._runs = [(run, [_label(run.get(key)) for key in _LABELS.values()]) for run in runs]
        self._core = load("prometheus_client.core", "prometheus-client")

    def collect(self) -> Iterable[Any]:
        for metric, (key, note) in _GAUGES.items():
            yield self._family(self._core.GaugeMetricFamily, metric, key, note)
        for metric, (key, note) in _COUNTERS.items():
            yield self._family(self._core.CounterMetricFamily, metric, key, note)
        alerts = self._core.CounterMetricFamily(
            "halfstep_alerts", "Alerts of the guard.", labels=(*_LABELS, "rule", "severity")
        )
        states = self._core.GaugeMetricFamily(
            "halfstep_state", "1 for the state that the run is in.", labels=(*_LABELS, "state")
        )
        for run, labels in self._runs:
            for rule, severity, count in run.get("alert_counts") or ():
                alerts.add_metric([*labels, _label(rule), _label(severity)], count)
            for state in STATES:
                states.add_metric([*labels, state], float(run.get("state") == state))
        yield alerts
        yield states

    def _family(self, kind: Any, metric: str, key: str, note: str) -> Any:
        family = kind(f"halfstep_{metric}", note, labels=_LABELS)
        for run, labels in self._runs:
            if (value := run.get(key)) is not None:
                family.add_metric(labels, float(value))
        return family


def _label(value: object) -> str:
    """Its text, as far as UTF-8 has it; an empty label is, to Prometheus, one that is not there."""
    return "" if value is None else str(value).encode(errors="replace").decode()


class PrometheusFile:
    """Keeps the file at ``path`` up to date for the textfile collector of the node exporter, whole at any time.

    It is written every 5 s at most, and at once at an alert and at the end. HalfstepError if it cannot be.
    """

    def __init__(self, path: str, run: str) -> None:
        self._path = path
        self._facts = Facts()
        self._alerts: Counter[tuple[str, str]] = Counter()
        self._run: dict[str, Any] = {"name": run, "num_skipped": 0, "num_replays": 0}
        self._saved = -math.inf
        write_whole(path, metrics_text([]))

    def write(self, entry: Entry) -> None:
        fact, kind = self._facts.of(entry), entry["kind"]
        self._run["updated"] = fact.time
        if kind == "run":
            self._run |= {"policy": entry.get("policy", ""), "rank": entry.get("rank", 0), "state": "running"}
        elif kind == "step":
            numbers = fact.numbers
            self._run |= {"last_step": fact.step} | {name: numbers[name] for name in ("loss", "grad_norm", "scale")}
            self._run["num_skipped"] += not numbers["applied"]
            self._run["num_replays"] += numbers["num_replays"]
        elif kind == "alert":
            self._alerts[entry["rule"], entry["severity"]] += 1
        elif kind == "end":
            self._run["state"] = entry["state"]
        if kind in ("alert", "end") or time.monotonic() - self._saved > _EVERY_S:
            self._save()

    def close(self) -> None:
        self._save()

    def _save(self) -> None:
        self._saved = time.monotonic()
        alerts = [[rule, severity, count] for (rule, severity), count in self._alerts.items()]
        run = {**self._run, "seconds": self._facts.usual_pause, "alert_counts": alerts}
        write_whole(self._path, metrics_text([run]))
