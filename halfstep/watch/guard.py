"""The guard: it runs every rule over the window, says a thing once, and decides when the loss scale is lowered."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from functools import cache

from halfstep.errors import HalfstepError
from halfstep.events import Alert
from halfstep.watch import rules
from halfstep.watch.entry import Entry, RunStart, Step
from halfstep.watch.golden import Band
from halfstep.watch.rule import Rule
from halfstep.watch.settings import Watch
from halfstep.watch.window import SIZE, Window

MOST_REDUCTIONS = 2
"""Reductions of the scale in a row; what two do not mend, no scale does."""


@cache
def all_rules() -> Mapping[str, Rule]:
    """Every rule by its name, in the order of their names."""
    names = sorted(module.name for module in pkgutil.iter_modules(rules.__path__))
    found = [importlib.import_module(f"{rules.__name__}.{name}").RULE for name in names]
    return {rule.name: rule for rule in found}


class Guard:
    """The rules over one rank of a run. The same entries give the same alerts, live and in a replay.

    Entries come in the order of the log. After each, :attr:`lowers_scale` says whether the scale should be lowered
    once; whoever can do it calls :meth:`lowered`.
    """

    def __init__(self, run: RunStart, settings: Watch | None = None, golden: Band | None = None) -> None:
        self.window = Window(run, golden)
        self._rules = _chosen(settings or Watch())
        self._said: dict[str, tuple[str, int]] = {}  # of a rule that fires: the situation, and the step it last held
        self._last_reduction: int | None = None
        self.lowers_scale = False

    def see(self, entry: Entry | Step) -> list[Alert]:
        """The alerts that an entry brings."""
        window = self.window
        if isinstance(entry, Step):
            window.add(entry)
            self._forgive()
            return self._judge()
        kind = entry["kind"]
        if kind == "overflow":
            window.overflow(entry)
        elif kind == "seam":
            window.resume(entry["step"])
        elif kind == "layers":
            window.layers.append(entry)
        elif kind == "updates":
            window.updates = entry
        elif kind == "ranges":
            window.ranges = entry
        return []

    def tick(self, now: float) -> list[Alert]:
        """The alerts of a run that has been silent until ``now``, in seconds."""
        if not self.window.steps:
            return []
        self.window.now = now
        return self._judge()

    def lowered(self) -> None:
        """The scale was lowered because the guard asked for it."""
        self.lowers_scale = False

    def _judge(self) -> list[Alert]:
        alerts = []
        for rule, limits in self._rules:
            finding = rule.check(self.window, limits)
            if finding is None:
                continue
            step = self.window.last.step
            situation, held = self._said.get(rule.name, (None, step))
            self._said[rule.name] = (finding.situation, step)
            if finding.lowers_scale:
                self._lower(step)
            if finding.situation == situation and step - held <= SIZE:
                continue
            alerts.append(
                Alert(
                    rule.name,
                    finding.step if finding.step is not None else step,
                    finding.severity or rule.severity,
                    finding.message,
                    finding.action,
                    self.window.run.rank,
                )
            )
        return alerts

    def _lower(self, step: int) -> None:
        """Ask for a lower scale, once a window and MOST_REDUCTIONS times in a row."""
        is_due = self._last_reduction is None or step - self._last_reduction >= SIZE
        if is_due and self.window.num_reductions < MOST_REDUCTIONS:
            self.lowers_scale = True
            self._last_reduction = step
            self.window.num_reductions += 1

    def _forgive(self) -> None:
        """A whole window without a non-finite gradient starts the count of reductions anew."""
        if self.window.num_reductions and len(self.window.shares) == SIZE and not any(self.window.shares):
            self.window.num_reductions = 0


def _chosen(settings: Watch) -> list[tuple[Rule, Mapping[str, float]]]:
    """The rules that are on, with their limits."""
    chosen = dict(all_rules())
    limits: dict[str, Mapping[str, float]] = {name: rule.limits for name, rule in chosen.items()}
    for name, value in settings.rules.items():
        if name not in chosen:
            raise HalfstepError(f"rule {name!r}", "no such rule of the guard", f"There are {', '.join(all_rules())}.")
        if value is False:
            del chosen[name]
        elif isinstance(value, Mapping):
            if unknown := sorted(value.keys() - limits[name].keys()):
                raise HalfstepError(
                    f"{unknown[0]!r} of rule {name}", "no such limit", f"It has {', '.join(limits[name]) or 'none'}."
                )
            limits[name] = {**limits[name], **value}
        elif value is not True:
            raise HalfstepError(f"rule {name} = {value!r}", "a rule is on, off, or has limits", "Use false or a table.")
    return [(rule, limits[name]) for name, rule in chosen.items()]
