"""The smallest set of modules, and below them operations, that have to compute in fp32 for 16 bit to work.

    fp32 from every seed            the margin; fp32 that fails as well is no question of precision
    the policy as it stands         works from every seed: nothing to tune
    one captured step               what meets 16 bit, and how suspicious each of it is
    search                          fewest suspects with which a short run works (explain.search)
    below modules                   an operation in place of its module, where that takes less work to fp32
    confirm                         from all seeds, by the verdict of compare; a seed that fails joins the search

docs/tune.md says what a probe is and what each figure means.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from halfstep.compare.report import CompareReport, check_margin
from halfstep.compare.trial import Trial
from halfstep.diagnosis.advice import DOES_NOT, MENDS, Advice
from halfstep.diagnosis.capture import Capture
from halfstep.errors import HalfstepError, and_more
from halfstep.explain.audit import audit_of
from halfstep.explain.audited import AuditedOp
from halfstep.explain.cost import memory_ratios, time_ratios
from halfstep.explain.probe import Bench, Probe, Progress
from halfstep.explain.ranges import ranges_of
from halfstep.explain.rehearsal import capture_at
from halfstep.explain.search import Stopped, minimal_set
from halfstep.explain.suspects import (
    OP,
    blamed_in,
    ends_of,
    errors_of,
    in_order,
    largest,
    makers_of_nonfinite,
    producer_of,
    share_in_fp32,
    suspects_of,
    with_fp32,
    zeros_of,
)
from halfstep.explain.tune_report import (
    FP32_FAILS,
    NO_SET,
    NOT_CONFIRMED,
    Cost,
    Tried,
    TuneReport,
    check_policy_file,
    default_policy_file,
    policy_text,
)
from halfstep.files import write_whole
from halfstep.formats import SIXTEEN_BIT
from halfstep.hardware import Hardware, detect
from halfstep.policy import Policy, resolve
from halfstep.record import Operation, OperationRecorder, Record
from halfstep.source import Source

FP32 = Policy("fp32")
WORTH = 0.5
"""An operation's rule takes the place of a module's where it takes less than this part of the work to fp32. A rule for
a module is the plainer one, and covers what an operation's may miss."""


def tune(
    source: Source,
    policy: Policy,
    steps: int | None = None,
    seeds: int = 3,
    device: str | None = None,
    max_probes: int | None = None,
    minutes: float | None = None,
    margin_pct: float | None = None,
    policy_file: str | Path | None = None,
    progress: Progress = lambda what, num_windows: None,
) -> TuneReport:
    """Find the least that ``policy`` has to keep in fp32 to train ``source`` as well as fp32 does, and write it down.

    steps:      windows of each run; by default as many as the workload says, or 100.
    seeds:      runs of fp32, and of the policy that is found; a verdict takes three.
    max_probes, minutes: what the search may take. Then, and on Ctrl-C, the best set so far is kept.
    margin_pct: how much worse a final loss may be, in percent of fp32's mean; by default learned from fp32.
    policy_file: where the policy goes; by default the workload's name with ``.toml``. Nothing is written if the policy
                works as it stands, or nothing helps. A file that tune did not write is never overwritten.
    """
    hardware = detect(device)
    given, _ = resolve(policy, hardware)
    if not given.formats & SIXTEEN_BIT:
        raise HalfstepError(
            f"policy {policy}", f"it is {given} here, which computes nothing in 16 bit", "Use --policy fp16 or bf16."
        )
    steps = (source.default_steps or 100) if steps is None else steps
    for name, value in (("steps", steps), ("seeds", seeds), ("max_probes", max_probes), ("minutes", minutes)):
        if value is not None and value <= 0:
            raise HalfstepError(f"{name}={value}", "nothing can be tried with that", f"Use {name} above 0.")
    check_margin(margin_pct)
    file = default_policy_file(source) if policy_file is None else Path(policy_file)
    check_policy_file(file)
    try:
        bench = Bench(
            source, steps, seeds, device or hardware.kind,
            margin_pct=margin_pct, max_probes=max_probes, minutes=minutes, progress=progress,
        )  # fmt: skip
    except Stopped as stopped:
        raise HalfstepError(
            f"minutes={minutes:g}", f"fp32 itself was not done {stopped}", "Give more minutes, or fewer steps or seeds."
        ) from None
    tuning = _Tuning(bench, given, hardware)
    report = tuning.run()
    if not report.fp32:
        return report
    report = replace(report, policy_file=str(file))
    write_whole(file, policy_text(report, Policy.parse(report.tuned or "")))
    return report


