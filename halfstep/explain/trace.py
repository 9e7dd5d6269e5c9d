"""Train until the first non-finite value or overflow, and trace the step that it happens in.

What counts is in docs/trace.md: a loss or gradient that no lower scale mends, an overflow after the scale has found its
place, a 16-bit operation inside that overflows although the loss is finite, and an update that spoils a weight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from halfstep.diagnosis.advice import DOES_NOT, MENDS, NOT_TRIED, Advice, advise
from halfstep.diagnosis.capture import Capture
from halfstep.diagnosis.headroom import growth_of
from halfstep.diagnosis.trace import Trace, trace_of
from halfstep.errors import HalfstepError
from halfstep.explain.lookout import Found, Lookout, Met, spoiled
from halfstep.explain.rehearsal import Rehearsal
from halfstep.formats import SIXTEEN_BIT
from halfstep.interruption import Interruption
from halfstep.policy import Policy
from halfstep.record.producer import BATCH, LOSS, Producer
from halfstep.source import Source


def trace(
    source: Source,
    policy: Policy,
    steps: int,
    seed: int = 0,
    device: str | None = None,
    progress: Callable[[str], None] | None = None,
) -> Trace:
    """Train ``source`` from ``seed`` under ``policy`` for at most ``steps`` steps, and trace the first bad one.

    progress: called with a text after each step.
    """
    if steps < 1:
        raise HalfstepError(f"steps={steps}", "there is nothing to look at", "Use 1 or more.")
    lookout = Lookout(source, policy, seed, device)
    try:
        with Interruption() as interruption:
            for _ in range(steps):
                report = lookout.run_window()
                if progress:
                    progress(f"step {report.step}, loss {report.loss:.4g}")
                interruption.check(lookout.rehearsal.stepper)
    except Found as found:
        return _with_fp32(_explained(lookout, found), source, steps, seed, device)
    return Trace(steps, str(policy), is_bad=False, notes=lookout.notes())


def _explained(lookout: Lookout, found: Found) -> Trace:
    """The trace of what was found, by the rank that has it; all ranks call it together."""
    notes = lookout.notes(is_before=True)
    if found.weight is not None:
        return replace(_of_update(lookout, *found.weight), notes=notes)
    own = _of_capture(lookout, found) if lookout.runs_alone else _of_place(lookout, found)
    parts: list[_Part] = lookout.ranks.gather(_Part(own, found.met, found.reason))
    ranks = _at_fault(parts)
    shown = parts[ranks[0] if ranks else 0]
    result = shown.trace or _of_nothing(lookout)
    if lookout.ranks.num > 1:
        said = tuple(part.trace.finding if part.trace and n in ranks else _CLEAN for n, part in enumerate(parts))
        result = replace(result, rank=ranks[0] if ranks else None, ranks=said)
    several = lookout.rehearsal.stepper.accumulate != 1
    return replace(
        result,
        policy=str(lookout.policy),
        is_bad=True,
        reason=None if result.producer else next((part.reason for part in parts if part.reason is not None), None),
        micro_batch=(shown.met.micro_batch if shown.met else lookout.num_micro_batches) - 1 if several else None,
        notes=(*notes, *result.notes),
    )


class _Part(NamedTuple):
    """What one rank has to say: its own trace, the first value that is not finite where it could not look alone."""

    trace: Trace | None
    met: Met | None
    reason: str | None


def _at_fault(parts: Sequence[_Part]) -> list[int]:
    """The ranks whose own micro-batch is at fault, the one to show first: who met it after the fewest operations."""
    ranks = [rank for rank, part in enumerate(parts) if part.trace is not None and part.trace.is_bad]
    met = {rank: part.met for rank, part in enumerate(parts) if part.met is not None}
    in_forward = [rank for rank, each in met.items() if each.place[0].phase == "forward"]
    if in_forward:  # while the loss is not finite, a gradient that is not says nothing of the rank that has it
        ranks = in_forward
    return sorted(ranks, key=lambda rank: met[rank].number if rank in met else 0)


_CLEAN = "nothing: in its own micro-batch every value is finite, meant, or mended by a lower scale"


def _of_capture(lookout: Lookout, found: Found) -> Trace | None:
    return None if found.capture is None else trace_of(found.capture, lookout.history.of, found.seen)


def _of_nothing(lookout: Lookout) -> Trace:
    return Trace(lookout.step, str(lookout.policy), is_bad=True, scale=lookout.scale)


def _of_place(lookout: Lookout, found: Found) -> Trace | None:
    """Where no rank can run the micro-batch again alone: what this one saw while it ran. Nothing is tried."""
    if found.met is None:
        return None
    (site, op), kind = found.met.place, found.met.kind
    module = BATCH if found.met.is_given else LOSS if site.module is None else site.module
    return replace(
        _of_nothing(lookout),
        producer=Producer(module, site.phase, kind, op, site.function, site.file, site.line),
        growth=growth_of([(step, value) for step, value in lookout.history.of(site, op) if step < lookout.step]),
        notes=(_NOT_ALONE,),
    )


_NOT_ALONE = (
    "No rank can run its micro-batch again without the others, so that the operations before it are not listed and no "
    "advice is tried: trace the workload replicated by DDP, or on one device, for that."
)


def _of_update(lookout: Lookout, weight: str, kind: str) -> Trace:
    optimizer = type(lookout.rehearsal.stepper.optimizer).__name__
    producer = Producer(weight.rpartition(".")[0], "update", kind, optimizer, holds=weight)
    found = replace(_of_nothing(lookout), producer=producer)
    return replace(found, advice=_update_advice(found, lookout.capture(), lookout.again))


# --- what else is tried --------------------------------------------------------------------------------------------


def _with_fp32(found: Trace, source: Source, steps: int, seed: int, device: str | None) -> Trace:
    """The trace, told whether FP32 fails as well: within the steps asked for, and not much later."""
    if not Policy.parse(found.policy).formats & SIXTEEN_BIT:
        return found
    limit = min(steps, 2 * found.step + 10)
    rehearsal = Rehearsal(source, Policy("fp32"), seed, device)
    for step in range(1, limit + 1):
        if not rehearsal.run_window().applied or spoiled(rehearsal.stepper.ranks):
            advice = found.advice
            if not any(a.text.startswith(_NOT_THE_PRECISION) for a in advice):
                text = f"{_NOT_THE_PRECISION}: fp32 fails as well at step {step}: lower the learning rate or look at "
                advice = (Advice(f"{text}the data", None, NOT_TRIED), *advice)
            return replace(found, fp32_step=step, advice=advice)
    return replace(found, notes=(*found.notes, f"In fp32 the same run is finite for {limit} steps."))


_NOT_THE_PRECISION = "Not the precision"


def _update_advice(found: Trace, capture: Capture, again: Callable[[], Rehearsal]) -> tuple[Advice, ...]:
    """A larger eps and a lower learning rate, each tried by running up to the step again and changing the optimizer."""

    def mends(setting: str, value: float) -> bool:
        rehearsal = again()
        for _ in range(found.step - 1):
            rehearsal.run_window()
        for group in rehearsal.stepper.optimizer.param_groups:
            group[setting] = value
        return rehearsal.run_window().applied and not spoiled(rehearsal.stepper.ranks)

    groups = again().stepper.optimizer.param_groups
    advice: tuple[Advice, ...] = ()
    if "eps" in groups[0]:
        advice = advise(capture, found.producer, lambda eps: mends("eps", eps))
    lower = groups[0]["lr"] / 10
    text = f"lower the learning rate, to {lower:g} instead of {groups[0]['lr']:g}"
    return (*advice, Advice(text, None, MENDS if mends("lr", lower) else DOES_NOT))
