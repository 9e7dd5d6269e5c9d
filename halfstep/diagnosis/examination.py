"""One recorded run of a captured micro-batch, and who is at fault in it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from halfstep.diagnosis.capture import Capture, Outcome
from halfstep.formats import SIXTEEN_BIT
from halfstep.policy import Policy
from halfstep.record.mask import kind_of
from halfstep.record.producer import Fault, fault_at, fault_of, overflows, trained
from halfstep.record.recorder import OperationRecorder, Record
from halfstep.record.walk import Site


@dataclass(frozen=True)
class Examination:
    """One recorded run of a capture: what it gave, what it did, and who is at fault; None if nobody is.

    twin: what the same step did in FP32, where it has been recorded.
    """

    outcome: Outcome
    record: Record
    fault: Fault | None
    twin: Record | None = None

    @property
    def is_bad(self) -> bool:
        return self.fault is not None or not self.outcome.is_finite


def examine(capture: Capture) -> Examination:
    """Run a capture once with every operation recorded, and find who is at fault.

    Where loss and gradient are finite, that is a 16-bit operation which overflows and does not in FP32.
    """
    recorder = OperationRecorder(capture.model)
    outcome = capture.run(under=[recorder])
    record = recorder.read()
    if not outcome.is_finite:
        return Examination(outcome, record, fault_of(record, math.isfinite(outcome.loss), trained(capture.model)))
    suspects = overflows(record)
    twin = in_fp32(capture) if suspects else None
    # An infinity that FP32 has as well is not one of the precision, and does no harm here.
    also = {_line_of(operation.site) for operation in twin.operations if kind_of(operation)} if twin else set()
    suspects = [i for i in suspects if _line_of(record.operations[i].site) not in also]
    return Examination(outcome, record, fault_at(record, suspects[0]) if suspects else None, twin)


def in_fp32(capture: Capture) -> Record | None:
    """What the same step does in FP32; None where it computes in no 16-bit format as it is."""
    if not capture.policy.formats & SIXTEEN_BIT:
        return None
    recorder = OperationRecorder(capture.model)
    capture.run(Policy("fp32"), under=[recorder])
    return recorder.read()


def _line_of(site: Site) -> tuple[str | None, str | None, str | None, int | None]:
    return site.module, site.phase, site.file, site.line
