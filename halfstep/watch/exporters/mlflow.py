"""The log as a run of MLflow, by its client: the package ``mlflow-skinny`` is enough for a tracking server."""

from __future__ import annotations

import os
import re
import time
from typing import Any

from halfstep.errors import HalfstepError
from halfstep.watch.entry import Entry
from halfstep.watch.exporters.fact import Facts, describe
from halfstep.watch.exporters.package import load

_BATCH = 1000
"""Metrics, the most that MLflow takes at once."""
_LONGEST_S = 5.0
_STATES = {"finished": "FINISHED", "failed": "FAILED"}


class MLflow:
    """Writes into a run of its own in ``experiment``, or into that of MLFLOW_RUN_ID; MLFLOW_TRACKING_URI says where.

    Numbers are metrics, what the run is are its parameters, sentences are tags; metrics are sent 1,000 at a time, or
    after 5 s. HalfstepError when the store cannot be reached.
    """

    def __init__(self, experiment: str, run: str) -> None:
        entities = load("mlflow.entities", "mlflow")
        self._Metric, self._Param, self._RunTag = entities.Metric, entities.Param, entities.RunTag
        try:
            self._client = load("mlflow", "mlflow").MlflowClient()
            if found := os.environ.get("MLFLOW_RUN_ID"):
                started = self._client.get_run(found)
                self._client.update_run(found, status="RUNNING")
            else:
                started = self._client.create_run(self._experiment(experiment), run_name=run)
        except Exception as error:  # whatever its store raises, also a package that mlflow-skinny does not bring
            why = " ".join(str(error).split()).rstrip(".")
            fix = "Set MLFLOW_TRACKING_URI to a server, or for a database run: pip install mlflow"
            raise HalfstepError(f"exporter mlflow:{experiment}", why, fix) from None
        self._id: str = started.info.run_id
        self._params: dict[str, str] = dict(started.data.params)
        self._facts = Facts()
        self._metrics: list[Any] = []
        self._sent = time.monotonic()
        self._status = "KILLED"

    def write(self, entry: Entry) -> None:
        fact, kind = self._facts.of(entry), entry["kind"]
        milliseconds = int(1000 * fact.time)
        self._metrics += [
            self._Metric(_name(name), value, milliseconds, fact.step) for name, value in fact.numbers.items()
        ]
        tags: dict[str, str] = {}
        if fact.sentence:
            tags[_name(f"step-{fact.step:08d}/{fact.topic}")] = fact.sentence
        params: dict[str, str] = {}
        if kind == "run":
            # MLflow lets no parameter change: what a resumed process has differently becomes a tag.
            described = describe(entry)
            params = {name: value for name, value in described.items() if name not in self._params}
            tags |= {name: v for name, v in described.items() if name not in params and v != self._params[name]}
            self._params |= params
        elif kind == "end":
            self._status = _STATES.get(entry["state"], self._status)
        is_late = time.monotonic() - self._sent > _LONGEST_S
        if params or tags or is_late or len(self._metrics) >= _BATCH:
            self._send(params, tags)

    def close(self) -> None:
        self._send()
        self._client.set_terminated(self._id, self._status)

    def _send(self, params: dict[str, str] | None = None, tags: dict[str, str] | None = None) -> None:
        metrics, self._metrics = self._metrics, []
        self._sent = time.monotonic()
        for first in range(0, len(metrics), _BATCH):
            self._client.log_batch(self._id, metrics=metrics[first : first + _BATCH])
        if params or tags:
            self._client.log_batch(
                self._id,
                params=[self._Param(name, value) for name, value in (params or {}).items()],
                tags=[self._RunTag(name, value) for name, value in (tags or {}).items()],
            )

    def _experiment(self, name: str) -> str:
        found = self._client.get_experiment_by_name(name)
        return str(found.experiment_id if found else self._client.create_experiment(name))


def _name(name: str) -> str:
    """As MLflow takes it."""
    return re.sub(r"[^\w./ -]", "_", name)
