"""What becomes of a number of the source in a 16-bit tensor."""

from __future__ import annotations

import math
from collections.abc import Callable

from halfstep.formats import FORMATS, SIXTEEN_BIT, Format
from halfstep.lint.formats import format_of
from halfstep.lint.values import Const, Value, finfo_bound, options


def rounded(value: float, format: Format) -> float:
    """The number of ``format`` nearest to ``value``, ties to even; infinite beyond its largest."""
    if value == 0.0 or not math.isfinite(value):
        return value
    step = math.ldexp(format.eps, math.frexp(value)[1] - 1)
    step = max(step, format.smallest_subnormal)
    nearest = round(value / step) * step
    return nearest if abs(nearest) <= format.max else math.copysign(math.inf, value)


def in_a_format(known: frozenset[float], formats: frozenset[str], test: Callable[[float, Format], bool]) -> bool:
    """Whether ``test`` holds for every number that a constant may be, in one of the formats that a tensor may have.

    Where it is not known which 16-bit format it has ("16 bit"), it has to hold in both. False for no numbers.
    """

    def holds(name: str) -> bool:
        return all(test(number, FORMATS[name]) for number in known)

    if not known:
        return False
    return any(map(holds, formats & SIXTEEN_BIT)) or ("16 bit" in formats and all(map(holds, SIXTEEN_BIT)))


def vanishes(value: float, format: Format) -> bool:
    """Whether a number that is not zero becomes zero."""
    return value != 0.0 and rounded(value, format) == 0.0


def becomes_one(value: float, format: Format) -> bool:
    """Whether a number below one becomes one."""
    return value < 1.0 and rounded(value, format) == 1.0


def numbers(value: Value | None) -> frozenset[float]:
    """The numbers that a constant may be, those of ``torch.finfo`` included; empty when one is not known."""
    bound = finfo_bound(value)
    if bound is not None:
        info, name = bound
        known = format_of(info.argument("type", 0))
        if not known or name not in _BOUNDS or not known <= FORMATS.keys():
            return frozenset()
        return frozenset(_BOUNDS[name](FORMATS[format]) for format in known)
    found = options(value)
    if all(isinstance(o, Const) and isinstance(o.value, int | float) and not isinstance(o.value, bool) for o in found):
        return frozenset(_number(option.value) for option in found if isinstance(option, Const))
    return frozenset()


_BOUNDS: dict[str, Callable[[Format], float]] = {
    "min": lambda format: -format.max,
    "max": lambda format: format.max,
    "eps": lambda format: format.eps,
    "tiny": lambda format: format.tiny,
    "smallest_normal": lambda format: format.tiny,
}


def _number(value: int | float) -> float:
    """A constant as a float; a whole number of more than 308 digits is infinite there."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
