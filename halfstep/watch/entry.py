"""What is in a log: one JSON object a line, each with its ``kind`` and the ``time`` that it was written, in seconds.

    run          the start of a process that writes: see RunStart; again where a lost file is made anew
    seam         a run goes on from a checkpoint: ``step`` is the last step that counts; later ones of before do not
    step         what one optimizer step did: see Step
    layers       every LAYERS_EVERY steps: ``step``, ``parameters`` and the true 2-norms of their gradients, ``norms``
    reduction    the guard lowered the loss scale: ``step`` is the last one before, ``scale`` the one from then on
    overflow, promotion, alert    the records of halfstep.events, as their to_dict() gives them
    ranks        rank 0 compared the ranks: milliseconds of a step, ``step_ms``, of the ``slowest`` one's own work in
                 it, ``slowest_ms``, and the median of the others, ``others_ms``; ``troubles`` that ranks told of
    updates, ranges               reports that a loop recorded: ``step`` and the report's to_dict()
    explanation                   of a bad step, by Stepper(explain=True)
    gap          the log was lost for a while: ``num_lost`` entries were never written
    end          the process ended: ``state`` is finished or failed, ``reason`` why

NaN and inf are the strings "NaN", "Infinity" and "-Infinity", which float() of Python and Number() of JavaScript read;
a key that is left out has its default. Losses and norms of fp32 have the nine digits that tell every fp32 number from
every other, and Step.from_entry gives back their exact bits; those of fp64 have all their digits.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from ctypes import c_float
from dataclasses import asdict, dataclass, field, fields
from typing import Any, TypeGuard

from halfstep.report import json_number

Entry = dict[str, Any]
LAYERS_EVERY = 100
_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


@dataclass(frozen=True, slots=True)
class Step:
    """One optimizer step, as the log keeps it. The names of StepReport mean what they mean there.

    time:              when its numbers were asked for, in seconds since 1970.
    nonfinite_share:   share of the gradient's elements that were inf or NaN, replayed micro-batches included; None
                       where nobody counted.
    nonfinite_at_most: share of the elements in parameters whose gradient had a norm that was not finite.
    parameters:        the names of those parameters.
    count:             what the window held, in the unit of the loss's count: tokens, samples, or micro-batches.
    bad_rank:          the rank whose loss was not finite, where it was that of one alone.
    memory_mib:        CUDA: the most that was allocated so far; CPU: what the process holds. None where unknown.
    """

    step: int
    time: float
    loss: float
    grad_norm: float
    scale: float = 1.0
    applied: bool = True
    reason: str | None = None
    num_replays: int = 0
    nonfinite_share: float | None = 0.0
    nonfinite_at_most: float = 0.0
    parameters: tuple[str, ...] = ()
    count: float = 1.0
    bad_rank: int | None = None
    memory_mib: float | None = None

    @property
    def is_finite(self) -> bool:
        """Whether the loss and the gradient were."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)

    def to_line(self) -> str:
        """The line of the log, without its end; put together here, since every step costs one."""
        numbers = f'"loss":{_digits(self.loss)},"grad_norm":{_digits(self.grad_norm)}'
        parts = [f'{{"kind":"step","step":{self.step},"time":{self.time!r},{numbers}']
        for name, default in _DEFAULTS.items():
            value = getattr(self, name)
            if value != default:
                parts.append(f'"{name}":{_text(value)}')
        return ",".join(parts) + "}"

    def to_entry(self) -> Entry:
        """What a reader of the line gets."""
        entry: Entry = json.loads(self.to_line())
        return entry

    @classmethod
    def from_entry(cls, entry: Mapping[str, Any]) -> Step:
        """The step of a line; ValueError, TypeError, OverflowError or KeyError when it is none."""
        known = {name: entry[name] for name in _DEFAULTS if entry.get(name) is not None}
        for name in ("scale", "nonfinite_share", "nonfinite_at_most", "count", "memory_mib"):
            if name in known:
                known[name] = float(known[name])
        if entry.get("nonfinite_share", 0.0) is None:
            known["nonfinite_share"] = None  # nobody counted, which is not the default
        if "parameters" in known:
            known["parameters"] = tuple(known["parameters"])
        loss, grad_norm = _lengthened(float(entry["loss"])), _lengthened(float(entry["grad_norm"]))
        return cls(entry["step"], float(entry["time"]), loss, grad_norm, **known)


_DEFAULTS = {f.name: f.default for f in fields(Step)[4:]}


def _digits(value: float) -> str:
    """A number of fp32 as the decimal of nine digits that identifies it; any other with all its digits."""
    text = f"{value:.9g}"
    if "." in text and c_float(float(text)).value == value:
        return text
    return _text(value)


def _text(value: Any) -> str:
    if type(value) is float and math.isfinite(value):
        return repr(value)  # what the encoder writes, without its start
    return _encode(json_number(value))


