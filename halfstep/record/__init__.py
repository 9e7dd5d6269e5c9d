"""One recorder of operations: where, in which formats, with which values; and who made the first non-finite one."""

from halfstep.record.producer import BATCH, LOSS, Producer, find_producer
from halfstep.record.recorder import ModuleRecorder, ModuleValue, Operation, OperationRecorder, Record
from halfstep.record.values import Values
from halfstep.record.walk import Site, Visitor, Walk

__all__ = [
    "BATCH",
    "LOSS",
    "ModuleRecorder",
    "ModuleValue",
    "Operation",
    "OperationRecorder",
    "Producer",
    "Record",
    "Site",
    "Values",
    "Visitor",
    "Walk",
    "find_producer",
]
