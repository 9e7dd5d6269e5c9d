"""Where the entries of a log can go besides: TensorBoard, Weights & Biases, MLflow, Prometheus; a small class each.

Each needs a package of its own, imported when somebody asks for it. An exporter is called from a thread of its own, and
what fails in it is raised out of ``write``: nothing is swallowed here.
"""

from __future__ import annotations

from collections.abc import Callable

from halfstep.errors import HalfstepError
from halfstep.watch.exporters.mlflow import MLflow
from halfstep.watch.exporters.prometheus import PrometheusFile
from halfstep.watch.exporters.tensorboard import TensorBoard
from halfstep.watch.exporters.wandb import WeightsAndBiases
from halfstep.watch.settings import Exporter

_KINDS: dict[str, tuple[str, Callable[[str, str], Exporter]]] = {
    "tensorboard": ("FOLDER", TensorBoard),
    "wandb": ("PROJECT", WeightsAndBiases),
    "mlflow": ("EXPERIMENT", MLflow),
    "prometheus": ("FILE", PrometheusFile),
}


def exporter_of(target: str, run: str) -> Exporter:
    """The exporter of ``target``, as halfstep.watch.settings.Watch.exporters describes it, for the run named ``run``.

    HalfstepError for a word that is none, a package that is not installed, or a tool that cannot be reached.
    """
    kind, _, where = target.partition(":")
    if kind not in _KINDS or not where:
        known = ", ".join(f"{name}:{place}" for name, (place, _) in _KINDS.items())
        raise HalfstepError(f"exporter {target!r}", "no such exporter", f"Use one of {known}.")
    return _KINDS[kind][1](where, run)
