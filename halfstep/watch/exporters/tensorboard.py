"""The log as an event file of TensorBoard, by the package ``tensorboard`` alone."""

from __future__ import annotations

import itertools
import os
import platform
import time
from pathlib import Path
from typing import Any

from halfstep.errors import HalfstepError
from halfstep.watch.entry import Entry
from halfstep.watch.exporters.fact import Facts, describe
from halfstep.watch.exporters.package import load

_counter = itertools.count()


class TensorBoard:
    """Appends to an event file of its own in ``FOLDER/RUN``. HalfstepError if that cannot be made.

    Scalars have the names of :class:`Facts`, texts its topics; what the run is stands under ``run``.
    At a seam TensorBoard is told to forget the steps that the run computes again.
    """

    def __init__(self, folder: str, run: str) -> None:
        self._event = load("tensorboard.compat.proto.event_pb2", "tensorboard")
        self._summary = load("tensorboard.compat.proto.summary_pb2", "tensorboard")
        self._text = load("tensorboard.plugins.text.summary_v2", "tensorboard")
        records = load("tensorboard.summary.writer.record_writer", "tensorboard")
        self._facts = Facts()
        # TensorBoard reads the files of a run in the order of their names.
        name = f"events.out.tfevents.{int(time.time()):010d}.{platform.node()}.{os.getpid()}.{next(_counter)}"
        path = Path(folder, run, name)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Not EventFileWriter: a full disk ends its thread with a traceback, where here it raises out of write().
            self._records = records.RecordWriter(open(path, "xb"))  # noqa: SIM115
            self._put(time.time(), 0, file_version="brain.Event:2")
        except OSError as error:
            raise HalfstepError(
                f"exporter tensorboard:{folder}", f"{path} cannot be written ({error.strerror})", "Name another folder."
            ) from None

    def write(self, entry: Entry) -> None:
        fact = self._facts.of(entry)
        if fact.restarts:
            start = self._event.SessionLog(status=self._event.SessionLog.START)
            self._put(fact.time, fact.step, session_log=start)
        if fact.numbers:
            values = [self._summary.Summary.Value(tag=tag, simple_value=v) for tag, v in fact.numbers.items()]
            self._put(fact.time, fact.step, summary=self._summary.Summary(value=values))
        if fact.sentence:
            self._put_text(fact.time, fact.step, fact.topic, fact.sentence)
        if entry["kind"] == "run":
            rows = "".join(f"| {name} | {value.replace('|', '&#124;')} |\n" for name, value in describe(entry).items())
            self._put_text(fact.time, fact.step, "run", f"| | |\n|---|---|\n{rows}")

    def close(self) -> None:
        self._records.close()

    def _put_text(self, wall_time: float, step: int, tag: str, text: str) -> None:
        self._put(wall_time, step, summary=self._text.text_pb(tag, text))

    def _put(self, wall_time: float, step: int, **what: Any) -> None:
        self._records.write(self._event.Event(wall_time=wall_time, step=step, **what).SerializeToString())
        self._records.flush()
