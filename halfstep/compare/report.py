"""The result of a comparison: what each policy reached over the seeds, what it cost, and the verdict on it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from io import StringIO
from statistics import fmean, median, median_low, stdev
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from halfstep.compare.trial import Trial, by_policy
from halfstep.compare.verdict import Verdict, judge, sd_lower_bound
from halfstep.errors import HalfstepError
from halfstep.report import count_text, json_number, number

_STYLE = {
    "equivalent": "green",
    "not worse": "green",
    "worse": "red",
    "materially worse": "bold red",
    "diverged": "bold red",
    "inconclusive": "yellow",
    "no verdict": "yellow",
}


@dataclass(frozen=True)
class PolicyReport:
    """One policy over its seeds. None means not known: a device that cannot tell, or too few seeds.

    values:  the final loss of each seed, in the order of the seeds; not finite where the trial diverged.
    mean, sd: over the finite ones alone. peak_memory_mib is the largest of the seeds, samples_per_s their median.
    steps_applied, steps_skipped, replays: sums over the seeds.
    scale_last: the loss scale after the last step; of several seeds the lower middle one.
    """

    policy: str
    effective: str
    values: tuple[float, ...]
    mean: float
    sd: float | None
    peak_memory_mib: float | None
    memory_saving_pct: float | None
    samples_per_s: float | None
    speedup: float | None
    steps_applied: int
    steps_skipped: int
    replays: int
    scale_min: float | None
    scale_max: float | None
    scale_last: float | None
    verdict: Verdict
    why: str = "as asked for"

    @property
    def num_diverged(self) -> int:
        return sum(not math.isfinite(value) for value in self.values)

    @property
    def reason(self) -> str:
        """The reason of the verdict, and how the policy came to run as it did where there is something to say."""
        return self.verdict.reason if self.why == "as asked for" else f"{self.verdict.reason} It ran {self.why}."

    @property
    def asked_and_ran(self) -> str:
        """The policy asked for, and what ran in its place if that differs."""
        asked = self.policy.removesuffix(" (2)")
        return self.policy if asked == self.effective else f"{self.policy} -> {self.effective}"

    def to_dict(self) -> dict[str, Any]:
        """Strict JSON: NaN and inf are the strings "NaN", "Infinity", "-Infinity"; what is not known is null."""
        return {
            "policy": self.policy,
            "effective": self.effective,
            "final_loss": {
                "mean": json_number(self.mean),
                "sd": json_number(self.sd),
                "values": [json_number(value) for value in self.values],
            },
            "peak_memory_mib": json_number(self.peak_memory_mib),
            "memory_saving_pct": json_number(self.memory_saving_pct),
            "samples_per_s": json_number(self.samples_per_s),
            "speedup": json_number(self.speedup),
            "steps_applied": self.steps_applied,
            "steps_skipped": self.steps_skipped,
            "replays": self.replays,
            "scale": {
                "min": json_number(self.scale_min),
                "max": json_number(self.scale_max),
                "last": json_number(self.scale_last),
            },
            "verdict": {key: json_number(value) for key, value in self.verdict.to_dict().items()},
        }


@dataclass(frozen=True)
class CompareReport:
    """What ``halfstep compare`` returns. The first policy is the reference that the others are judged against.

    seeds: how many were asked for. interrupted: some trials are missing, the report is of those that ended.
    """

    workload: str
    device: str
    steps: int
    seeds: int
    policies: tuple[PolicyReport, ...]
    interrupted: bool = False

    @classmethod
    def from_trials(
        cls,
        workload: str,
        device: str,
        steps: int,
        seeds: int,
        trials: Sequence[Trial],
        margin_pct: float | None = None,
        interrupted: bool = False,
    ) -> CompareReport:
        """The report of ``trials``; ``margin_pct`` is in percent of the reference's mean final loss."""
        check_margin(margin_pct)
        arms = by_policy(trials)
        if not arms:
            raise HalfstepError("a comparison without a trial", "there is nothing to judge", "Let one trial end.")
        reference_name, reference = next(iter(arms.items()))
        policies = tuple(
            _summarize(name, arm, reference, _verdict(reference_name, reference, name, arm, margin_pct))
            for name, arm in arms.items()
        )
        return cls(workload, device, steps, seeds, policies, interrupted)

    @property
    def found(self) -> bool:
        """Whether a policy is worse, materially worse or diverged: exit status 1."""
        return any(policy.verdict.found for policy in self.policies)

    @property
    def headline(self) -> str:
        """The verdict in one sentence."""
        reference, *candidates = self.policies
        said = "; ".join(_phrase(candidate, reference.policy) for candidate in candidates)
        if not candidates:
            said = f"{reference.policy} ran alone, there is nothing to judge it against"
        done = len(reference.values)
        seeds = f"{done} of {self.seeds} seeds" if done < self.seeds else count_text(self.seeds, "seed")
        return f"{self.workload} over {seeds}{', interrupted' if self.interrupted else ''}: {said}."

    @property
    def facts(self) -> str:
        return f"{count_text(self.steps, 'step')} a trial on {self.device}"

    def to_dict(self) -> dict[str, Any]:
        """The report as strict JSON; ``interrupted`` is there only when it is true."""
        return {
            "workload": self.workload,
            "device": self.device,
            "steps": self.steps,
            "seeds": self.seeds,
            "policies": [policy.to_dict() for policy in self.policies],
        } | ({"interrupted": True} if self.interrupted else {})

    def render(self, console: Console) -> None:
        """Print the headline, the table and the reasons."""
        console.print(Text(self.headline, style="bold"))
        console.print(Text(f"{self.facts}\n"))
        console.print(self._table())
        for policy in self.policies:
            reason = Text(f"{policy.policy}: ", style="bold") + Text(policy.reason)
            console.print(reason, soft_wrap=not console.is_terminal)

    def __str__(self) -> str:
        log = Console(file=StringIO(), width=200, color_system=None, force_terminal=False, highlight=False)
        self.render(log)
        assert isinstance(log.file, StringIO)
        return "\n".join(line.rstrip() for line in log.file.getvalue().splitlines())

    def _table(self) -> Table:
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
        for title in ("policy", "verdict"):
            table.add_column(title)
        for title in ("final loss", "gap", "margin", "peak MiB", "samples/s", "skipped", "replays", "last scale"):
            table.add_column(title, justify="right")
        for policy in self.policies:
            verdict = policy.verdict
            cells = [policy.asked_and_ran, verdict.word, loss_text(policy), gap_text(verdict), number(verdict.margin)]
            cells += [memory_text(policy), speed_text(policy), str(policy.steps_skipped), str(policy.replays)]
            cells.append(number(policy.scale_last, "g"))
            row = [Text(cell) for cell in cells]
            row[1].stylize(_STYLE.get(verdict.word, ""))
            table.add_row(*row)
        return table


