"""Where the entries of a log can go besides: TensorBoard, Weights & Biases, MLflow, Prometheus; a small class each."""

from __future__ import annotations

from halfstep.watch.settings import Exporter


def exporter_of(target: str, run: str) -> Exporter:
    """The exporter of ``target``, as halfstep.watch.settings.Watch.exporters describes it, for the run named ``run``.

    HalfstepError for a word that is none, or whose package is not installed.
    """
    raise NotImplementedError
