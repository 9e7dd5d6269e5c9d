"""Which operation of one run is which of another, although their streams of operations differ.

Casts, copies and constants are no operations here, so that what autocast inserts is out of the way beforehand. What is
left still differs: a format may take a call apart in another way, and backward may run in another order. So operations
are paired in five passes, each on what the one before left open:

1. within a module and a phase, the longest common subsequence of equal keys (call, operation, shapes), by the greedy
   algorithm of Myers (An O(ND) difference algorithm and its variations, 1986), which is exact;
2. equal keys that stand in another order, first with first;
3. what the same call is made of in each run, such as ``addmm`` in one and ``mm`` and ``add`` in the other, as a whole;
4. among operations with one key, those whose inputs come from partners;
5. in other modules, the same: autograd adds gradients up at whatever place it has just left.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from typing import NamedTuple


class Key(NamedTuple):
    """What an operation is known by. place: module and phase. call: torch function, file and line. op: its name."""

    place: Hashable
    call: Hashable
    op: str
    shapes: Hashable


class Pair(NamedTuple):
    """Numbers of operations of the one run and of the other: one each, or all that a call is made of."""

    a: tuple[int, ...]
    b: tuple[int, ...]

    @property
    def is_whole_call(self) -> bool:
        return len(self.a) + len(self.b) > 2


Sources = Sequence[frozenset[int]]
"""Of each operation, the numbers of those that made its inputs."""


def pair_up(a: Sequence[Key], b: Sequence[Key], sources_a: Sources, sources_b: Sources) -> list[Pair]:
    """Pairs in the order in which ``b`` ran. An operation is in one pair at most."""
    places_a, places_b = _by([key.place for key in a]), _by([key.place for key in b])
    pairs = [pair for place, left in places_a.items() for pair in _in_place(left, places_b.get(place, []), a, b)]
    return _follow_sources(pairs, a, b, sources_a, sources_b)


def _by(keys: Sequence[Hashable], numbers: Sequence[int] | None = None) -> dict[Hashable, list[int]]:
    """Numbers by their key, each list in order."""
    groups: dict[Hashable, list[int]] = defaultdict(list)
    for number, key in zip(range(len(keys)) if numbers is None else numbers, keys, strict=True):
        groups[key].append(number)
    return groups


def _in_place(left: list[int], right: list[int], a: Sequence[Key], b: Sequence[Key]) -> list[Pair]:
    """Passes 1 to 3, within a module and a phase."""
    partners = {left[i]: right[j] for i, j in longest_common([a[i] for i in left], [b[j] for j in right])}
    taken = set(partners.values())
    free = [j for j in right if j not in taken]
    waiting = _by([b[j] for j in free], free)
    for i in left:
        if i not in partners and waiting.get(a[i]):
            partners[i] = waiting[a[i]].pop(0)
    calls_b = _by([b[j].call for j in right], right)
    pairs: list[Pair] = []
    for call, mine in _by([a[i].call for i in left], left).items():
        other = calls_b.get(call, [])
        same = {i: partners[i] for i in mine if i in partners}
        if 2 * len(same) < max(len(mine), len(other)):
            same = {}  # the two are made of other things, and what they have in common may be so by chance
        pairs += [Pair((i,), (j,)) for i, j in same.items()]
        taken = set(same.values())
        pairs += _whole([i for i in mine if i not in same], [j for j in other if j not in taken], a, b)
    return pairs


def _whole(mine: list[int], other: list[int], a: Sequence[Key], b: Sequence[Key]) -> list[Pair]:
    """One pair of all that a call is made of; one that was called several times is parted evenly."""
    if not mine or not other:
        return []
    counts = (*Counter(a[i].op for i in mine).values(), *Counter(b[j].op for j in other).values())
    num_calls = math.gcd(*counts)
    return list(map(Pair, _parts(mine, num_calls), _parts(other, num_calls)))


def _parts(numbers: list[int], count: int) -> list[tuple[int, ...]]:
    size = len(numbers) // count
    return [tuple(numbers[start : start + size]) for start in range(0, len(numbers), size)]


def _follow_sources(
    pairs: list[Pair], a: Sequence[Key], b: Sequence[Key], sources_a: Sources, sources_b: Sources
) -> list[Pair]:
    """Passes 4 and 5: partners whose inputs come from partners. In order, so that inputs are settled."""
    whole = [pair for pair in pairs if pair.is_whole_call]
    partner = {pair.b[0]: pair.a[0] for pair in pairs if not pair.is_whole_call}
    of_a = {i: j for j, i in partner.items()}
    in_whole = {i for pair in whole for i in pair.a}, {j for pair in whole for j in pair.b}
    same_key, same_op = _by(a), _by([(key.op, key.shapes) for key in a])
    for j, key in enumerate(b):
        wanted = {partner.get(source) for source in sources_b[j]}
        i = partner.get(j)
        if j in in_whole[1] or None in wanted or (i is not None and sources_a[i] == wanted):
            continue
        if i is None:
            for other in same_op.get((key.op, key.shapes), []) if wanted else []:
                if sources_a[other] == wanted and other not in of_a and other not in in_whole[0]:
                    partner[j], of_a[other] = other, j
                    break
            continue
        for other in same_key[a[i]]:
            if sources_a[other] == wanted and of_a.get(other, j) >= j and other not in in_whole[0]:
                del of_a[i]
                if other in of_a:
                    partner[of_a[other]], of_a[i] = i, of_a[other]
                partner[j], of_a[other] = other, j
                break
    return sorted([*whole, *(Pair((i,), (j,)) for j, i in partner.items())], key=lambda pair: pair.b[-1])


def longest_common(a: Sequence[Hashable], b: Sequence[Hashable]) -> list[tuple[int, int]]:
    """Places (i, j) with ``a[i] == b[j]``, both rising, as many as there can be.

    Takes O((n + m) d) steps and O(d^2) memory, where d is the number of places without a partner.
    """
    reached = {1: 0}  # diagonal i - j to the furthest i on it
    history: list[dict[int, int]] = []
    for distance in range(len(a) + len(b) + 1):
        history.append(dict(reached))
        for diagonal in range(-distance, distance + 1, 2):
            i, _ = _start(reached, diagonal, distance)
            while i < len(a) and i - diagonal < len(b) and a[i] == b[i - diagonal]:
                i += 1
            reached[diagonal] = i
            if i >= len(a) and i - diagonal >= len(b):
                return _way_back(history, len(a), len(b))
    raise AssertionError("two sequences have a distance")


def _start(reached: dict[int, int], diagonal: int, distance: int) -> tuple[int, bool]:
    """The furthest i on a diagonal after one more place was left out, and whether that place is of ``b``."""
    below, above = reached.get(diagonal - 1, -1), reached.get(diagonal + 1, -1)
    is_of_b = diagonal == -distance or (diagonal != distance and below < above)
    return (above, True) if is_of_b else (below + 1, False)


def _way_back(history: list[dict[int, int]], i: int, j: int) -> list[tuple[int, int]]:
    places: list[tuple[int, int]] = []
    for distance in range(len(history) - 1, -1, -1):
        start, is_of_b = _start(history[distance], i - j, distance)
        while i > start:
            i, j = i - 1, j - 1
            places.append((i, j))
        i, j = (i, j - 1) if is_of_b else (i - 1, j)
    return places[::-1]
