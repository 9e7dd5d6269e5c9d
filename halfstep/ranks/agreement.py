"""What ranks find out together while a Stepper is built: that none of them failed, and what ``auto`` means for all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NoReturn

from halfstep.errors import HalfstepError
from halfstep.hardware import Hardware
from halfstep.policy import Policy, auto_policy, resolve
from halfstep.ranks.difference import name_ranks
from halfstep.ranks.digests import differing, digest_of
from halfstep.ranks.one import Ranks

_BEST_FIRST = ("bf16", "fp16", "fp32")


@contextmanager
def together(ranks: Ranks) -> Iterator[None]:
    """What raises on one rank in here raises on all, so that none waits for one that has gone. One small collective.

    Nothing in here may be a collective itself. An error that some ranks alone have names them, and has the same text on
    all; one that is no HalfstepError stays what it is where it was raised.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        if ranks.num == 1:
            raise
        failure = error
    if ranks.num > 1 and (differing(ranks, [int(failure is not None)])[0] or failure is not None):
        _raise_on_all(ranks, failure)


def _raise_on_all(ranks: Ranks, failure: Exception | None) -> NoReturn:
    """Of the failures of several ranks the first one is told, with all ranks that have it."""
    is_known = failure is None or isinstance(failure, HalfstepError)
    failures = ranks.gather(failure if is_known else _unknown(failure))
    first = next(each for each in failures if each is not None)
    having = [ranks.numbers[rank] for rank, each in enumerate(failures) if str(each) == str(first)]
    if failure is not None and (len(having) == ranks.num or not is_known):
        raise failure
    raise type(first)(f"{name_ranks(having)}: {first.what}", first.why, first.fix) from failure


def _unknown(failure: Exception | None) -> HalfstepError:
    what = f"{type(failure).__name__} while a Stepper was built"
    return HalfstepError(
        what, str(failure) or "without a message", "Its traceback is among what that rank has printed."
    )


def agree(ranks: Ranks, policy: Policy, hardware: Hardware) -> tuple[Policy, str] | None:
    """What ``auto`` becomes on all ranks and why, as :func:`auto_policy` says it; None where each finds the same alone.

    It is the best format that all cards have. A policy that the card of one rank cannot do is refused on all of them,
    with the rank named.
    """
    formats = f"{hardware.kind} {sorted(hardware.native)} {sorted(hardware.emulated)}"
    if ranks.num == 1 or not differing(ranks, [digest_of({"policy": str(policy), "formats": formats})])[0]:
        return None
    told: list[tuple[Policy, Hardware]] = ranks.gather((policy, hardware))
    devices = [each for _, each in told]
    able = frozenset[str].intersection(*(each.native | each.emulated | {"fp32"} for each in devices))
    for rank, (asked, device) in enumerate(told):
        try:
            resolve(asked, device)
        except HalfstepError as error:
            raise HalfstepError(
                f"{error.what} on {name_ranks([ranks.numbers[rank]])}",
                error.why,
                f"Use {', '.join(format for format in (*_BEST_FIRST[:2], 'tf32', 'fp32') if format in able)}, which "
                "every rank can do, or auto.",
            ) from None
    return _agreed(devices, ranks.numbers)


def _agreed(devices: Sequence[Hardware], numbers: Sequence[int]) -> tuple[Policy, str] | None:
    """The policy for several devices; None where each has the same one, and reasons of its own.

    numbers: by which the reason names their ranks.
    """
    if len({auto_policy(device)[0] for device in devices}) == 1:
        return None
    native = frozenset[str].intersection(*(device.native for device in devices))
    choices = {auto_policy(replace(device, native=native))[0].compute for device in devices}
    compute = max(choices, key=_BEST_FIRST.index)
    lacking: dict[tuple[int, ...], list[str]] = {}
    for format in _BEST_FIRST[: _BEST_FIRST.index(compute)]:
        ranks = tuple(rank for rank, device in enumerate(devices) if format not in device.native)
        if len(ranks) < len(devices):
            lacking.setdefault(ranks, []).append(format)
    reasons = []
    for ranks, formats in lacking.items():
        names = " and ".join(dict.fromkeys(devices[rank].name for rank in ranks))
        verb = "has" if len(ranks) == 1 else "have"
        reasons.append(f"{name_ranks(numbers[rank] for rank in ranks)} ({names}) {verb} no {' and no '.join(formats)}")
    return Policy(compute), f"{', '.join(reasons)}: {compute} on all ranks"
