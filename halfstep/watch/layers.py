"""The norms of the parameters' gradients in an index, over steps: what a heat map shows."""

from __future__ import annotations

import json
import math
import sqlite3
from array import array
from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from typing import Any

from halfstep.report import json_number
from halfstep.watch.entry import LAYERS_EVERY, Entry
from halfstep.watch.pyramid import Pyramid, Row

MOST_CELLS = 100_000
"""Norms in an answer; a model of many parameters has fewer steps in it."""
_ABSENT = -1.0
"""Stands for a parameter that a step did not have: a norm is never negative."""


def _of_steps(rows: Sequence[Row]) -> Row:
    norms = [_unpack(blob) for _, blob in rows]
    return rows[0][0], rows[-1][0], _pack(_merge(norms, min, _low)), _pack(_merge(norms, max, _high))


def _of_buckets(rows: Sequence[Row]) -> Row:
    _, firsts, lasts, lows, highs = zip(*rows, strict=True)
    low = _merge(list(map(_unpack, lows)), min, _low)
    high = _merge(list(map(_unpack, highs)), max, _high)
    return firsts[0], lasts[-1], _pack(low), _pack(high)


def _merge(
    norms: Sequence[Sequence[float]],
    plain: Callable[..., float],
    careful: Callable[[Sequence[float]], float],
) -> Iterable[float]:
    """Parameter by parameter; the ``plain`` way where every norm is there and finite."""
    is_plain = len({*map(len, norms)}) == 1 and all(min(part) >= 0 and math.isfinite(sum(part)) for part in norms)
    if is_plain:
        return map(plain, *norms) if len(norms) > 1 else norms[0]
    return map(careful, zip_longest(*norms, fillvalue=_ABSENT))


def _low(norms: Sequence[float]) -> float:
    there = [norm for norm in norms if norm != _ABSENT]
    finite = [norm for norm in there if math.isfinite(norm)]
    return min(finite) if finite else there[0] if there else _ABSENT


def _high(norms: Sequence[float]) -> float:
    """NaN beats inf, and inf beats every number."""
    return next((norm for norm in norms if math.isnan(norm)), max(norms))


def _pack(norms: Iterable[float]) -> bytes:
    return array("d", norms).tobytes()


def _unpack(blob: bytes) -> array[float]:
    return array("d", blob)


LAYERS = Pyramid("layers", LAYERS_EVERY, ["norms"], ["first", "last", "low", "high"], _of_steps, _of_buckets)
SCHEMA = "CREATE TABLE parameters (names)"


class Parameters:
    """The names of all parameters that the log has named, in the order in which it first did."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        row = db.execute("SELECT names FROM parameters").fetchone()
        self.names: list[str] = json.loads(row[0]) if row else []

    def row(self, entry: Entry) -> Row | None:
        """The row for LAYERS of an entry, None when it says nothing."""
        names, norms = entry["parameters"], list(map(float, entry["norms"]))
        if not names or len(norms) != len(names):
            return None
        if names != self.names:
            norms = self._arrange(names, norms)
        return entry["step"], _pack(norms)

    def _arrange(self, names: Sequence[str], norms: Sequence[float]) -> list[float]:
        given = dict(zip(names, norms, strict=True))
        if new := [name for name in given if name not in {*self.names}]:
            self.names += new
            self._db.execute("DELETE FROM parameters")
            self._db.execute("INSERT INTO parameters VALUES (?)", (json.dumps(self.names),))
        return [given.get(name, _ABSENT) for name in self.names]


def layers(db: sqlite3.Connection, first: int, last: int, points: int) -> dict[str, list[Any]] | None:
    """Columns of a heat map: ``steps``, ``parameters``, and the ``norms`` of each at each of them; None without any.

    At most about ``points`` steps, and MOST_CELLS norms. Where there are more, a bucket of steps gives two columns: at
    its first step the lowest norm of every parameter, at its last the highest; one that was not finite is a highest. A
    parameter that a step did not have is None.
    """
    names = Parameters(db).names
    if not names:
        return None
    most = max(2, min(points, MOST_CELLS // len(names)))
    num_steps = (last - first) // LAYERS_EVERY + 1
    rows = LAYERS.read(db, first, last, num_steps if num_steps <= most else most // 2)
    columns: list[tuple[int, Sequence[float]]] = []
    for first_step, last_step, low, high in rows:
        if last_step > first_step:
            columns.append((first_step, _unpack(low)))
        columns.append((last_step, _unpack(high)))
    by_parameter = list(zip_longest(*(norms for _, norms in columns), fillvalue=_ABSENT))
    shown = [place for place, norms in enumerate(by_parameter) if max(norms) != _ABSENT]
    if not shown:
        return None
    words = [[None if norm == _ABSENT else json_number(norm) for norm in by_parameter[place]] for place in shown]
    return {
        "steps": [step for step, _ in columns],
        "parameters": [names[place] for place in shown],
        "norms": [list(norms) for norms in zip(*words, strict=True)],
    }
