"""The device that is planned for, which need not be here: a card of the catalogue, an amount of memory, or this CPU."""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass

from halfstep.errors import HalfstepError
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
    is a CUDA card of capability 8.0. A card that the catalogue does not hold is a HalfstepError with the nearest names.
    """
    if memory_gib is not None and not 0 < memory_gib < math.inf:
        raise HalfstepError(f"memory of {memory_gib:g} GiB", "a card has more than 0", "Use --memory 8, for instance.")
    if card is None:
        name = "a CUDA card" if memory_gib is None else f"a CUDA card with {memory_gib:g} GiB"
        hardware = Hardware.of("cuda", name, capability=DEFAULT_CAPABILITY, memory_gib=memory_gib)
        return Target(hardware, memory_gib, False)
    if card == "cpu":
        hardware = detect("cpu")
        return Target(hardware, hardware.memory_gib if memory_gib is None else memory_gib, True)
    found = find_card(card)
    if found is None:
        names = [each.name for each in CARDS]
        by_folded = {name.casefold(): name for name in names}
        folded = [by_folded[name] for name in difflib.get_close_matches(card.casefold(), by_folded, 4, 0.3)]
        raise HalfstepError(
            f"card {card!r}",
            "the catalogue does not hold it",
            f"Nearest names: {', '.join(folded or names[:4])}. For another card give --memory GIB.",
        )
    return Target(_hardware_of(found), found.memory_gib if memory_gib is None else memory_gib, True)


def _hardware_of(card: Card) -> Hardware:
    """A card's formats are those that the catalogue has a rate for; NVIDIA's follow from the capability as well."""
    native = frozenset({"fp32", *card.rates_tflops})
    why = {format: f"{card.source} states {'a' if format in native else 'no'} rate for it" for format in native}
    known = Hardware.of("cuda", card.name, capability=card.capability, memory_gib=card.memory_gib)
    return Hardware(
        "cuda", card.name, card.capability, card.memory_gib, card, native, frozenset(), {**known.why, **why}
    )
