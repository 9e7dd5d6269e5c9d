"""Failures of ranks that do something together: raised on each of them, with the same words and the ranks' numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from halfstep.errors import HalfstepError
from halfstep.ranks.agreement import together
from halfstep.ranks.difference import name_ranks
from halfstep.ranks.one import Ranks


@contextmanager
def failing_together(ranks: Ranks, what: str, fix: str) -> Iterator[None]:
    """What fails in here on one rank is raised as the same HalfstepError on all. Nothing in here is a collective.

    ``what`` failed and what to do (``fix``) are said of what is no HalfstepError itself, such as a full disk.
    """
    with together(ranks):
        try:
            yield
        except Exception as error:
            raise _told(error, what, fix) from error


def error_of(ranks: Ranks, failures: Mapping[int, BaseException], what: str, fix: str) -> HalfstepError:
    """The first of the ``failures`` by rank, and which ranks have failed, but where that is every one."""
    first = _told(failures[min(failures)], what, fix)
    if len(failures) == ranks.num:
        return first
    names = name_ranks([ranks.numbers[rank] for rank in sorted(failures)])
    return HalfstepError(f"{names}: {first.what}", first.why, first.fix)


def _told(error: BaseException, what: str, fix: str) -> HalfstepError:
    if isinstance(error, HalfstepError):
        return error
    if isinstance(error, OSError) and error.strerror:
        return HalfstepError(what, error.strerror, fix)
    first_line = next(iter(str(error).splitlines()), "")
    return HalfstepError(what, f"{type(error).__name__}: {first_line}", fix)
