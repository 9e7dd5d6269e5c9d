"""How long a step takes and how much is done in a second, from the times at which steps came."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from halfstep.watch.rules.stalled import usual_pause
from halfstep.watch.window import PACE, SIZE


@dataclass
class Throughput:
    """Of the last SIZE steps that followed one another: a hole, or a clock that is set back, begins anew.

    last: the number of the newest. times: when they came, in seconds. counts: what the windows of the last PACE held,
    None where unknown.
    """

    last: int | None = None
    times: list[float] = field(default_factory=list)
    counts: list[float | None] = field(default_factory=list)

    def add(self, step: int, time: float, count: float | None) -> tuple[float | None, float | None]:
        """One more step: seconds a step, and what was done a second; None where unknown.

        Both are over the last PACE steps, or over all where there are fewer, since a host that runs ahead of its GPU
        waits in one of them for all, see :func:`halfstep.watch.window.pauses`. A pause of more than twice the PACE
        steps before it is no such wait: at its own step it stands alone and whole. A shorter one is spread.
        """
        times, counts = self.times, self.counts
        if step - 1 != self.last or not math.isfinite(time) or (times and time < times[-1]):
            times.clear()
            counts.clear()
        self.last = step
        if not math.isfinite(time):
            return None, None
        times.append(time)
        counts.append(count)
        del times[:-SIZE], counts[:-PACE]
        num = min(PACE, len(times) - 1)
        if len(times) > PACE + 1 and time - times[-2] > 2 * (times[-2] - times[-2 - PACE]):
            num = 1
        if not num:
            return None, None
        seconds = time - times[-1 - num]
        held = [count for count in counts[-num:] if count is not None]
        return seconds / num, sum(held) / seconds if seconds and len(held) == num else None

    @property
    def usual_pause(self) -> float | None:
        """Seconds between two steps, see :func:`halfstep.watch.rules.stalled.usual_pause`."""
        return usual_pause(self.times)
