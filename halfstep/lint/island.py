"""Blocks that turn autocast off inside of a region: ``with torch.autocast("cuda", enabled=False)``."""

from __future__ import annotations

from halfstep.lint.event import Event
from halfstep.lint.formats import region_enabled
from halfstep.lint.values import Object


def islands(event: Event) -> tuple[Object | None, tuple[Object, ...]]:
    """The innermost region around ``event`` that may be on, and the islands in it that are around the event too.

    None without such a region. Outermost first.
    """
    around: Object | None = None
    inner: tuple[Object, ...] = ()
    for region in (context for context in event.contexts if context.kind == "region"):
        if region_enabled(region) is False:
            inner = (*inner, region)
        else:
            around, inner = region, ()
    return around, inner
