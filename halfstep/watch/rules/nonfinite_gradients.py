"""More non-finite gradient elements than a loss scale that finds its level explains."""

from __future__ import annotations

from collections.abc import Mapping

from halfstep.errors import and_more
from halfstep.watch.rule import Finding, Rule
from halfstep.watch.window import SIZE, Window

_FIND = "Find the operation with Stepper(explain=True) or halfstep trace, and keep its module in fp32"


def check(window: Window, limits: Mapping[str, float]) -> Finding | None:
    pct = 100 * window.share
    if pct <= limits["share_pct"]:
        return None
    faults, scale = window.faults, window.scale
    where = f" in {and_more(faults[-1].modules)}" if faults[-1].modules else ""
    if len(faults) == 1:
        one = faults[0]
        what = f"{100 * one.share:.3g} % of the gradient elements of step {one.step} were inf or NaN{where}"
    else:
        what = f"{pct:.3g} % of the gradient elements of {SIZE} steps were inf or NaN{where}, in {len(faults)} of them"
    first, since = faults[0].step, f" after {window.promoted} went to fp32" if window.promoted else ""
    if any(fault.is_forward for fault in faults):
        return Finding(
            f"{what}, and so was the loss: the fault is in the forward pass or the data, and no loss scale can mend it",
            f"{_FIND}; look at the batch, too.",
            f"forward{since}",
            first,
            "error",
        )
    if scale.kind != "dynamic":
        fixed = f"the loss scale stays at {window.last.scale:g}" if scale.kind == "static" else "there is no loss scale"
        return Finding(
            f"{what}, with a finite loss; {fixed}, so nothing was lowered",
            f"{_FIND}; or look at the batch and the learning rate of these steps."
            if scale.kind == "none"
            else "Lower scale.init, or let the scale find its level with scale=dynamic.",
            f"{scale.kind}{since}",
            first,
        )
    at_floor = min(window.last.scale, *(fault.scale for fault in faults)) <= scale.floor
    if at_floor or window.num_reductions >= limits["reductions"]:
        why = (
            f"also at {scale.floor:g}, the floor of the loss scale"
            if at_floor
            else f"although the guard lowered the loss scale {window.num_reductions} times, to {window.last.scale:g}"
        )
        return Finding(
            f"{what}, {why}: no scale can mend this, and the guard lowers it no more",
            f"{_FIND} (on_exhausted=promote does so by itself), or train in bf16, which has the range that fp16 lacks.",
            f"no scale mends it{since}",
            faults[-1].step,
            "error",
        )
    if not window.run.can_lower:
        return Finding(
            f"{what}, with a finite loss, at a loss scale of {faults[-1].scale:g}; nothing was lowered, since the ranks"
            " are no replicas under DistributedDataParallel that are all watched",
            f"{_FIND}; or start with a lower scale.init on every rank.",
            f"alone{since}",
            first,
        )
    who = "the guard lowers it once" if window.run.num_ranks == 1 else "the guard lowers it once if every rank asks"
    return Finding(
        f"{what}, with a finite loss, at a loss scale of {faults[-1].scale:g}: {who}",
        "Nothing, if it stays at this; if it comes back, look at the module named here with halfstep ranges.",
        f"lower{since}",
        first,
        lowers_scale=True,
    )


RULE = Rule(
    name="nonfinite-gradients",
    severity="warning",
    summary="More than 0.1 % of the gradient elements of a window were inf or NaN.",
    why="""\
The rule counts elements, not steps: the non-finite elements of the gradients of the last 100 steps, over all their
elements, with those of micro-batches that ran again. 0.1 % is one step in which a tenth of all elements is bad, or ten
steps with one in a hundred. Where nobody counted the elements, a parameter whose gradient has a norm that is not
finite counts whole.

A healthy dynamic scale overflows too. With the usual settings (first scale 65536, half on an overflow, twice as much
after 2000 clean steps) and gradients that fit up to a scale of 1024, 20,000 steps hold 15 overflows: 6 in the first
steps, while the scale comes down, and one each time it tries 2048 again. Every one of them would be 1 % of a window.
So an overflow does not count at a scale that has not held yet: until 20 clean steps in a row at the start of a run, and
for as long after the scale has grown or the run has been resumed; as many at one scale as lower it, and none at the
floor. Nor does it count where the scale has grown to a level at which it failed before, however late: gradients of
uneven size let it hold for a while. They are in the log all the same.

What counts lowers the loss scale once, in the same step on all ranks of a replicated model, and at most once in 100
steps. Only what happens after that counts further. The guard gives up, and says so, when two reductions in a row did
not help, when the gradient is not finite at the floor of the scale, and when the loss is not finite: the loss is
computed before it is scaled, so that no scale mends it. 100 clean steps, or a module that was promoted to fp32, start
it anew. With bf16, fp32 or a static scale there is nothing to lower, and the rule only tells.

The modules are named from the loss backwards, since inf and NaN spread that way: where many are named, the first is
nearest to the cause.
""",
    check=check,
    limits={"share_pct": 0.1, "reductions": 2},
    limit_notes={
        "share_pct": "% of the gradient elements of a window",
        "reductions": "of the loss scale in a row, after which the guard gives up",
    },
)
