"""The precision contract: what ranks have to agree on, when they compare it, and what is said when they do not.

Each fact is a 64-bit number on each rank, and one small collective finds out which of them are not the same everywhere.
Only then words travel, so that every rank stops with the same error, which names the ranks and the difference.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from halfstep.errors import HalfstepError
from halfstep.gradients import Gradients
from halfstep.ranks.difference import cards_of, first_difference, say
from halfstep.ranks.digests import differing
from halfstep.ranks.facts import Fact
from halfstep.ranks.one import Ranks

ALLOWED = ("device", "torch")
"""Differences that a user may allow: ranks then still compute the same formats."""


@dataclass(frozen=True)
class Contract:
    """When ranks compare what they hold, and what they may differ in.

    every: windows from one comparison to the next. The first ones are when the Stepper is built and in its first step.
    allow: ``device`` for cards of several kinds, ``torch`` for several versions of it; nothing else can be allowed.
    """

    every: int = 100
    allow: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not hasattr(self.every, "__index__") or self.every < 1:
            raise HalfstepError(f"every={self.every}", "ranks compare every so many windows", "Use 1, 2, 3, ...")
        if not isinstance(self.allow, tuple) or not set(self.allow) <= set(ALLOWED):
            raise HalfstepError(
                f"allow={self.allow!r}",
                "a difference in anything else would train the ranks apart",
                "Use ('device',), ('torch',) or both.",
            )


DEFAULT = Contract()

TOPICS: Mapping[str, tuple[str, str]] = {
    "format": (
        "gradients of different precision would be averaged",
        "Give every rank the same policy; auto picks the best format that all of them have.",
    ),
    "policy": ("ranks would round and scale differently", "Give every rank the same policy."),
    "settings": (
        "a rank would wait for collectives that another leaves out, or move its weights differently",
        "Build the Stepper alike on every rank.",
    ),
    "torch": (
        "its versions round differently, and their collectives need not fit",
        "Install the same one, or allow it: contract=halfstep.Contract(allow=('torch',)).",
    ),
    "device": (
        "different cards round differently, and every step waits for the slowest",
        "Use policy='auto', or allow it: contract=halfstep.Contract(allow=('device',)).",
    ),
    "engine": ("ranks would send each other numbers of different formats", "Wrap the model alike on every rank."),
    "parameters": ("ranks would train different models", "Build the model alike on every rank."),
    "optimizer": ("the same gradient would move their weights apart", "Build the optimizer alike on every rank."),
    "states": (
        "the same gradient would move their weights apart",
        "Load the optimizer's state alike on every rank; load_state_dict() of torch casts it to the weights' format.",
    ),
    "rounding": (
        "the same weight would be rounded differently",
        "Load the same state on every rank; for an optimizer that draws from torch's generator seed all ranks alike, "
        "or use master=stochastic, which has a generator of its own.",
    ),
    "counters": ("they do not continue from the same step", "Load the same state on every rank."),
    "scale": ("gradients scaled by different factors would be averaged", "Load the same state on every rank."),
    "gradients": (
        "they are averaged in the format of one of them",
        "Look for a hook or a cast that acts on some ranks alone.",
    ),
    "weights": (
        "replicas have parted, and each would go on with a model of its own",
        "Look for what moves weights on one rank alone (a hook, in-place code, a checkpoint), or for faulty memory; "
        "resume all ranks from a checkpoint.",
    ),
}
"""Topic to why ranks have to agree on it, and what to do; in the order in which one difference explains others."""

_BY_CARD = ("format", "policy", "device")
"""Topics in which a card of another kind is the likely cause."""


class Comparison:
    """Compares facts of ranks when it is time to. A difference is a HalfstepError with one text on all ranks.

    card:    name of this rank's device.
    is_auto: the policy was left to what all cards have, so that they may be of several kinds.
    """

    def __init__(self, ranks: Ranks, contract: Contract, card: str, is_auto: bool) -> None:
        self._ranks, self.contract, self._card = ranks, contract, card
        # Whoever allows a difference that others do not allow differs in "settings" or "policy", and that is found.
        self._allowed = {*contract.allow, *({"device"} if is_auto else ())}
        self._num_windows = 0
        self.is_due = ranks.num > 1
        self.gradients: dict[int, torch.dtype] = {}

    def end_window(self, gradients: Gradients) -> None:
        """Count a window, and keep the formats of its gradients, by the parameters' ids, if ranks compare next."""
        self._num_windows += 1
        if self._ranks.num > 1 and self._num_windows % self.contract.every == 0:
            self.is_due = True
            self.gradients = {id(parameter): gradient.dtype for parameter, gradient in gradients.items()}

    def check(self, facts: Sequence[Fact]) -> None:
        """Compare ``facts``, in one collective and one read. Every rank calls it, at a place where all come to."""
        if self._ranks.num == 1:
            return
        order = list(TOPICS)
        differs = differing(self._ranks, [fact.digest() for fact in facts])
        found = [fact for fact, is_so in zip(facts, differs, strict=True) if is_so and fact.topic not in self._allowed]
        if found:
            raise self._error(min(found, key=lambda fact: order.index(fact.topic)))

    def _error(self, fact: Fact) -> HalfstepError:
        """On a fact that is not the same everywhere. Those that are right are the most; of two halves, the first."""
        ranks, digest = self._ranks, fact.digest()
        digests = ranks.gather(int(digest) if digest is not None else None)
        counts = Counter(each for each in digests if each is not None)
        right = max(counts, key=counts.__getitem__)  # the first of those that are as many
        source = digests.index(right)
        theirs = ranks.hand_out(fact.in_words() if ranks.rank == source else None, source)
        own = None if digests[ranks.rank] in (None, right) else first_difference(fact.in_words(), theirs)
        told = ranks.gather((own, self._card))
        odd = {rank: difference for rank, (difference, _) in enumerate(told) if difference is not None}
        others = [ranks.numbers[rank] for rank, each in enumerate(digests) if each == right]
        why, fix = TOPICS[fact.topic]
        cards = [told[rank][1] for rank in odd]
        if fact.topic in _BY_CARD and told[source][1] not in cards:
            why = f"{cards_of(cards)}, and {why}"
        return HalfstepError(say({ranks.numbers[rank]: each for rank, each in odd.items()}, others), why, fix)
