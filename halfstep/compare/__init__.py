"""FP32 against 16 bit on the user's own model, over seeds: run the trials, judge them, report."""

from halfstep.compare.report import CompareReport
from halfstep.compare.run import compare
from halfstep.compare.trial import Trial

__all__ = ["CompareReport", "Trial", "compare"]
