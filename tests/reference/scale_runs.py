"""Runs of a loss scale, simulated in plain Python: what the engine tells of them, and the guard in the loop."""

from dataclasses import asdict

from halfstep.policy import LossScale
from halfstep.watch.entry import RunStart, Step
from halfstep.watch.guard import Guard

EVERY = 10
PARAMETERS = ("body.0.weight", "body.0.bias", "head.weight")


class Run:
    """One run. ``usable(step)`` is the largest scale at which the gradient of a step is finite.

    fault(step) -> share of elements that are not finite at any scale, 0.0 for none; loss(step) -> the loss.
    Steps are seen late, EVERY at a time, and after the decision of the last one of them, as the engine's watcher does.
    """

    def __init__(self, usable=lambda step: 2.0**15, *, fault=lambda step: 0.0, loss=lambda step: 2.0, replay=False,
                 settings=None, watch=None, num_ranks=1, **scale):  # fmt: skip
        self.settings = LossScale(**{"kind": "dynamic", **scale})
        self.usable, self.fault, self.loss, self.replay = usable, fault, loss, replay
        self.start = RunStart(0.0, num_ranks=num_ranks, session="a", scale=asdict(self.settings))
        self.guard = Guard(self.start, watch)
        self.scale = self.settings.init if self.settings.kind != "none" else 1.0
        self.num_clean = self.num_overflows = self.step = 0
        self.entries, self.alerts, self.reductions, self.waiting, self.skipped = [], [], [], [], []

    def run(self, num_steps):
        for _ in range(num_steps):
            self.one()
        self.deliver()
        return self

    def see(self, entry):
        self.entries.append(entry)
        self.alerts += self.guard.see(entry)

    def deliver(self):
        for step in self.waiting:
            self.see(step)
        self.waiting = []

    def share(self):
        """Of the elements that are not finite at the scale as it is: an overflow takes all of them along."""
        overflows = self.settings.kind != "none" and self.scale > self.usable(self.step)
        return 1.0 if overflows else self.fault(self.step)

    def one(self):
        self.step += 1
        began, num_replays = self.scale, 0
        while self.replay and self.share() and self.scale > self.settings.floor:
            share, at = self.share(), self.scale
            self.scale *= self.settings.backoff
            num_replays += 1
            told = {"step": self.step, "micro_batch": 0, "scale": self.scale, "overflowed_at": at}
            told |= {"parameters": PARAMETERS, "nonfinite_share": share}
            self.see({"kind": "overflow", "time": float(self.step), **told})
        share = self.share()
        if share and num_replays:
            self.scale = began  # undone
        loss = self.loss(self.step)
        bad = {} if not share else {
            "applied": False, "reason": "the gradient norm is inf", "nonfinite_share": None,
            "nonfinite_at_most": share, "parameters": PARAMETERS,
        }  # fmt: skip
        if share:
            self.skipped.append(self.step)
        norm = float("inf") if share else 1.0
        now = float(self.step)
        self.waiting.append(Step(self.step, now, loss, norm, self.scale, num_replays=num_replays, **bad))
        if self.settings.kind == "dynamic":
            self.update(bool(share))
        if self.step % EVERY == 0:
            if self.guard.lowers_scale and self.scale > self.settings.floor:
                self.scale *= self.settings.backoff
                self.num_clean = 0
                self.reductions.append(self.step)
                self.see({"kind": "reduction", "time": 0.0, "step": self.step, "scale": self.scale})
            self.deliver()

    def update(self, found):
        s = self.settings
        self.num_overflows = self.num_overflows + 1 if found else 0
        self.num_clean = 0 if found else self.num_clean + 1
        if found and self.num_overflows >= s.hysteresis:
            self.scale = max(s.floor, self.scale * s.backoff)
        if self.num_clean == s.interval:
            self.scale, self.num_clean = min(s.ceiling, self.scale * s.growth), 0

    def replayed(self, watch=None):
        """The alerts of another guard that sees the same entries."""
        guard = Guard(self.start, watch)
        return [alert for entry in self.entries for alert in guard.see(entry)]

    def said(self, *rules):
        """(rule, step) of the alerts, of some rules only."""
        return [(alert.rule, alert.step) for alert in self.alerts if not rules or alert.rule in rules]
