"""What a trainer counts in its attributes while a micro-batch runs, so that a replay does not count it twice.

Trainers append metrics and add up tokens inside ``compute_loss``, each in attributes of its own. What changes there is
plain Python: numbers, lists that grow, dicts of such. So all of it is put back, whoever keeps it.
"""

from __future__ import annotations

from collections import deque
from typing import Any


class Bookkeeping:
    """The plain attributes of ``owners`` as they are now; :meth:`restore` makes them so again.

    A list is cut back to its length, which costs nothing however long it is. A dict, a set and a deque get back what
    they held, and dicts inside dicts too. An attribute gets back the object that it named. What an object of another
    kind changes in itself is left alone; so is a tensor that is added to in place.
    """

    def __init__(self, *owners: object) -> None:
        self._dicts: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
        self._lists: list[tuple[list[Any], int]] = []
        self._others: list[tuple[set[Any] | deque[Any], tuple[Any, ...]]] = []
        self._seen: set[int] = set()
        for owner in owners:
            self._keep(vars(owner))

    def _keep(self, value: Any) -> None:
        if not isinstance(value, dict | list | set | deque) or id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, dict):
            self._dicts.append((value, dict(value)))
            for each in value.values():
                self._keep(each)
        elif isinstance(value, list):
            self._lists.append((value, len(value)))
        else:
            self._others.append((value, tuple(value)))

    def restore(self) -> None:
        """As they were; as often as wanted."""
        for current, before in self._dicts:
            for key in current.keys() - before.keys():
                del current[key]
            current.update(before)
        for grown, length in self._lists:
            del grown[length:]
        for container, items in self._others:
            container.clear()
            container.extend(items) if isinstance(container, deque) else container.update(items)
