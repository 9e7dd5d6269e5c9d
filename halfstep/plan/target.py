"""The device that is planned for, which need not be here: a card of the catalogue, an amount of memory, or this CPU."""

from __future__ import annotations

import difflib
import math
import re
from dataclasses import dataclass

from halfstep.errors import HalfstepError
from halfstep.formats import FORMATS
from halfstep.hardware import CARDS, Card, Hardware, detect, find_card

DEFAULT_CAPABILITY = (8, 0)
"""Compute capability of a CUDA card that nobody has named: the first one with bf16, so that every policy runs."""


@dataclass(frozen=True)
class Target:
    """What a plan is made for.

    hardware:   what the device computes, as a Region asks for it. Its ``kind`` is ``cuda`` or ``cpu``.
    memory_gib: memory of the device in GiB, None where nobody said.
    is_named:   whether ``hardware`` is a card that was named; if not, its capability is an assumption.
    """

    hardware: Hardware
    memory_gib: float | None
    is_named: bool

    @property
    def is_cuda(self) -> bool:
        return self.hardware.kind == "cuda"

    @property
    def name(self) -> str:
        return self.hardware.name

    @property
    def card(self) -> Card | None:
        return self.hardware.card

    @property
    def capability(self) -> tuple[int, int] | None:
        return self.hardware.capability


def target_of(card: str | None = None, memory_gib: float | None = None) -> Target:
    """The target called ``card``, with ``memory_gib`` of memory in place of the card's own if it is given.

    card: a name of the catalogue, as for ``halfstep.hardware.find_card``, or ``cpu`` for this machine's processor. None
    is a CUDA card of capability 8.0. A card that the catalogue does not hold is a HalfstepError with the nearest names,
    one that it holds in several variants one with their names.
    """
    if memory_gib is not None:
        _check_memory(memory_gib)
    if card is None:
        name = "a CUDA card" if memory_gib is None else f"a CUDA card with {memory_gib:g} GiB"
        hardware = Hardware.of("cuda", name, capability=DEFAULT_CAPABILITY, memory_gib=memory_gib)
        return Target(hardware, memory_gib, False)
    if card.casefold() == "cpu":
        hardware = detect("cpu")
        return Target(hardware, hardware.memory_gib if memory_gib is None else memory_gib, True)
    found = find_card(card)
    if found is None:
        raise _unknown(card)
    return Target(_hardware_of(found), found.memory_gib if memory_gib is None else memory_gib, True)


def _check_memory(memory_gib: object) -> None:
    is_number = isinstance(memory_gib, int | float) and not isinstance(memory_gib, bool)
    if not is_number or not 0 < memory_gib < math.inf:  # type: ignore[operator]
        shown = f"{memory_gib:g}" if is_number else repr(memory_gib)
        raise HalfstepError(f"memory of {shown} GiB", "a card has a finite amount above 0", "Give 8, for instance.")


def _unknown(card: str) -> HalfstepError:
    names = [each.name for each in CARDS]
    by_folded = {name.casefold(): name for name in names}
    desktop = re.sub(r"\b(nvidia|geforce|laptop|mobile|max-q|gpu)\b", "", card.casefold()).strip()
    folded = [by_folded[name] for name in difflib.get_close_matches(desktop, by_folded, 4, 0.3)]
    is_other = re.search(r"laptop|mobile|max-q|\bmig\b|grid", card, re.IGNORECASE) is not None
    why = ", and a laptop's or a virtual card differs from its namesake" if is_other else ""
    return HalfstepError(
        f"card {card!r}",
        f"the catalogue does not hold it{why}",
        f"Nearest names: {', '.join(folded or names[:4])}. For another card give its memory alone.",
    )


def _hardware_of(card: Card) -> Hardware:
    """A card's formats follow from its capability, or without one are those that the catalogue has a rate for."""
    if card.capability is not None:
        return Hardware.of("cuda", card.name, capability=card.capability, memory_gib=card.memory_gib)
    native = frozenset({"fp32", *card.rates_tflops})
    why = {name: f"{card.source} states {'a' if name in native else 'no'} rate for it" for name in FORMATS}
    return Hardware("cuda", card.name, None, card.memory_gib, card, native, frozenset(), why)
