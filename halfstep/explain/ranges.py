"""halfstep ranges: what a step computes against what each format can hold, module by module, at any loss scale.

The values are those of an fp32 run of the captured micro-batch, since a 16-bit run has lost already what is to be
counted. docs/ranges.md has the arithmetic, and the rule for what counts as found.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from torch.optim import Optimizer

from halfstep.diagnosis.advice import advise, try_policies
from halfstep.diagnosis.capture import Capture
from halfstep.errors import HalfstepError
from halfstep.explain.histogram import best_scale
from halfstep.explain.module_range import ACTIVATION, SCALED, Measured, ModuleRange, watch
from halfstep.explain.ranges_report import RangesReport, scale_text
from halfstep.explain.rehearsal import Rehearsal
from halfstep.policy import LossScale, Policy
from halfstep.source import Source


def ranges(source: Source, policy: Policy, step: int = 5, seed: int = 0, device: str | None = None) -> RangesReport:
    """Train ``source`` up to window ``step`` under ``policy``, and measure the ranges of its first micro-batch."""
    rehearsal = Rehearsal(source, policy, seed, device)
    capture, where = rehearsal.run_to(step)
    stepper = rehearsal.stepper
    return ranges_of(capture, stepper.optimizer, stepper.max_norm, source.spec, where)


def ranges_of(
    capture: Capture,
    optimizer: Optimizer | None = None,
    max_norm: float | None = None,
    workload: str = "the model",
    where: str | None = None,
) -> RangesReport:
    """The ranges of a captured micro-batch; those of weight updates too, if its ``optimizer`` is given.

    Nothing of the run changes: the optimizer's step is tried on a copy.
    """
    measured = Measured(capture, optimizer, max_norm)
    held, outcome = watch(capture, capture.policy, capture.scale)
    rows = measured.rows(capture.policy, capture.scale, held)
    gradients = measured.gradients(rows)
    best = best_scale(gradients)
    notes = [f"No weight updates: {measured.no_updates}."] if measured.no_updates else []
    if measured.why_not:
        notes.append(f"fp32 cannot run this model ({measured.why_not}); what the 16-bit run has flushed is not seen.")
    report = RangesReport(
        workload,
        str(capture.policy),
        str(capture.device),
        capture.step,
        where or f"step {capture.step}",
        capture.scale,
        best,
        rows,
        tuple(gradients),
        {
            "activations": measured.total(rows, (ACTIVATION,)),
            "gradients": measured.total(rows, SCALED),
        },
        outcome.is_finite,
        measured.is_finite,
        notes=tuple(notes),
    )
    if not report.found:
        return report
    if measured.is_finite is False or not any(row.overflows or row.flushes for row in rows):
        return replace(report, advice=advise(capture, capture.find_producer()))

    def mends(policy: Policy) -> bool:
        scale = scale_for(capture, policy)
        held, outcome = watch(capture, policy, scale)
        return outcome.is_finite and not any(r.overflows or r.flushes for r in measured.rows(policy, scale, held))

    return replace(report, advice=try_policies(proposals(capture, rows, best), mends))


def scale_for(capture: Capture, policy: Policy) -> float:
    """The scale that a run of ``policy`` has: the captured one where the settings are the same, else its first."""
    if policy.scale == capture.policy.scale:
        return capture.scale
    return 1.0 if policy.scale.kind == "none" else policy.scale.init


def proposals(capture: Capture, rows: Sequence[ModuleRange], best: float | None) -> list[tuple[str, Policy]]:
    """What may mend what the rows show, cheapest first."""
    policy = capture.policy
    found: list[tuple[str, Policy]] = []
    if best is not None and (settings := _with_scale(policy.scale, best)).init != capture.scale:
        word = "lower" if settings.init < capture.scale else "raise"
        found.append((f"{word} the loss scale to {scale_text(settings.init)}", replace(policy, scale=settings)))
    faulty = _innermost(row.module for row in rows if row.overflows or row.flushes)
    around = _innermost(name.rpartition(".")[0] for name in faulty)
    for modules in (faulty, around):
        try:
            changed = policy.in_fp32(modules)
        except HalfstepError:
            continue  # a name that no rule can spell
        if changed != policy and changed not in [other for _, other in found]:
            names = modules[0] if len(modules) == 1 else f"{len(modules)} modules ({modules[0]} first)"
            found.append((f"keep {names} in fp32", changed))
    if policy.compute == "fp16":
        bf16 = replace(policy, compute="bf16", scale=Policy("bf16").scale)
        found.append(("use bf16, which has the range of fp32", bf16))
    return found


def _with_scale(settings: LossScale, best: float) -> LossScale:
    """``settings`` that begin at ``best``, with bounds that hold it."""
    if settings.kind == "static":
        return replace(settings, init=best)
    floor, ceiling = min(best, settings.floor), max(best, settings.ceiling)
    return replace(settings, kind="dynamic", init=best, floor=floor, ceiling=ceiling)


def _innermost(modules: Iterable[str]) -> list[str]:
    """The names that no other lies inside of; without the model itself, which has none."""
    names = list(dict.fromkeys(filter(None, modules)))
    return [name for name in names if not any(other.startswith(f"{name}.") for other in names)]
