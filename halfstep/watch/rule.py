"""A rule of the guard: a small pure function of a window of steps, with its limits, its reason and what to do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from halfstep.watch.window import Window

Severity = Literal["error", "warning", "note"]
"""The worst first."""


@dataclass(frozen=True)
class Finding:
    """What a rule sees in a window.

    message:   one line with the numbers: what happened. action: one sentence: what to do.
    situation: tells findings of one rule apart: the guard says each once, and again when it has been gone for a window.
    step:      where it happened, if not in the last step of the window. severity: if not the rule's.
    lowers_scale: whether lowering the loss scale once would help.
    """

    message: str
    action: str
    situation: str = ""
    step: int | None = None
    severity: Severity | None = None
    lowers_scale: bool = False


@dataclass(frozen=True)
class Rule:
    """A file of ``halfstep/watch/rules`` holds one, under the name ``RULE``.

    name:    in kebab-case. summary: one sentence for lists. why: Markdown paragraphs with the numbers, for its page.
    limits:  the settings with their defaults; limit_notes: what each means, with its unit.
    check:   called after every entry of one of ``kinds``; it looks, and changes nothing. It is called in the training
             process, so the look that most steps end with takes constant time.
    kinds:   of entries; ``step`` includes a clock that ticks while no step comes. What is found stands until the next.
    """

    name: str
    severity: Severity
    summary: str
    why: str
    check: Callable[[Window, Mapping[str, float]], Finding | None]
    limits: Mapping[str, float] = field(default_factory=dict)
    limit_notes: Mapping[str, str] = field(default_factory=dict)
    kinds: Sequence[str] = ("step",)

    def __post_init__(self) -> None:
        assert self.limits.keys() == self.limit_notes.keys(), f"{self.name}: a limit without a note"
