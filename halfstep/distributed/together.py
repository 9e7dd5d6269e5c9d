"""One outcome on all ranks: what fails on one of them is raised on each, with the same words and the rank's number."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from halfstep.errors import HalfstepError
from halfstep.ranks.one import Ranks

T = TypeVar("T")


def together(ranks: Ranks, what: str, fix: str, function: Callable[[], T]) -> list[T]:
    """What ``function`` returns on each rank, by rank: small and picklable. It uses no collective itself.

    Where it fails on some rank, all raise the same HalfstepError: its own, or one of ``what`` and ``fix``.
    """
    failure: Exception | None = None
    result: T | None = None
    try:
        result = function()
    except Exception as error:
        failure = error
    answers = ranks.gather((result, None if failure is None else in_words(failure, what, fix)))
    failures = {rank: words for rank, (_, words) in enumerate(answers) if words is not None}
    if failures:
        raise joint_error(failures, ranks.num) from failure
    return [result for result, _ in answers]


def joint_error(failures: Mapping[int, tuple[str, str, str]], num_ranks: int) -> HalfstepError:
    """The error of the first rank that has failed, which names all that have, but where that is every one."""
    what, why, fix = failures[min(failures)]
    if len(failures) < num_ranks:
        numbers = ", ".join(map(str, sorted(failures)))
        what = f"rank{'s' if len(failures) > 1 else ''} {numbers}: {what}"
    return HalfstepError(what, why, fix)


def in_words(error: BaseException, what: str, fix: str) -> tuple[str, str, str]:
    """What, why and fix of an error that may come from anywhere."""
    if isinstance(error, HalfstepError):
        return error.what, error.why, error.fix
    if isinstance(error, OSError) and error.strerror:
        return what, error.strerror, fix
    first_line = next(iter(str(error).splitlines()), "")
    return what, f"{type(error).__name__}: {first_line}", fix
