"""Where two runs part by more than their formats cost: each pair of operations, judged by what its inputs carry.

    error     max |b - a| / (u S), S = max(|a|, |b|, terms)
    expected  the largest error of what made its inputs; at least 1, and at least the roundoff of its own formats over u
    limit     JUMP x expected; of exponentials, sines and attention at least 2 d / u, as long as that is a quarter of S
    parts     where error > limit

u is the unit roundoff of the coarsest format of the two policies; terms is what :class:`halfstep.explain.stream.Kept`
says, so that a sum which cancels by chance, as the gradient of a bias does, is judged by what it is made of. The result
of an exponential is off by d, the absolute error of what goes in: of logits around 50, 16 bit leaves it 50 u. An
operation that follows itself, as a running sum does, is judged by what went into the first of the row, or it would part
by one step at a time.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from halfstep.explain.pairing import Pair, pair_up
from halfstep.explain.stream import MASK, SAMPLE, Kept, Ran, Source, beyond

JUMP = 16.0
"""How many times more error than its inputs carry an operation may have. Right operations of healthy models reach 8."""

_QUARTER = 0.25
_BY_ABSOLUTE = frozenset(
    ("exp", "exp2", "expm1", "_softmax", "_log_softmax_backward_data", "sigmoid", "tanh", "erf", "sin", "cos")
)
"""Functions whose result is off by the absolute error of their input, not by its relative one; and fused attention."""

_DECIDES = frozenset(
    f"{name}_backward" for name in ("threshold", "hardtanh", "hardswish", "hardsigmoid", "leaky_relu", "prelu_kernel")
) | frozenset(("sign", "sgn", "floor", "ceil", "round", "trunc", "frac", "fmod", "remainder", "heaviside"))
"""Their results jump where an input crosses a limit; those with a result of whole numbers are known by that."""


@dataclass(frozen=True, eq=False)
class Compared:
    """A pair of operations, or a cast that one run has; ``a`` or ``b`` is None then.

    error, expected, limit: in units of u. kind: ``arithmetic``, ``cast``, ``random`` or ``decision``; of the last two
    only what is not finite counts, since they may well differ.
    """

    a: Ran | None
    b: Ran | None
    error: float
    expected: float
    limit: float
    kind: str = "arithmetic"

    @property
    def ran(self) -> Ran:
        ran = self.b or self.a
        assert ran is not None
        return ran

    @property
    def parts(self) -> bool:
        is_judged = self.kind in ("arithmetic", "cast") or (self.kind == "decision" and math.isinf(self.error))
        return is_judged and self.error > self.limit


@dataclass(frozen=True, eq=False)
class Comparison:
    """compared: in order of execution. num_paired, num_operations: of both runs together. unpaired: of each run."""

    compared: tuple[Compared, ...]
    num_paired: int
    num_operations: int
    unpaired: tuple[tuple[Ran, ...], tuple[Ran, ...]]

    @property
    def paired_pct(self) -> float:
        return 100.0 * self.num_paired / self.num_operations if self.num_operations else 100.0


class Carried(NamedTuple):
    """What the inputs of an operation carry, in units of u: the largest error at the scale of its tensor, the same
    before a row of operations of its like, the largest absolute error; and whether one is a decision that fell
    otherwise."""

    error: float = 0.0
    base: float = 0.0
    absolute: float = 0.0
    is_decided: bool = False


class Errors:
    """What each output of one run carries."""

    def __init__(self, ran: Sequence[Ran], unit: float) -> None:
        self.ran = ran
        self.lost = _read({i: operation.lost for i, operation in enumerate(ran)}, unit)
        self.scores = _read({i: operation.score for i, operation in enumerate(ran)}, 1.0)
        self._known: dict[Source, tuple[Ran, Carried]] = {}

    def carried(self, number: int, within: Sequence[int] = ()) -> Carried:
        """Of the inputs of an operation, those from ``within`` aside."""
        found = Carried()
        for source in self.ran[number].inputs:
            if source in self._known and source.number not in within:
                maker, carried = self._known[source]
                found = Carried(
                    max(found.error, carried.error),
                    max(found.base, carried.base if maker.key == self.ran[number].key else carried.error),
                    max(found.absolute, carried.absolute),
                    found.is_decided or carried.is_decided,
                )
        return found

    def pass_on(self, number: int) -> float:
        """An edge, or an operation without a partner, hands on what it is given; the error that a cast adds, or 0."""
        ran, carried, maker = self.ran[number], self.carried(number), self.ran[number]
        relative: float
        absolute: float
        relative, absolute = self.lost.get(number, (0.0, 0.0))
        base = carried.base
        if ran.is_edge and ran.inputs and ran.inputs[0] in self._known:
            maker, known = self._known[ran.inputs[0]]  # a row goes on through casts
            base = known.base
        carried = Carried(
            max(carried.error, relative), max(base, relative), max(carried.absolute, absolute), carried.is_decided
        )
        for output in range(max(1, len(ran.outputs))):
            self._known[Source(number, output)] = maker, carried
        return relative

    def set(self, number: int, outputs: dict[int, Carried], other: Carried) -> None:
        """What was found of each output; ``other`` of one that was not compared."""
        for output in range(len(self.ran[number].outputs)):
            self._known[Source(number, output)] = self.ran[number], outputs.get(output, other)


def _read(tensors: dict[int, torch.Tensor | None], unit: float) -> dict[int, Any]:
    """Numbers in units of ``unit``, read from the device at once."""
    given = {number: tensor for number, tensor in tensors.items() if tensor is not None}
    if not given:
        return {}
    return dict(zip(given, (torch.stack(list(given.values())) / unit).tolist(), strict=True))


def compare(a: Sequence[Ran], b: Sequence[Ran], unit: float, factor: float = 1.0) -> Comparison:
    """Pair two streams and judge each pair. unit: u. factor: loss scale of ``b`` in units of that of ``a``."""
    numbers_a = [i for i, ran in enumerate(a) if not ran.is_edge]
    numbers_b = [j for j, ran in enumerate(b) if not ran.is_edge]
    pairs = [
        Pair(tuple(numbers_a[i] for i in pair.a), tuple(numbers_b[j] for j in pair.b))
        for pair in pair_up(
            [a[i].key for i in numbers_a],
            [b[j].key for j in numbers_b],
            sources_of(a, numbers_a),
            sources_of(b, numbers_b),
        )
    ]
    found = _differences(a, b, pairs, factor)
    paired_a, paired_b = ({n for pair in pairs for n in pair[side]} for side in (0, 1))
    return Comparison(
        tuple(_judge(a, b, pairs, found, unit)),
        len(paired_a) + len(paired_b),
        len(numbers_a) + len(numbers_b),
        (
            tuple(a[i] for i in numbers_a if i not in paired_a),
            tuple(b[j] for j in numbers_b if j not in paired_b),
        ),
    )


def sources_of(ran: Sequence[Ran], numbers: Sequence[int]) -> list[frozenset[int]]:
    """Of each operation, the places in ``numbers`` of those that made its inputs, casts and copies aside."""
    places = {number: place for place, number in enumerate(numbers)}
    reached: list[frozenset[int]] = []
    for operation in ran:
        reached.append(
            frozenset().union(
                *({places[s.number]} if s.number in places else reached[s.number] for s in operation.inputs)
            )
        )
    return [reached[number] for number in numbers]


_Found = dict[tuple[int, int], tuple[float, float]]
"""What :func:`difference` gives, by pair and output."""


def _differences(a: Sequence[Ran], b: Sequence[Ran], pairs: Sequence[Pair], factor: float) -> _Found:
    """Everything is computed on the device and read once."""
    rows: list[torch.Tensor] = []
    places: list[tuple[int, int]] = []
    used = _users(a), _users(b)
    for number, pair in enumerate(pairs):
        is_backward = a[pair.a[-1]].site.phase == "backward"
        for output, mine, other in _comparable(a, b, pair, used):
            # Backward holds values that the loss scale multiplies, and others.
            for ratio in {1.0, factor} if is_backward else {1.0}:
                rows.append(difference(mine, other, ratio))
                places.append((number, output))
    found: _Found = {}
    for place, row in zip(places, torch.stack(rows).tolist() if rows else [], strict=True):
        found[place] = min((row[0], row[1]), found.get(place, (math.inf, math.inf)))
    return found


def _users(ran: Sequence[Ran]) -> dict[Source, int]:
    """The last that uses each output."""
    return {source: number for number, operation in enumerate(ran) for source in operation.inputs}


def _comparable(
    a: Sequence[Ran], b: Sequence[Ran], pair: Pair, used: tuple[dict[Source, int], dict[Source, int]]
) -> list[tuple[int, Kept, Kept]]:
    """(output, kept in a, kept in b) of a pair.

    A call that is made of other things is compared in what its shorter form ends with, as far as that is used
    afterwards, with whatever has the shape of it; the least difference counts.
    """
    if not pair.is_whole_call:
        mine, other = a[pair.a[0]].outputs, b[pair.b[0]].outputs
        return [(k, x, y) for k, (x, y) in enumerate(zip(mine, other, strict=False)) if _are_alike(x, y)]
    side = 0 if len(pair.a) <= len(pair.b) else 1
    last = pair[side][-1]
    kept_by_other = [kept for number in pair[1 - side] for kept in (b if side == 0 else a)[number].outputs]
    found: list[tuple[int, Kept, Kept]] = []
    for k, kept in enumerate((a, b)[side][last].outputs):
        if used[side].get(Source(last, k), last) > last:
            alike = [other for other in kept_by_other if _are_alike(kept, other)]
            found += [(k, kept, other) if side == 0 else (k, other, kept) for other in alike]
    return found


def _are_alike(x: Kept, y: Kept) -> bool:
    return x.shape == y.shape and x.is_discrete == y.is_discrete


def difference(a: Kept, b: Kept, ratio: float = 1.0) -> torch.Tensor:
    """max |b / ratio - a|, float64 [2] on the device: in proportion to S, and as it is; inf where one is not finite.

    Of whole numbers and truth values 1 if any differs, else 0.
    """
    x, y = a.sample.double(), b.sample.double()
    if a.is_discrete:
        return ((x != y).any() | (a.extremes[0] != b.extremes[0])).double().expand(2)
    is_far = (x.abs() >= beyond(a.format)) & (y.abs() >= beyond(b.format)) & (x.sign() == y.sign())
    y = y / ratio
    is_mask = ((x < MASK) & (y == -math.inf)) | ((y < MASK) & (x == -math.inf))
    is_alike = (x == y) | (x.isnan() & y.isnan()) | is_far | is_mask
    apart = torch.where(is_alike, 0.0, (x - y).abs().nan_to_num(nan=math.inf, posinf=math.inf))
    largest = apart.max() if apart.numel() else apart.sum()
    scale = torch.maximum(a.extremes[0], b.extremes[0] / ratio)
    for terms in (a.terms, b.terms if b.terms is None else b.terms / ratio):
        if terms is not None:
            scale = torch.maximum(scale, torch.where(terms.isfinite(), terms, 0.0))
    apart_by = torch.stack([torch.where(largest > 0, largest / scale, 0.0), largest])
    if math.prod(a.shape) <= SAMPLE:
        return apart_by
    is_unseen = ((a.extremes[1] > 0) != (b.extremes[1] > 0)) & x.isfinite().all() & y.isfinite().all()
    return torch.where(is_unseen, math.inf, apart_by)


def _judge(a: Sequence[Ran], b: Sequence[Ran], pairs: Sequence[Pair], found: _Found, unit: float) -> list[Compared]:
    errors_a, errors_b = Errors(a, unit), Errors(b, unit)
    by_number: dict[int, dict[int, tuple[float, float]]] = defaultdict(dict)
    for (number, output), value in found.items():
        by_number[number][output] = value
    ends = {pair.b[-1]: number for number, pair in enumerate(pairs)}
    inner_a = {i for pair in pairs for i in pair.a}
    compared: list[Compared] = []
    next_a = 0
    for j in range(len(b)):
        if j not in ends:
            compared += _judge_cast(errors_b, j, unit)
            continue
        pair = pairs[ends[j]]
        for i in range(next_a, pair.a[-1]):
            if i not in inner_a:
                compared += [replace(cast, a=cast.b, b=None) for cast in _judge_cast(errors_a, i, unit)]
        next_a = max(next_a, pair.a[-1])
        compared.append(_judge_pair(errors_a, errors_b, pair, by_number[ends[j]], unit))
    return compared


def _judge_cast(errors: Errors, number: int, unit: float) -> list[Compared]:
    """The cast, if it loses too much."""
    ran, lost = errors.ran[number], errors.pass_on(number)
    expected = max(1.0, ran.unit / unit)
    cast = Compared(None, ran, lost, expected, JUMP * expected, "cast")
    return [cast] if ran.is_edge and cast.parts else []


def _judge_pair(
    errors_a: Errors, errors_b: Errors, pair: Pair, found: dict[int, tuple[float, float]], unit: float
) -> Compared:
    a, b = errors_a.ran[pair.a[-1]], errors_b.ran[pair.b[-1]]
    short = a if len(pair.a) <= len(pair.b) else b
    inputs = [errors_a.carried(i, pair.a) for i in pair.a] + [errors_b.carried(j, pair.b) for j in pair.b]
    carried = Carried(*(max(values) for values in zip(*inputs, strict=True)))
    discrete = {k for k, kept in enumerate(short.outputs) if kept.is_discrete}
    outputs = {
        k: Carried(is_decided=relative > 0)
        if k in discrete
        else Carried(relative / unit, carried.base, absolute / unit)
        for k, (relative, absolute) in found.items()
    }
    worst = max(outputs.values(), default=carried)
    is_decision = carried.is_decided or any(o.is_decided for o in outputs.values()) or b.op.rstrip("_") in _DECIDES
    kind = "random" if a.is_random or b.is_random else "decision" if is_decision else "arithmetic"
    other = carried._replace(is_decided=False)
    for side, numbers in ((errors_a, pair.a), (errors_b, pair.b)):
        for number in numbers:
            if side.ran[number] is short or not pair.is_whole_call:
                side.set(number, outputs, other)
            else:
                side.set(number, {}, worst._replace(is_decided=False))
    expected = max(1.0, carried.base, a.unit / unit, b.unit / unit)
    limit = JUMP * expected
    score = max(errors_a.scores.get(pair.a[-1], 0.0), errors_b.scores.get(pair.b[-1], 0.0))
    if score or b.op.rstrip("_") in _BY_ABSOLUTE:
        absolute = carried.base * score if score else carried.absolute
        limit = max(limit, min(2 * max(absolute, score), _QUARTER / unit))
    error = worst.error if outputs else 0.0
    return Compared(a, b, error, expected, limit, kind)