class _Tuning:
    """One search: what it knows so far, and the best that it has seen."""

    def __init__(self, bench: Bench, policy: Policy, hardware: Hardware) -> None:
        self.bench, self.given, self.hardware = bench, policy, hardware
        # A stepper that promotes modules by itself would hide which ones it needs.
        self.policy = replace(policy, on_exhausted="stop")
        self.judged = bench.seeds[:1]  # the seeds that a set has to work from, the most telling first
        self._modules: list[str] = []
        self.suspects: list[str] = []
        self.record = Record()
        self.audit: Sequence[AuditedOp] = ()
        self.best: tuple[str, ...] | None = None
        self.minimal = False
        self.why: str | None = None  # of the policy as it stands
        self.log: list[Tried] = []

    def run(self) -> TuneReport:
        if not self.bench.seeds:
            return self._report(FP32_FAILS, f"fp32 fails as well: {self.bench.references[0].diverged}.")
        try:
            trials = self._search()
            verdict, reason = (NO_SET, self._say_outside()) if self.best is None else self._compare(trials)
        except (Stopped, KeyboardInterrupt) as error:
            how = str(error) or "by Ctrl-C"
            kept = "what is kept is the best so far" if self.best else "nothing else has been seen to work yet"
            return self._report(NOT_CONFIRMED, f"Stopped {how}; {kept}.", stopped=how)
        cost, advice = Cost(), tuple[Advice, ...]()
        with contextlib.suppress(Stopped, KeyboardInterrupt):
            cost, advice = self._measure(), self._advise()
        return self._report(verdict, reason, cost=cost, advice=advice)

    # The search.

    def _search(self) -> list[Trial]:
        """Find the best set; its trials from every seed."""
        while True:
            self.best, self.minimal = None, False
            if self._works(frozenset()):
                self.best, self.minimal = (), True
            else:
                self._find()
                if self.best is None:
                    return []
            failed = None
            trials = []
            for seed in self.bench.seeds:
                probe = self._probe(self.best, seed, confirms=True)
                if not probe.works:
                    failed = seed
                    break
                assert probe.trial is not None
                trials.append(probe.trial)
            if failed is None:
                return trials
            self.judged.insert(0, failed)

    def _find(self) -> None:
        """The fewest suspects that work from the seeds that are judged."""
        if not self.suspects:
            self._look()
        self._take(self.suspects)
        if self.best is not None:
            self._go_below_modules()

    def _take(self, suspects: Sequence[str]) -> None:
        result = minimal_set(suspects, self._works)
        self.best, self.minimal = result.found, result.minimal
        if result.stopped is not None:
            raise result.stopped

    def _works(self, names: frozenset[str]) -> bool:
        return all(self._probe(tuple(names), seed).works for seed in self.judged)

    def _probe(self, names: Sequence[str], seed: int, confirms: bool = False) -> Probe:
        what = "nothing" if not names else names[0] if len(names) == 1 else f"{len(names)} of {len(self.suspects)}"
        num_before = len(self.bench.known)
        probe = self.bench(self._policy_of(names), seed, f"{what} in fp32, seed {seed}", confirms)
        if len(self.bench.known) > num_before:
            self.log.append(Tried(self._ordered(names), seed, probe.why, confirms))
        if not names and self.why is None and probe.why:
            self.why = f"seed {seed}: {probe.why}"
        return probe

    def _policy_of(self, names: Sequence[str]) -> Policy:
        return with_fp32(self.policy, self._modules, self._ordered(names), self.suspects) if names else self.policy

    def _ordered(self, names: Iterable[str]) -> tuple[str, ...]:
        """In the order of the suspects, and what is none of them after it, so that one set has one policy."""
        places = {name: place for place, name in enumerate(self.suspects)}
        return tuple(sorted(names, key=lambda name: (places.get(name, len(places)), name)))

    def _look(self) -> None:
        """Capture a step that fails, or one early on where none does: what meets 16 bit, and how suspicious it is."""
        seed = self.judged[0]
        step = self._probe((), seed).step or self._early
        capture, _ = capture_at(self.bench.source, self.policy, step, seed, self.bench.device)
        self._modules = [name for name, _ in capture.model.named_modules()]
        self.record = _record(capture, self.policy)
        self.suspects = suspects_of(self.record)
        # What makes a non-finite value hides all who would after it, so that the step runs again with it in fp32.
        makers, record = list[str](), self.record
        while new := [name for name in makers_of_nonfinite(record) if name not in makers]:
            makers += new
            record = _record(capture, self._policy_of(makers))
        self.audit = _rows(lambda: audit_of(capture).ops)
        rows = _rows(lambda: ranges_of(capture).modules)
        ends = largest([*ends_of(rows).items(), *zeros_of(self.record).items()])
        self.suspects = in_order(self.suspects, makers, errors_of(self.audit), ends)

    @property
    def _early(self) -> int:
        """A step to look at where none fails: past the first ones, on which a fresh loss scale comes down."""
        return max(1, self.bench.steps // 10)

    def _go_below_modules(self) -> None:
        """Where a rule for a module's operations takes less to fp32 than the module, and works, have that instead."""
        assert self.best is not None
        before = self.best
        for module in [name for name in before if not name.startswith(OP)]:
            rest = tuple(name for name in self.best if name != module)
            most = self._share(rest) + WORTH * (self._share(self.best) - self._share(rest))
            blamed = blamed_in(self.record, module, self.audit)
            cheap = [name for name in blamed if self._share({name, *rest}) < most]
            if cheap and self._works(frozenset((*rest, cheap[0]))):
                self.best = self._ordered((*rest, cheap[0]))
            elif len(cheap) > 1 and self._share({*cheap, *rest}) < most and self._works(frozenset((*rest, *cheap))):
                self.best = self._ordered((*rest, *cheap))
        if self.best != before:
            self._take(self.best)  # an operation covers more than its module, so that others may have become idle

    # What comes of it.

    def _share(self, names: Iterable[str]) -> float:
        return share_in_fp32(self.record, names)

    def _report(self, verdict: str, reason: str, **more: Any) -> TuneReport:
        bench, names = self.bench, self.best or ()
        tuned = replace(self._policy_of(names), on_exhausted=self.given.on_exhausted) if names else None
        note = None
        if emulated := sorted(self.given.formats & self.hardware.emulated):
            note = (
                f"{', '.join(emulated)} ran through cpu16: its numbers are those of 16 bit, its speed is not, "
                "so that the times say nothing of a GPU."
            )
        return TuneReport(
            workload=bench.source.spec, device=self.hardware.name, steps=bench.steps, seeds=len(bench.references),
            policy=str(self.given), tuned=None if tuned is None else str(tuned), why=self.why, fp32=tuple(names),
            num_suspects=len(self.suspects), probes=bench.num_probes, minimal=self.minimal,
            verdict=verdict, reason=reason, margin=bench.margin, margin_from=bench.margin_from,
            note=note, tried=tuple(self.log), **more,
        )  # fmt: skip

    def _compare(self, trials: Sequence[Trial]) -> tuple[str, str]:
        """The word and the reason of compare for the trials of the best set."""
        source, references = self.bench.source.spec, self.bench.references
        compared = CompareReport.from_trials(
            source, self.hardware.name, self.bench.steps, len(references), (*references, *trials)
        )
        verdict = compared.policies[-1].verdict
        return verdict.word, verdict.reason

    def _measure(self) -> Cost:
        """What the best set costs, against the policy as it stood and against fp32."""
        if not self.best:
            return Cost()
        tuned, others = self._policy_of(self.best), (self.policy, FP32)
        self.bench.progress("what it costs", 0)
        times = time_ratios(self.bench.source, tuned, others, self.bench.device)
        memories = memory_ratios(self.bench.source, tuned, others, self.bench.device)
        return Cost(times[0], memories[0], times[1], memories[1], 100 * self._share(self.best))

    def _advise(self) -> tuple[Advice, ...]:
        """What mends it, each tried: the set that was found, and bf16 in place of fp16."""
        if self.why is None:
            return ()
        advice = []
        if self.best:
            text = f"keep {', '.join(self.best)} in fp32"
            advice.append(Advice(text, str(self._policy_of(self.best)), MENDS))
        able = self.hardware.native | self.hardware.emulated
        if self.given.compute == "fp16" and "bf16" in able:
            other = Policy("bf16")
            works = all(self.bench(other, seed, "bf16", confirms=True).works for seed in self.judged)
            advice.append(
                Advice("compute in bf16, which has the range of fp32", str(other), MENDS if works else DOES_NOT)
            )
        return tuple(advice)

    def _say_outside(self) -> str:
        """Where the fault is if it stays with all suspects in fp32: the line, which no rule reaches."""
        policy = self._policy_of(self.suspects)
        seed = next(seed for seed in self.judged if not self._probe(self.suspects, seed).works)
        probe = self._probe(self.suspects, seed)
        said = f"With everything in fp32 that a rule can name, seed {seed}: {probe.why}."
        capture, _ = capture_at(self.bench.source, policy, probe.step or self._early, seed, self.bench.device)
        record = _record(capture, policy)
        if made := producer_of(record):
            return f"{said} It is made by {_place(made)}, which no rule reaches: write .float() there."
        low = [o for o in record.operations if any(values.format in SIXTEEN_BIT for values in o.outputs)]
        left = list(dict.fromkeys(map(_place, low)))
        if left:
            return f"{said} What still computes in 16 bit, and no rule reaches: {and_more(left)}. Write .float() there."
        return f"{said} Nothing computes in 16 bit any more: what is left of the policy is its loss scale."


def _record(capture: Capture, policy: Policy) -> Record:
    """The operations of a captured step, up to where it raises if it does."""
    recorder = OperationRecorder(capture.model)
    with contextlib.suppress(Exception):
        capture.run(policy, under=[recorder])
    return recorder.read()


def _rows(measure: Callable[[], Any]) -> Any:
    """The rows of a report that only orders the suspects; without them, if it cannot be made of this model."""
    try:
        return measure()
    except Exception:
        return ()


def _place(operation: Operation) -> str:
    """An operation and where it stands, for a reader."""
    site = operation.site
    module = {None: "the loss function", "": "the model's own forward"}.get(site.module, site.module)
    where = f" at {Path(site.file).name}:{site.line}" if site.file else ""
    return f"{site.function or operation.op}{where} in {module}"