def _lengthened(value: float) -> float:
    """The number of fp32 that was written as ``value``; ``value`` itself, if none was."""
    exact = c_float(value).value
    return exact if float(f"{exact:.9g}") == value else value


@dataclass(frozen=True)
class RunStart:
    """The line that a process writes first.

    rank, num_ranks: of the process. session: names this process among those that wrote to the log.
    can_lower:       whether the loss scale is lowered when the guard asks: by one process alone, or replicas together.
    host, pid:       where it runs. policy: the policy in effect; info: RunInfo.to_dict(). scale: settings of the
                     loss scale, of halfstep.policy.LossScale. num_elements: of the trainable parameters.
    """

    time: float
    rank: int = 0
    num_ranks: int = 1
    session: str = ""
    host: str = ""
    pid: int = 0
    policy: str = ""
    scale: Mapping[str, Any] = field(default_factory=dict)
    info: Mapping[str, Any] = field(default_factory=dict)
    num_elements: int = 0
    can_lower: bool = True

    def to_entry(self) -> Entry:
        return {"kind": "run", **asdict(self)}

    @classmethod
    def from_entry(cls, entry: Mapping[str, Any]) -> RunStart:
        names = {f.name for f in fields(cls)}
        return cls(**{name: value for name, value in entry.items() if name in names and value is not None})


_Check = Callable[[Any], bool]


def _is_number(value: Any) -> bool:
    return type(value) is float or (type(value) is int and abs(value) < _MOST) or value in _NOT_FINITE


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MOST


def _or_none(check: _Check) -> _Check:
    return lambda value: value is None or check(value)


def _list_of(check: _Check) -> _Check:
    return lambda value: isinstance(value, list) and all(map(check, value))


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


_MOST = 2**63
"""Larger whole numbers are none of ours, and SQLite has none."""
_NOT_FINITE = ("NaN", "Infinity", "-Infinity")
_CHECKS: Mapping[str, _Check] = {
    "number": _is_number,
    "numbers": _list_of(_is_number),
    "count": _is_count,
    "text": _is_text,
    "texts": _list_of(_is_text),
    "flag": lambda value: isinstance(value, bool),
    "table": lambda value: isinstance(value, dict),
}
_TABLE = """
run       time:number rank:count? num_ranks:count? session:text? host:text? pid:count? policy:text? scale:table?
run       info:table? num_elements:count? can_lower:flag?
seam      step:count
step      step:count time:number loss:number grad_norm:number scale:number? applied:flag? reason:text?
step      num_replays:count? nonfinite_share:number? nonfinite_at_most:number? parameters:texts? count:number?
step      memory_mib:number? bad_rank:count?
layers    step:count parameters:texts norms:numbers
overflow  step:count scale:number overflowed_at:number parameters:texts nonfinite_share:number
reduction step:count scale:number
promotion step:count module:text
alert     rule:text step:count severity:text message:text action:text rank:count?
ranks     step:count num_ranks:count step_ms:number others_ms:number slowest:count slowest_host:text
ranks     slowest_ms:number troubles:texts
updates   step:count
ranges    step:count
gap       num_lost:count
end       state:text
"""
"""Of each kind: the keys that somebody reads, and what they hold; ``?`` after a key that may be left out or null."""
_SURE = {"number": float, "text": str, "flag": bool, "table": dict}
"""What needs no closer look; of the other words, nothing that JSON gives."""
_KEYS: dict[str, dict[str, tuple[type, _Check]]] = {}
_NEEDED: dict[str, set[str]] = {}
for _kind, *_keys in map(str.split, _TABLE.strip().splitlines()):
    for _name, _word in (key.split(":") for key in _keys):
        _what = _word.removesuffix("?")
        _check = _CHECKS[_what] if _what == _word else _or_none(_CHECKS[_what])
        _KEYS.setdefault(_kind, {})[_name] = _SURE.get(_what, object), _check
        if _what == _word:
            _NEEDED.setdefault(_kind, set()).add(_name)


def is_entry(value: object) -> TypeGuard[Entry]:
    """Whether a line holds an entry, with what its kind needs; one of a kind that is not known may hold anything."""
    if not isinstance(value, dict) or not isinstance(kind := value.get("kind"), str):
        return False
    keys = _KEYS.get(kind)
    if keys is None:
        return True
    if not _NEEDED[kind] <= value.keys():
        return False
    for name, content in value.items():
        key = keys.get(name)
        if key is not None and type(content) is not key[0] and not key[1](content):
            return False
    return True


def line_of(entry: Entry | Step) -> str:
    """The line of an entry, without its end. TypeError, ValueError or RecursionError for what JSON cannot hold."""
    if isinstance(entry, Step):
        return entry.to_line()
    try:
        return _encode(entry)
    except ValueError:  # a number that is not finite, deep in a report
        return _encode(_strict(entry))


def _strict(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _strict(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(part) for part in value]
    return json_number(value)
