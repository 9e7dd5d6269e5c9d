"""Slow twins of the pairing: every subsequence, and the size of the largest set of partners by trying all."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence


def length_of_longest_common(a: Sequence[Hashable], b: Sequence[Hashable]) -> int:
    """By the recursion that defines it (Wagner and Fischer 1974)."""

    @functools.cache
    def longest(i: int, j: int) -> int:
        if i == len(a) or j == len(b):
            return 0
        taken = 1 + longest(i + 1, j + 1) if a[i] == b[j] else 0
        return max(taken, longest(i + 1, j), longest(i, j + 1))

    return longest(0, 0)
