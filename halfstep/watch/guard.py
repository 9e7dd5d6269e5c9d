"""The guard: it runs every rule over the window, says a thing once, and decides when the loss scale is lowered."""

from __future__ import annotations

import importlib
import math
import pkgutil
from collections.abc import Mapping
from functools import cache

from halfstep.errors import HalfstepError
from halfstep.events import Alert
from halfstep.watch import rules
from halfstep.watch.entry import Entry, RunStart, Step
from halfstep.watch.golden import Band
from halfstep.watch.rule import Finding, Rule
from halfstep.watch.settings import Watch
from halfstep.watch.window import SIZE, Window


@cache
def all_rules() -> Mapping[str, Rule]:
    """Every rule by its name, in the order of their names."""
    names = sorted(module.name for module in pkgutil.iter_modules(rules.__path__))
    found = [importlib.import_module(f"{rules.__name__}.{name}").RULE for name in names]
    return {rule.name: rule for rule in found}


class Guard:
    """The rules over one rank of a run. The same entries give the same alerts, live and in a replay.

    Entries come in the order of the log. After each, :attr:`lowers_scale` says whether the scale should be lowered
    once. Who lowers it says so with an entry of kind ``reduction``, after whose ``step`` the lower scale holds.
    """

    def __init__(self, run: RunStart, settings: Watch | None = None, golden: Band | None = None) -> None:
        self._golden = golden
        self._rules: dict[str, list[tuple[Rule, Mapping[str, float]]]] = {}  # by the kind that they are called after
        for rule, limits in _chosen(settings or Watch()):
            for kind in rule.kinds:
                self._rules.setdefault(kind, []).append((rule, limits))
        self._begin(run)

    def _begin(self, run: RunStart) -> None:
        self.window = Window(run, self._golden)
        self._forget()

    def _forget(self) -> None:
        self.lowers_scale = False
        self._standing: dict[str, str] = {}  # by rule: the situation that its last look found
        # By rule and situation: the step at which a look found it last, and the steps without it that make it news.
        self._held: dict[tuple[str, str], tuple[int, int]] = {}

    def see(self, entry: Entry | Step) -> list[Alert]:
        """The alerts that an entry brings."""
        window = self.window
        if isinstance(entry, Step):
            window.add(entry)
            return self._judge("step")
        kind = entry["kind"]
        if kind == "step":
            return self.see(Step.from_entry(entry))
        if kind == "run":
            # A log that was lost and is made anew begins with the line of the same process once more.
            if (run := RunStart.from_entry(entry)).session != window.run.session:
                self._begin(run)
        elif kind == "seam":
            window.resume(entry["step"])
            self._forget()
        elif kind == "overflow":
            window.overflow(entry)
        elif kind == "reduction":
            window.reduce(entry["step"])
            self.lowers_scale = False
        elif kind == "promotion":
            window.promote(entry)
            self.lowers_scale = False
        elif kind == "layers":
            window.add_layers(entry)
        elif kind == "updates":
            window.updates = entry
        elif kind == "ranges":
            window.ranges = entry
        elif kind == "ranks":
            window.ranks.append(entry)
        return self._judge(kind)

    def tick(self, now: float) -> list[Alert]:
        """The alerts of a run that has been silent until ``now``, in seconds."""
        self.window.now = now
        return self._judge("step")

    def _judge(self, kind: str) -> list[Alert]:
        alerts: list[Alert] = []
        if not self.window.steps:
            return alerts
        lowers = False
        for rule, limits in self._rules.get(kind, ()):
            try:
                finding = rule.check(self.window, limits)
            except Exception as error:  # never worth a run that trains
                finding = _failed(error)
            if finding is not None:
                lowers |= finding.lowers_scale
                if self._is_news(rule.name, finding.situation):
                    alerts.append(self._alert(rule, finding))
            elif self._standing:
                self._standing.pop(rule.name, None)
        if kind == "step":
            self.lowers_scale = lowers and (self.lowers_scale or self._is_due())
        return alerts

    def _is_news(self, rule: str, situation: str) -> bool:
        """Whether the situation was never there, or gone for a window; for twice as long with every return.

        So what comes again and again, as a batch of every epoch, is told less and less.
        """
        step = self.window.last.step
        held, quiet = self._held.get((rule, situation), (None, SIZE // 2))
        stands = self._standing.get(rule) == situation
        is_news = not stands and (held is None or step - held > quiet)
        self._standing[rule] = situation
        self._held[rule, situation] = step, 2 * quiet if is_news else quiet
        return is_news

    def _alert(self, rule: Rule, finding: Finding) -> Alert:
        step = finding.step if finding.step is not None else self.window.last.step
        severity = finding.severity or rule.severity
        return Alert(rule.name, step, severity, finding.message, finding.action, self.window.run.rank)

    def _is_due(self) -> bool:
        """Whether the scale was not lowered in this window, and the last step is one more that asks for it."""
        window, step = self.window, self.window.last.step
        is_first = window.reduced_at is None or step - window.reduced_at >= SIZE
        return is_first and bool(window.faults) and window.faults[-1].step == step


def _failed(error: Exception) -> Finding:
    return Finding(
        f"this rule failed: {type(error).__name__}: {error}",
        "Training goes on, and so do the other rules; please report it.",
        "failed",
        severity="note",
    )


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
            for word, number in value.items():
                if isinstance(number, bool) or not isinstance(number, int | float) or not 0 <= number < math.inf:
                    raise HalfstepError(
                        f"{word} = {number!r} of rule {name}",
                        "a limit is a number",
                        f"Its default is {limits[name][word]}.",
                    )
            limits[name] = {**limits[name], **value}
        elif value is not True:
            raise HalfstepError(f"rule {name} = {value!r}", "a rule is on, off, or has limits", "Use false or a table.")
    return [(rule, limits[name]) for name, rule in chosen.items()]
