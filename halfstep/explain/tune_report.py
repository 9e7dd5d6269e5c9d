"""What a search for the least in fp32 came to, as a report and as a policy file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

from halfstep.diagnosis.advice import Advice, advice_table
from halfstep.errors import HalfstepError
from halfstep.policy import Policy
from halfstep.report import Cell, Report, Sheet, Table, count_text, json_number
from halfstep.source import Source

NOT_CONFIRMED, NO_SET, FP32_FAILS = "not confirmed", "no set helps", "fp32 fails"
"""Verdicts where compare has none: stopped before it could judge, nothing helps, and no question of precision."""

_FIRST_LINE = "# Written by halfstep tune"
_TONES = {
    "equivalent": "good",
    "not worse": "good",
    "inconclusive": "open",
    "no verdict": "open",
    NOT_CONFIRMED: "open",
}
_KEYS = (
    *("workload", "device", "steps", "seeds", "policy", "tuned", "why", "num_suspects", "probes", "minimal"),
    *("policy_file", "verdict", "reason", "margin_from", "stopped"),
)
MAX_ROWS = 40
"""How many runs the printed table shows."""


@dataclass(frozen=True)
class Tried:
    """One training run: what was in fp32, from which seed, and why it failed, None if it did not."""

    fp32: tuple[str, ...]
    seed: int
    why: str | None
    confirms: bool


@dataclass(frozen=True)
class Cost:
    """What the policy that was found costs, as ratios to the policy as it stood and to fp32; None where not measured.

    time: of a window. memory: peak bytes of live tensors in one. work_pct: share of the 16-bit work, counted in
    multiply-adds, that went to fp32.
    """

    time: float | None = None
    memory: float | None = None
    time_vs_fp32: float | None = None
    memory_vs_fp32: float | None = None
    work_pct: float | None = None


@dataclass(frozen=True)
class TuneReport(Report):
    """The fewest parts of a model that have to compute in fp32.

    policy, tuned: the policy as it stood, and with the rules that were found; ``tuned`` is None where none were.
    why:     how the policy as it stood failed, None if it did not.
    fp32:    names of modules, and ``op:NAME`` of operations. minimal: each was left out once, and that failed.
    probes:  training runs of the search; those of fp32, and of what only confirms, are not counted.
    verdict: compare's word on ``tuned`` against fp32, or one of NOT_CONFIRMED, NO_SET and FP32_FAILS. reason: why.
    margin:  how far above fp32's the final loss of a run may be. margin_from: where it comes from.
    stopped: what ended the search early, None if nothing did.
    """

    workload: str
    device: str
    steps: int
    seeds: int
    policy: str
    tuned: str | None
    why: str | None
    fp32: tuple[str, ...]
    num_suspects: int
    probes: int
    minimal: bool
    verdict: str
    reason: str
    margin: float
    margin_from: str
    cost: Cost = Cost()
    policy_file: str | None = None
    stopped: str | None = None
    note: str | None = None
    tried: tuple[Tried, ...] = ()
    advice: tuple[Advice, ...] = ()

    @property
    def found(self) -> bool:
        """Whether the policy fails as it stands: exit status 1."""
        return self.why is not None or self.verdict == FP32_FAILS

    def to_dict(self) -> dict[str, Any]:
        return {
            "fp32": list(self.fp32),
            **{key: getattr(self, key) for key in _KEYS},
            "margin": json_number(self.margin),
            "cost": {key: json_number(value) for key, value in asdict(self.cost).items()},
            "tried": [{**asdict(one), "fp32": list(one.fp32)} for one in self.tried],
            "advice": [one.to_dict() for one in self.advice],
        }

    @property
    def headline(self) -> str:
        if self.verdict == FP32_FAILS:
            return f"{self.workload}: not the precision. {self.reason}"
        if self.why is None and not self.minimal:
            return f"{self.workload}: stopped before {self.policy} had been tried as it stands."
        if self.why is None:
            return f"{self.workload}: {self.policy} works as it stands, nothing has to be kept in fp32."
        if not self.fp32:
            return f"{self.workload}: {self.policy} fails ({self.why}), and {self._nothing}"
        names = ", ".join(self.fp32)
        least = "nothing of it can be left out" if self.minimal else "whether all of it is needed is open"
        return f"{self.workload}: {self.policy} works with {names} in fp32, found in {self._probes}; {least}."

    @property
    def _probes(self) -> str:
        return count_text(self.probes, "probe")

    @property
    def _nothing(self) -> str:
        if self.verdict == NOT_CONFIRMED:
            return f"no set has been seen to work in {self._probes}."
        return f"no module and no operation mends it, not all {self.num_suspects} suspects together."

    def sheet(self) -> Sheet:
        runs = f"{count_text(self.steps, 'step')} a run, {count_text(self.seeds, 'seed')}, on {self.device}"
        facts = f"{runs}; a run fails above fp32's final loss + {self.margin:.3g} ({self.margin_from})"
        tables = []
        if self.fp32:
            word = Cell(self.verdict, _TONES.get(self.verdict, "bad"))
            tables.append(
                Table(
                    (
                        "in fp32",
                        "against fp32",
                        ">time",
                        ">memory",
                        ">time / fp32's",
                        ">memory / fp32's",
                        ">work in fp32",
                    ),
                    [(", ".join(self.fp32), word, *self._ratios())],
                    note=f"time and memory: of a step, as multiples of {self.policy}'s where nothing else is said",
                )
            )
        if self.tried:
            tables.append(self._tried_table())
        if self.advice:
            tables.append(advice_table(self.advice))
        closing = [self.reason]
        if self.note:
            closing.append(self.note)
        if self.policy_file:
            closing.append(f"Wrote {self.policy_file}: every command and halfstep.Stepper take it as a policy.")
        return Sheet(self.headline, facts, tables, closing)

    def _ratios(self) -> Sequence[str]:
        cost = self.cost
        times = (cost.time, cost.memory, cost.time_vs_fp32, cost.memory_vs_fp32)
        work = "-" if cost.work_pct is None else f"{cost.work_pct:.2g} %"
        return (*("-" if ratio is None else f"{ratio:.2f}x" for ratio in times), work)

    def _tried_table(self) -> Table:
        rows = [
            (
                "confirm" if one.confirms else "probe",
                _short(one.fp32, self.num_suspects),
                str(one.seed),
                Cell("works", "good") if one.why is None else Cell(one.why, "bad"),
            )
            for one in self.tried[:MAX_ROWS]
        ]
        more = len(self.tried) - len(rows)
        return Table(("run", "in fp32", ">seed", "result"), rows, "Tried", f"and {more} more" if more else "")


def _short(names: Sequence[str], num_suspects: int) -> str:
    if not names:
        return "nothing"
    return ", ".join(names) if len(names) <= 3 else f"{len(names)} of {num_suspects}"


# --- the file ------------------------------------------------------------------------------------------------------


def default_policy_file(source: Source) -> Path:
    """``charlm.toml`` of charlm; of ``path/to/train.py:small``, ``train-small.toml`` where the command runs."""
    path, _, function = source.spec.rpartition(":")
    stem = Path(path or function).stem
    return Path(stem if not path or function == "workload" else f"{stem}-{function}").with_suffix(".toml")


def check_policy_file(file: Path) -> None:
    """Refuse, before anything is trained, a file that is none, that is in no folder, or that tune has not written."""
    if file.suffix != ".toml":
        raise HalfstepError(f"policy file {file}", "a policy file ends in .toml", f"Use {file}.toml.")
    if file.is_dir() or not file.parent.is_dir():
        why = "it is a folder" if file.is_dir() else f"there is no folder {file.parent}"
        raise HalfstepError(f"policy file {file}", why, "Name a file in a folder that exists.")
    if file.exists() and not file.read_text(encoding="utf-8", errors="replace").startswith(_FIRST_LINE):
        raise HalfstepError(
            f"policy file {file}", "it exists and is not one that tune wrote", "Name another file, or move that one."
        )


def policy_text(report: TuneReport, policy: Policy) -> str:
    """The file: what was found, why, how well it does and what it costs, as a comment; then the policy."""
    lines = [
        f"{_FIRST_LINE} on {date.today().isoformat()}: {report.workload}, {report.policy}, "
        f"{count_text(report.steps, 'step')}, {count_text(report.seeds, 'seed')}, {report.device}",
        f"as it stood: {report.why}",
        f"in fp32: {', '.join(report.fp32)}, {'each of them needed' if report.minimal else 'perhaps more than needed'}",
        f"against fp32: {report.verdict}",
    ]
    if report.cost.time is not None and report.cost.memory is not None:
        lines.append(
            f"costs {report.cost.time:.2f} times the time and {report.cost.memory:.2f} times the memory of a step"
        )
    comment = [" ".join(line.split()) for line in lines]
    return "".join(f"{'' if line.startswith('#') else '# '}{line}\n" for line in comment) + "\n" + policy.to_toml()
