"""How a run is watched: limits of rules, golden runs, who is told, and where else the log goes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

from halfstep.errors import HalfstepError
from halfstep.files import read_toml
from halfstep.watch.entry import Entry


class Exporter(Protocol):
    """Where the entries of a log go besides; halfstep/watch/exporters has those for known tools.

    It is called from one thread of its own, so that a slow one holds up neither a step nor the log. Others get the same
    entries, so it changes none.
    """

    def write(self, entry: Entry) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Watch:
    """How a run is watched; also the keys of a ``watch.toml``.

    rules:     a rule's name to False, which turns it off, or to limits that differ from its defaults.
    golden:    folders of runs whose losses the run has to follow.
    notify:    targets of the alerts of rank 0: ``webhook:URL``, ``command:WORDS``, or a URL of apprise. ``$NAME`` in a
               target is read from the environment, so that no secret is in a file.
    exporters: ``tensorboard:FOLDER``, ``wandb:PROJECT``, ``mlflow:EXPERIMENT``, ``prometheus:FILE``, or an object with
               the methods of :class:`Exporter`.
    """

    rules: Mapping[str, bool | Mapping[str, float]] = field(default_factory=dict)
    golden: Sequence[str] = ()
    notify: Sequence[str] = ()
    exporters: Sequence[str | Exporter] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.rules, Mapping):
            raise HalfstepError(f"rules={self.rules!r}", "it maps a rule to its limits", 'Write {"loss-spike": False}.')
        for name in ("golden", "notify", "exporters"):
            words = getattr(self, name)
            if not isinstance(words, list | tuple) or (name != "exporters" and not all(map(_is_text, words))):
                raise HalfstepError(f"{name}={words!r}", "it is a list of texts", f'Write {name}=("...",).')
        for one in self.exporters:
            if not isinstance(one, str) and not (hasattr(one, "write") and hasattr(one, "close")):
                raise HalfstepError(
                    f"exporter {one!r}", "it has no write(entry) and close()", "See docs/watch-export.md."
                )

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Watch:
        """The settings in a TOML file. HalfstepError says what is wrong in it."""
        return cls.of(read_toml("settings", path, "docs/watch.md"), str(path))

    @classmethod
    def of(cls, values: Mapping[str, Any], where: str) -> Watch:
        """The settings of a mapping; ``where`` names it in an error."""
        names = [f.name for f in fields(cls)]
        if unknown := sorted(values.keys() - set(names)):
            raise HalfstepError(f"{unknown[0]!r} in {where}", "no such setting", f"Use {', '.join(names)}.")
        try:
            return cls(**values)
        except HalfstepError as error:
            raise HalfstepError(f"{where}, {error.what}", error.why, error.fix) from None


def _is_text(value: object) -> bool:
    return isinstance(value, str)
