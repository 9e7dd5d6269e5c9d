"""The fewest of many suspects that have to be changed for a test to pass: delta debugging in order of suspicion.

The suspects stand in a row, the likeliest first. For a set that is known to be needed, the shortest stretch of the row
that makes the test pass along with it ends in one more that is needed: without this one it fails. So each needed one is
found by doubling the stretch until it passes and then halving the gap, and only what stands before it is left to look
at. In the end each found one is left out once, as proof.

If changing more never breaks the test, k needed ones among n take, wherever they stand, at most

    2 (none, all) + k (2 d - 1 (doubling, halving) + 1 (are these enough?)) + k - 1 (leaving out)

probes with d = ceil(log2 n); for n = 50 that is 13 k + 1: 14 for one, 27 for two. One that stands first takes 3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass


class Stopped(Exception):
    """What a test raises when it may not run any more; the search then ends with the best that it has."""


@dataclass(frozen=True)
class SearchResult:
    """How a search ended.

    found:   a smallest set that passes, in the order of the suspects; None if none has been seen to.
    minimal: each one of ``found`` was left out once, and the test failed then.
    stopped: what ended the search from outside, :class:`Stopped` or Ctrl-C; None if nothing did.
    num_probes: different sets that were tried.
    """

    found: tuple[str, ...] | None
    minimal: bool
    stopped: BaseException | None
    num_probes: int


def minimal_set(suspects: Sequence[str], passes: Callable[[frozenset[str]], bool]) -> SearchResult:
    """The smallest set of ``suspects`` that ``passes`` once it is changed; no set is tried twice.

    ``found`` has passed, also where the test is fickle and a larger set fails that should not; it is empty if nothing
    has to be changed, and None if not even all of them pass together.
    """
    probes = _Probes(suspects, passes)
    try:
        found = _search(suspects, probes)
        return SearchResult(_ordered(suspects, found), found is not None, None, len(probes.known))
    except (Stopped, KeyboardInterrupt) as error:
        return SearchResult(_ordered(suspects, probes.best), False, error, len(probes.known))


def _ordered(suspects: Sequence[str], found: frozenset[str] | None) -> tuple[str, ...] | None:
    return None if found is None else tuple(name for name in suspects if name in found)


class _Probes:
    """What has been tried, and the smallest set that has passed."""

    def __init__(self, suspects: Sequence[str], passes: Callable[[frozenset[str]], bool]) -> None:
        assert len(set(suspects)) == len(suspects), "each suspect once"
        self._passes = passes
        self.known: dict[frozenset[str], bool] = {}
        self.best: frozenset[str] | None = None

    def __call__(self, names: Iterable[str]) -> bool:
        tried = frozenset(names)
        if tried not in self.known:
            self.known[tried] = self._passes(tried)
        if self.known[tried] and (self.best is None or len(tried) < len(self.best)):
            self.best = tried
        return self.known[tried]


def _search(suspects: Sequence[str], probes: _Probes) -> frozenset[str] | None:
    if probes(()):
        return frozenset()
    if not probes(suspects):
        return None
    needed: list[str] = []
    rest = list(suspects)
    while not probes(needed):
        # Here needed and rest together have passed, so that the loop ends with a set that has.
        last = _shortest(lambda count: probes((*needed, *rest[:count])), len(rest)) - 1
        needed.append(rest[last])
        del rest[last:]
    return _without_idle(needed, probes)


def _shortest(passes: Callable[[int], bool], count: int) -> int:
    """A count that passes while one less does not. 0 does not and ``count`` does, as the caller knows."""
    too_few, enough = 0, 1
    while enough < count and not passes(enough):
        too_few, enough = enough, 2 * enough
    enough = min(enough, count)
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        too_few, enough = (too_few, middle) if passes(middle) else (middle, enough)
    return enough


def _without_idle(needed: list[str], probes: _Probes) -> frozenset[str]:
    """``needed`` without what can be left out, each one tried; the least suspect, which were found first, go first."""
    for name in needed:
        fewer = [other for other in needed if other != name]
        if probes(fewer):
            return _without_idle(fewer, probes)
    return frozenset(needed)