def check_margin(margin_pct: float | None) -> None:
    """Refuse a margin that no difference could stay within, before anything is trained."""
    if margin_pct is not None and not 0 < margin_pct < math.inf:
        raise HalfstepError(
            f"margin {margin_pct:g} %", "it must be above 0 and finite", "Give for example --margin 1, or none."
        )


def loss_text(policy: PolicyReport) -> str:
    """Mean and spread of the finite final losses, and how many are not."""
    spread = f" ± {policy.sd:.2g}" if policy.sd is not None else ""
    return f"{number(policy.mean)}{spread}" + (f", {policy.num_diverged} diverged" if policy.num_diverged else "")


def gap_text(verdict: Verdict) -> str:
    """The gap and its interval."""
    if verdict.ci_low is None or verdict.ci_high is None:
        return number(verdict.gap, "+.3g")
    return f"{number(verdict.gap, '+.3g')} [{verdict.ci_low:+.3g}, {verdict.ci_high:+.3g}]"


def memory_text(policy: PolicyReport) -> str:
    """Peak memory, and the change against the reference."""
    saving = f" ({percent(-policy.memory_saving_pct)})" if policy.memory_saving_pct else ""
    return quantity_text(policy.peak_memory_mib) + saving


def percent(change: float) -> str:
    """A change in whole percent."""
    return f"{change:+.0f} %" if abs(change) >= 0.5 else "0 %"


def speed_text(policy: PolicyReport) -> str:
    """Throughput, and its ratio to the reference."""
    ratio = f" ({policy.speedup:.2f}x)" if policy.speedup and policy.speedup != 1 else ""
    return quantity_text(policy.samples_per_s) + ratio


