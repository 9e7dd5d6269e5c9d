"""How a difference between ranks is said: "rank 3 computes in fp16, ranks 0-2 in bf16"."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

_NOT_THERE = "not at all"


class Difference(NamedTuple):
    """What is said of a rank ("computes"), what it is there ("in fp16"), and what it is elsewhere ("in bf16").

    num_more: things of the same kind that are not the same either.
    """

    what: str
    here: str
    elsewhere: str
    num_more: int = 0


def first_difference(here: Mapping[str, str], elsewhere: Mapping[str, str]) -> Difference:
    """The first of two ranks' words that are not the same."""
    differs = [what for what in {**elsewhere, **here} if here.get(what) != elsewhere.get(what)]
    what = differs[0]
    return Difference(what, here.get(what, _NOT_THERE), elsewhere.get(what, _NOT_THERE), len(differs) - 1)


def say(differences: Mapping[int, Difference], others: Iterable[int]) -> str:
    """In one sentence for each thing that is not the same, three at most.

    differences: of each rank that is not like the ``others``, by the numbers that name them.
    """
    rows: dict[str, dict[str, list[int]]] = {}
    for rank, difference in differences.items():
        rows.setdefault(difference.what, {}).setdefault(difference.here, []).append(rank)
    sentences = []
    for what, held in rows.items():
        (first, ranks), *more = held.items()
        one = next(difference for difference in differences.values() if difference.what == what)
        parts = [f"{name_ranks(ranks)} {_plural(what) if len(ranks) > 1 else what} {first}"]
        parts += [f"{name_ranks(ranks)} {here}" for here, ranks in more]
        also = f" (and {one.num_more} more like it)" if one.num_more else ""
        sentences.append(", ".join([*parts, f"{name_ranks(others)} {one.elsewhere}"]) + also)
    left_out = f"; {len(sentences) - 3} more" if len(sentences) > 3 else ""
    return "; ".join(sentences[:3]) + left_out


def name_ranks(numbers: Iterable[int]) -> str:
    """``rank 3``, ``ranks 0-2``, ``ranks 0-2, 5``."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"rank{'s' * (len(runs) > 1 or len(runs[0]) > 1)} {', '.join(texts)}"


def with_article(name: str) -> str:
    """``a Tesla V100``, ``an NVIDIA A100``."""
    return f"{'an' if name[:1].upper() in tuple('AEIO') or name.startswith('NV') else 'a'} {name}"


def cards_of(names: Sequence[str]) -> str:
    """Of ranks that were named before."""
    cards = " and ".join(with_article(name) for name in dict.fromkeys(names))
    return f"{'its card is' if len(names) == 1 else 'their cards are'} {cards}"


def _plural(what: str) -> str:
    """What is said of one rank, said of several."""
    verb, blank, rest = what.partition(" ")
    return {"has": "have", "is": "are"}.get(verb, verb.removesuffix("s")) + blank + rest
