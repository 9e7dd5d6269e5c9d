"""Why 16 bit fails here, and the smallest change that mends it: trace, ranges, audit, diff, tune.

The commands train a workload up to the step that they look at. What is named here looks at a micro-batch that a live
run captures, ``stepper.capture(closure)``.
"""

from halfstep.diagnosis.trace import trace_of
from halfstep.explain.audit import audit_loss, audit_of
from halfstep.explain.diff import diff_of
from halfstep.explain.ranges import ranges_of

__all__ = ["audit_loss", "audit_of", "diff_of", "ranges_of", "trace_of"]