def quantity_text(value: float | None) -> str:
    """An amount in whole numbers, a small one in three digits."""
    return number(value, ",.0f" if value is not None and value >= 100 else ".3g")


def _summarize(name: str, arm: Sequence[Trial], reference: Sequence[Trial], verdict: Verdict) -> PolicyReport:
    values = tuple(trial.final_loss for trial in arm)
    finite = [value for value in values if math.isfinite(value)]
    scales = [scale for trial in arm for scale in trial.scales]
    memory, base_memory = _peak(arm), _peak(reference)
    speed, base_speed = _speed(arm), _speed(reference)
    return PolicyReport(
        policy=name,
        effective=arm[0].effective,
        values=values,
        mean=fmean(finite) if finite else math.nan,
        sd=stdev(finite) if len(finite) > 1 else None,
        peak_memory_mib=memory,
        memory_saving_pct=100 * (1 - memory / base_memory) if memory is not None and base_memory else None,
        samples_per_s=speed,
        speedup=speed / base_speed if speed is not None and base_speed else None,
        steps_applied=sum(trial.steps_applied for trial in arm),
        steps_skipped=sum(trial.steps_skipped for trial in arm),
        replays=sum(trial.num_replays for trial in arm),
        scale_min=min(scales, default=None),
        scale_max=max(scales, default=None),
        scale_last=median_low(ends) if (ends := [trial.scales[-1] for trial in arm if trial.scales]) else None,
        verdict=verdict,
        why=arm[0].why,
    )


def _verdict(
    reference_name: str, reference: Sequence[Trial], name: str, arm: Sequence[Trial], margin_pct: float | None
) -> Verdict:
    finite = [trial.final_loss for trial in reference if math.isfinite(trial.final_loss)]
    margin, margin_from = None, ""
    if margin_pct is not None and finite:
        margin = abs(fmean(finite)) * margin_pct / 100
        margin_from = f"{margin_pct:g} % of {reference_name}'s mean"
    failures = _failures(arm)
    if name == reference_name:
        spread = ""
        if len(finite) > 1:
            spread = f" Its own sd over {len(finite)} seeds is {stdev(finite):.4g}."
            margin = sd_lower_bound(finite) if margin is None else margin
        reason = f"The others are judged against it.{spread} {failures}".strip()
        return Verdict("reference", None, None, None, margin, None, reason, num_pairs=len(finite))
    losses = {trial.seed: trial.final_loss for trial in reference}
    paired = [(losses[trial.seed], trial.final_loss) for trial in arm if trial.seed in losses]
    verdict = judge(
        [r for r, _ in paired],
        [c for _, c in paired],
        margin,
        margin_from=margin_from,
        reference_name=reference_name,
        candidate_name=name,
    )
    return replace(verdict, reason=f"{verdict.reason} {failures}".strip())


def _failures(arm: Sequence[Trial]) -> str:
    """Why trials diverged, each reason once with the seeds that it befell."""
    seeds: dict[str, list[str]] = {}
    for trial in arm:
        if trial.diverged:
            seeds.setdefault(trial.diverged.rstrip("."), []).append(str(trial.seed))
    return " ".join(
        f"Seed{'s' if len(those) > 1 else ''} {', '.join(those)}: {reason}." for reason, those in seeds.items()
    )


def _phrase(policy: PolicyReport, reference: str) -> str:
    """A policy's verdict as a clause of the headline."""
    name, verdict = policy.policy, policy.verdict
    needed = f"{verdict.seeds_needed} paired seeds" if verdict.seeds_needed else "more seeds or a wider margin"
    return {
        "equivalent": f"{name} is equivalent to {reference}",
        "diverged": f"{name} diverged in {policy.num_diverged} of {len(policy.values)} trials",
        "inconclusive": f"{name} against {reference} is inconclusive ({needed} would settle it)",
        "no verdict": f"no verdict on {name} ({needed} are needed)",
    }.get(verdict.word, f"{name} is {verdict.word} than {reference}")


def _peak(arm: Sequence[Trial]) -> float | None:
    return max((trial.peak_memory_mib for trial in arm if trial.peak_memory_mib is not None), default=None)


def _speed(arm: Sequence[Trial]) -> float | None:
    known = [trial.samples_per_s for trial in arm if trial.samples_per_s is not None]
    return median(known) if known else None
