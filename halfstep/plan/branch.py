"""Which answer to a condition lets a program go on: the one that does not lead straight to a ``raise``.

``assert x.max() < n`` and ``if not torch.isfinite(loss): raise ...`` ask a tensor that has no value. What the program
does with each answer stands in its bytecode: the instructions from the question to the next fork.
"""

from __future__ import annotations

import bisect
import dis
import functools
from types import CodeType, FrameType

_IDLE = {"COPY", "EXTENDED_ARG", "NOP", "PRECALL", "TO_BOOL"}
_ENDS = ("RETURN", "FOR_ITER", "YIELD", "SEND")


def healthy_answer(frame: FrameType) -> bool | None:
    """The answer to the condition that ``frame`` asks now; None where both answers go on, or none of them forks."""
    return _healthy(frame.f_code, frame.f_lasti)


def is_in_while(frame: FrameType) -> bool:
    """Whether ``frame`` asks inside of a loop that no iterator bounds."""
    return _is_in_while(frame.f_code, frame.f_lasti)


@functools.lru_cache(4096)
def _is_in_while(code: CodeType, offset: int) -> bool:
    instructions = list(dis.get_instructions(code))
    names = {instruction.offset: instruction.opname for instruction in instructions}
    heads = [
        int(jump.argval) for jump in instructions if "BACKWARD" in jump.opname and jump.argval <= offset <= jump.offset
    ]
    return bool(heads) and names[max(heads)] != "FOR_ITER"


@functools.lru_cache(4096)
def _healthy(code: CodeType, offset: int) -> bool | None:
    instructions = list(dis.get_instructions(code))
    at = {instruction.offset: index for index, instruction in enumerate(instructions)}
    asked = index = bisect.bisect_right(list(at), offset) - 1  # an instruction may be followed by its caches
    while index < len(instructions) and not _forks(instructions[index]):
        name = instructions[index].opname
        if name not in _IDLE and index != asked:
            return None  # the answer is kept, and a later fork may depend on it
        index += 1
    if index == len(instructions):
        return None
    fork = instructions[index]
    jumps_if = "IF_TRUE" in fork.opname
    raises_if = {
        jumps_if: _raises(instructions, at, at[fork.argval]),
        not jumps_if: _raises(instructions, at, index + 1),
    }
    return None if raises_if[True] == raises_if[False] else raises_if[False]


def _forks(instruction: dis.Instruction) -> bool:
    return "JUMP" in instruction.opname and ("IF_TRUE" in instruction.opname or "IF_FALSE" in instruction.opname)


def _raises(instructions: list[dis.Instruction], at: dict[int, int], index: int) -> bool:
    """Whether what begins at ``index`` raises before it forks, returns or goes round a loop."""
    while True:
        instruction = instructions[index]
        name = instruction.opname
        if name == "RAISE_VARARGS":
            return True
        if name == "JUMP_FORWARD":
            index = at[instruction.argval]
        elif "JUMP" in name or name.startswith(_ENDS):
            return False
        else:
            index += 1
