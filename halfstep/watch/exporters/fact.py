"""What of an entry goes into another tool: numbers under their names, a sentence, and what a run is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from halfstep.watch.entry import Entry, Step
from halfstep.watch.throughput import Throughput


@dataclass(frozen=True)
class Fact:
    """What one entry says.

    step:     that it belongs to; the last one seen, for an entry without its own.
    time:     of the entry, in seconds since 1970, or of the one before. numbers: by name; NaN and inf are as they were.
    sentence: what happened, for people; topic: words for what it is about, such as ``alert/loss-spike``.
    restarts: it is the first step of a process, or after a seam: steps from it on replace those of before.
    """

    step: int
    time: float
    numbers: dict[str, float] = field(default_factory=dict)
    topic: str = ""
    sentence: str = ""
    restarts: bool = False


class Facts:
    """Reads the entries of one run, in the order in which they come."""

    def __init__(self) -> None:
        self._step, self._time = 0, 0.0
        self._throughput = Throughput()

    def of(self, entry: Entry) -> Fact:
        kind = entry["kind"]
        time = self._time = float(entry.get("time", self._time))
        if kind == "step":
            step, restarts = Step.from_entry(entry), self._throughput.last is None
            self._step = step.step
            return Fact(step.step, time, _numbers(step, self._throughput), restarts=restarts)
        if kind in ("run", "seam"):
            self._throughput = Throughput()
        numbers = {}
        if kind == "layers":
            named = zip(entry["parameters"], entry["norms"], strict=False)
            numbers = {f"layers/{name}": float(norm) for name, norm in named}
        return Fact(entry.get("step", self._step), time, numbers, *_event(entry))

    @property
    def usual_pause(self) -> float | None:
        """Seconds between two of the last steps, None where unknown."""
        return self._throughput.usual_pause


def describe(entry: Entry) -> dict[str, str]:
    """What a run is, from its entry of kind run, by flat names."""
    info = entry.get("info") or {}
    versions = info.get("versions")
    facts = {
        "policy": entry.get("policy"),
        **{name: value for name, value in info.items() if name != "versions"},
        **{f"versions.{name}": value for name, value in (versions.items() if isinstance(versions, Mapping) else ())},
        **{f"scale.{name}": value for name, value in (entry.get("scale") or {}).items()},
        **{name: entry.get(name) for name in ("num_elements", "num_ranks", "rank", "session", "host")},
    }
    return {name: str(value) for name, value in facts.items() if value not in (None, "")}


def _numbers(step: Step, throughput: Throughput) -> dict[str, float]:
    numbers = {
        "loss": step.loss,
        "grad_norm": step.grad_norm,
        "scale": step.scale,
        "applied": float(step.applied),
        "num_replays": float(step.num_replays),
        "nonfinite": float(not step.is_finite),
    }
    known = {"nonfinite_share": step.nonfinite_share, "memory_mib": step.memory_mib}
    known["seconds"], known["count_per_s"] = throughput.add(step.step, step.time, step.count)
    return numbers | {name: float(value) for name, value in known.items() if value is not None}


def _event(entry: Entry) -> tuple[str, str]:
    """Topic and sentence; a tool may keep one sentence of a topic and a step."""
    kind = entry["kind"]
    match kind:
        case "alert":
            rank = entry.get("rank") or 0
            said = f"{entry['rule']}, {entry['severity']}: {entry['message']}. {entry['action']}"
            return f"alert/{entry['rule']}" + (
                f"/rank-{rank}" if rank else ""
            ), f"rank {rank}, {said}" if rank else said
        case "seam":
            return kind, f"The run goes on after step {entry['step']}; later steps of before do not count."
        case "promotion":
            module = entry.get("module")
            return f"{kind}/{module}", f"{module} computes in fp32 from now on: {entry.get('reason')}"
        case "gap":
            return kind, f"The log was lost for a while: {entry['num_lost']} entries were never written."
        case "end":
            return kind, f"The run {entry['state']}" + (f": {entry['reason']}" if entry.get("reason") else ".")
    return "", ""
