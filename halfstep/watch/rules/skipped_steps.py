"""Steps that were skipped: too many, or always the same kind."""

from __future__ import annotations

from collections.abc import Mapping

from halfstep.watch.rule import Finding, Rule
from halfstep.watch.window import SIZE, Window


def check(window: Window, limits: Mapping[str, float]) -> Finding | None:
    if window.skip_period is None and 100 * window.num_skipped <= limits["rate_pct"] * SIZE:
        return None
    last = next((step for step in reversed(window.steps) if not step.applied), None)
    why = f"; the last one, step {last.step}: {last.reason}" if last and last.reason else ""
    if window.skip_period is not None:
        skips = window.skips
        ordinal = _ordinal(window.skip_period)
        return Finding(
            f"every {ordinal} step is skipped, the last {len(skips)} of them from step {skips[0]} to {skips[-1]}{why}",
            f"Look for what only every {ordinal} step does, such as a rare term of the loss or the last batch of an"
            " epoch: it never reaches the weights. Compute it in fp32, or give it less weight.",
            f"every {ordinal}",
            skips[0],
        )
    return Finding(
        f"{window.num_skipped} of the last {len(window.steps)} steps were skipped, without those by which the loss"
        f" scale finds its level{why}",
        "Look at the alerts on gradients and loss beside this one; if they name no cause, use Stepper(explain=True).",
        "rate",
    )


def _ordinal(number: int) -> str:
    end = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{end}"


RULE = Rule(
    name="skipped-steps",
    severity="warning",
    summary="More than 5 % of the steps of a window were skipped, or each step of one kind.",
    why="""\
A skipped step moves no weight, and its batch is lost. A healthy dynamic loss scale skips one step in several hundred
to a thousand: 10 to 20 in 20,000 steps with the usual settings, which is 0.05 to 0.1 %. Those by which the scale finds
its level (see nonfinite-gradients) do not count. From more than 5 in 100 on the run learns less than it computes.

A low rate is no proof of health. A heavy term of the loss that is added in every 16th step overflows in just these
steps; the scale falls by it, and recovers before the next. The rate is 6 %, and the term never acts. So the rule also
fires when the last 5 skipped steps lie at one and the same distance of 2 or more, however long: a random 5 % of skipped
steps does that in 3 of 100,000 cases. Steps right after a growth of the scale are left out, since those lie at even
distances by themselves.
""",
    check=check,
    limits={"rate_pct": 5.0},
    limit_notes={"rate_pct": "% of the steps of a window"},
)
