"""The error that halfstep raises for a caller's mistake, and the one that ends a run whose loss scale is exhausted."""

from __future__ import annotations

from collections.abc import Sequence


class HalfstepError(ValueError):
    """A call that cannot work: what was passed, why it cannot work, what to do instead.

    ``str(error)`` is one line, so that the command can print it as it stands and exit with status 2.
    Mistakes of our own are ``assert``; this class is for those of a caller or of a machine.
    """

    def __init__(self, what: str, why: str, fix: str) -> None:
        self.what, self.why, self.fix = what, why, fix
        super().__init__(" ".join(f"{what}: {why}. {fix}".split()))

    def __reduce__(self) -> tuple[type[HalfstepError], tuple[str, str, str]]:
        # BaseException pickles by its args, which hold the joined text alone.
        return type(self), (self.what, self.why, self.fix)


class ScaleExhausted(HalfstepError):
    """A gradient overflowed at the floor of the loss scale: fp16 cannot train this model as the policy stands.

    It names the module and parameters at fault. The weights and states are those of the last applied step.
    """


def and_more(names: Sequence[str]) -> str:
    """The first three names of a message, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
