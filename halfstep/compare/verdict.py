"""Is a policy as good as the reference? A word, an interval and a reason, from the final losses of paired seeds.

Lower is better, and the gap is the mean of candidate minus reference over seeds. Everything rests on one interval, the
90 % Student t interval of the paired differences, laid against 0 and a margin:

    upper < margin, lower > -margin    equivalent          two one-sided tests at 5 % (Schuirmann 1987)
    upper < margin                     not worse           one-sided non-inferiority at 5 %
    lower > margin                     materially worse
    lower > 0                          worse               one-sided at 5 %; how much worse is open
    otherwise                          inconclusive

A loss that is not finite is a trial that diverged: it is counted apart and never averaged away. docs/verdict.md holds
the arithmetic and what a simulation says of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import StatisticsError, correlation, fmean, stdev
from typing import Any

from halfstep.errors import HalfstepError

MIN_PAIRS = 3
"""Below this many paired seeds there is no verdict."""

MAX_SEEDS = 1000
"""A plan for more seeds than this is no plan; ``seeds_to_settle`` gives None."""

_ALPHA = 0.05
_FOUND = frozenset({"worse", "materially worse", "diverged"})


@dataclass(frozen=True)
class Verdict:
    """What the paired seeds say.

    gap, ci_low, ci_high: mean difference candidate minus reference and its 90 % interval, over the pairs that are
        finite on both sides; None where there are too few.
    margin: the difference that matters. seeds_needed: paired seeds that would settle an open question, else None.
    num_pairs: pairs finite on both sides. num_diverged: candidate trials that diverged, whatever the reference did.
    rho: correlation of the pairs, None where it is undefined; the higher, the more the pairing helps.
    """

    word: str
    gap: float | None
    ci_low: float | None
    ci_high: float | None
    margin: float | None
    seeds_needed: int | None
    reason: str
    num_pairs: int = field(default=0, kw_only=True)
    num_diverged: int = field(default=0, kw_only=True)
    rho: float | None = field(default=None, kw_only=True)

    @property
    def found(self) -> bool:
        """Whether the candidate is worse, materially worse or diverged."""
        return self.word in _FOUND

    def to_dict(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if key not in ("num_pairs", "num_diverged", "rho")}


def judge(
    reference: Sequence[float],
    candidate: Sequence[float],
    margin: float | None = None,
    *,
    margin_from: str = "as given",
    reference_name: str = "reference",
    candidate_name: str = "candidate",
) -> Verdict:
    """The verdict on ``candidate`` against ``reference``: final losses, seed by seed, NaN or inf where one diverged.

    ``margin`` is in units of the loss, and ``margin_from`` says in the reason where it comes from. Without a margin it
    is the lower 95 % bound of the reference's own standard deviation over seeds (``sd_lower_bound``).
    """
    if len(reference) != len(candidate):
        raise HalfstepError(
            f"{len(reference)} losses of {reference_name} and {len(candidate)} of {candidate_name}",
            "the verdict pairs them seed by seed",
            "Give one loss of each for every seed, NaN where it diverged.",
        )
    if margin is not None and not 0 < margin < math.inf:
        raise HalfstepError(
            f"margin {margin:g}", "no two runs differ by less than that", "Give a finite margin above 0, or none."
        )
    pairs = [(r, c) for r, c in zip(reference, candidate, strict=True) if math.isfinite(r) and math.isfinite(c)]
    differences = [c - r for r, c in pairs]
    if margin is None:
        margin, margin_from = _own_margin(reference, reference_name)
    gap = fmean(differences) if differences else None
    low, high = paired_interval(differences) if len(differences) >= MIN_PAIRS else (None, None)
    word, seeds_needed = "no verdict", None
    lost = [c for r, c in zip(reference, candidate, strict=True) if math.isfinite(r) and not math.isfinite(c)]
    if lost:
        word = "diverged"
    elif low is None or high is None or margin is None:
        seeds_needed = MIN_PAIRS
    elif not any(differences):
        word = "equivalent"
    else:
        assert gap is not None
        word = classify(low, high, margin)
        if word == "inconclusive":
            seeds_needed = seeds_to_settle(gap, stdev(differences), margin)
            seeds_needed = None if seeds_needed is None else max(seeds_needed, len(pairs) + 1)
    said = [
        _say_interval(word, gap, low, high, margin, margin_from, seeds_needed, len(pairs)),
        _say_divergence(reference, candidate, reference_name, candidate_name),
    ]
    reason = " ".join(part for part in (reversed(said) if word == "diverged" else said) if part)
    return Verdict(
        word,
        gap,
        low,
        high,
        margin,
        seeds_needed,
        reason,
        num_pairs=len(pairs),
        num_diverged=sum(not math.isfinite(c) for c in candidate),
        rho=_correlation(pairs),
    )


def classify(low: float, high: float, margin: float) -> str:
    """The word for an interval of the gap: the table at the top of this module."""
    if high < margin:
        return "equivalent" if low > -margin else "not worse"
    if low > margin:
        return "materially worse"
    return "worse" if low > 0 else "inconclusive"


def paired_interval(differences: Sequence[float]) -> tuple[float, float]:
    """The 90 % Student t interval of the mean: ``mean -+ t(0.95, n-1) sd / sqrt(n)``."""
    n = len(differences)
    half = float(_special().stdtrit(n - 1, 1 - _ALPHA)) * stdev(differences) / math.sqrt(n)
    return fmean(differences) - half, fmean(differences) + half


def sd_lower_bound(values: Sequence[float]) -> float:
    """The lower 95 % confidence bound of a normal standard deviation: ``sd sqrt((k-1) / chi2(0.95, k-1))``.

    A margin that is learned from k seeds is itself uncertain. The lower bound exceeds the true sigma in one case in
    twenty, so a policy that is one sigma worse is rarely called equivalent; an upper bound (4.4 sd at three seeds)
    would let it pass most of the time. The factor is 0.58 at 3 seeds, 0.65 at 5, 0.73 at 10, and tends to 1.
    """
    k = len(values)
    return stdev(values) * math.sqrt((k - 1) / float(_special().chdtri(k - 1, _ALPHA)))


def seeds_to_settle(gap: float, sd: float, margin: float, power: float = 0.8) -> int | None:
    """The fewest pairs with which a true ``gap`` and spread ``sd`` of the differences would leave "inconclusive".

    The interval settles the question on one of two sides, and each has an exact chance under the noncentral t
    distribution with n - 1 degrees of freedom and noncentrality delta; the likelier one must reach ``power``:

        upper < margin    P(T > t(0.95, n-1)),  delta = (margin - gap) sqrt(n) / sd
        lower > 0         P(T > t(0.95, n-1)),  delta = gap sqrt(n) / sd

    None if more than ``MAX_SEEDS`` pairs would be needed.
    """
    if sd == 0:
        return MIN_PAIRS
    distance = max(margin - gap, gap) / sd
    special = _special()

    def settles(n: int) -> bool:
        delta = distance * math.sqrt(n)
        # Beyond 30 the chance is 1 to every digit at any n >= 3 that matters, and the series is slow.
        return delta > 30 or 1 - float(special.nctdtr(n - 1, delta, special.stdtrit(n - 1, 1 - _ALPHA))) >= power

    if distance <= 0 or not settles(MAX_SEEDS):
        return None
    few, enough = MIN_PAIRS - 1, MAX_SEEDS
    while enough - few > 1:
        middle = (few + enough) // 2
        few, enough = (few, middle) if settles(middle) else (middle, enough)
    return enough


def failure_rate_bounds(num_failed: int, num_trials: int) -> tuple[float, float]:
    """Exact one-sided 95 % bounds, lower and upper, of a failure rate (Clopper and Pearson 1934).

    No failure in n trials bounds the rate at ``1 - 0.05^(1/n)``: 45 % for n = 5, 26 % for n = 10.
    """
    special, k, n = _special(), num_failed, num_trials
    low = 0.0 if k == 0 else float(special.betaincinv(k, n - k + 1, _ALPHA))
    high = 1.0 if k == n else float(special.betaincinv(k + 1, n - k, 1 - _ALPHA))
    return low, high


def _own_margin(reference: Sequence[float], name: str) -> tuple[float | None, str]:
    """The margin that the reference's own seeds give, and the words for it."""
    finite = [loss for loss in reference if math.isfinite(loss)]
    if len(finite) < 2:
        return None, ""
    origin = f"the lower 95 % bound of {name}'s own sd, {stdev(finite):.4g} over {len(finite)} seeds"
    return sd_lower_bound(finite), origin


def _say_divergence(reference: Sequence[float], candidate: Sequence[float], reference_name: str, name: str) -> str:
    """What the trials that are not finite say, or what it is worth that there are none."""
    n = len(candidate)
    num_reference = sum(not math.isfinite(r) for r in reference)
    num_candidate = sum(not math.isfinite(c) for c in candidate)
    alone = sum(math.isfinite(r) and not math.isfinite(c) for r, c in zip(reference, candidate, strict=True))
    reference_alone = num_reference - (num_candidate - alone)
    parts = []
    if num_candidate:
        low, _ = failure_rate_bounds(num_candidate, n)
        parts.append(
            f"{num_candidate} of {n} {name} trials diverged, {alone} of them where {reference_name} did not: "
            f"its failure rate is {100 * low:.0f} % or more."
        )
    elif n >= MIN_PAIRS and not num_reference:
        _, high = failure_rate_bounds(0, n)
        parts.append(f"None of {n} trials diverged, which leaves room for a failure rate of up to {100 * high:.0f} %.")
    if num_reference:
        parts.append(f"{reference_name} fails as well, in {num_reference} of {n} trials: look at the workload first.")
        if alone:
            # Exact McNemar test: when the rates are equal, a seed that fails once is as likely to fail on either side.
            total = alone + reference_alone
            p = sum(math.comb(total, i) for i in range(alone, total + 1)) / 2**total
            parts.append(
                f"Seeds on which only {name} failed: {alone}, only {reference_name}: {reference_alone} "
                f"(one-sided McNemar p = {p:.2g})."
            )
    return " ".join(parts)


def _say_interval(
    word: str,
    gap: float | None,
    low: float | None,
    high: float | None,
    margin: float | None,
    margin_from: str,
    seeds_needed: int | None,
    num_pairs: int,
) -> str:
    """What the pairs that are finite on both sides say."""
    if gap is None:
        return "No seed has a finite loss on both sides." if word != "diverged" else ""
    if low is None or high is None or margin is None:
        pairs = "1 paired seed gives" if num_pairs == 1 else f"{num_pairs} paired seeds give"
        return f"{pairs} a gap of {gap:+.4g}; {MIN_PAIRS} are needed to tell a gap from the luck of a seed."
    if low == high == 0:
        return f"All {num_pairs} differences are exactly 0."
    interval = f"the gap's 90 % interval [{low:+.4g}, {high:+.4g}]"
    width = f"the margin {margin:.4g} ({margin_from})"
    if margin == 0:
        width = "a margin of 0 (every seed of the reference ended at the same loss: give a margin)"
    sentence = {
        "equivalent": f"{interval} lies within {width} on both sides" + (", although above 0" if low > 0 else ""),
        "not worse": f"{interval} ends below {width}" + (" and below 0: it is better" if high < 0 else ""),
        "worse": f"{interval} lies above 0; whether it exceeds {width} is open",
        "materially worse": f"{interval} lies above {width}",
        "inconclusive": f"{interval} holds both 0 and {width}",
        "diverged": f"over the {num_pairs} pairs that survive, {interval} stands against {width}",
    }[word]
    tail = ""
    if word == "inconclusive":
        count = f"{seeds_needed} paired seeds" if seeds_needed else f"more than {MAX_SEEDS} paired seeds, or none,"
        tail = f" If the true gap and spread are as seen here, {count} would settle it, four times in five."
    elif num_pairs < 5 and word != "diverged":
        tail = f" {num_pairs} seeds are a screening, no proof."
    return f"{sentence[0].upper()}{sentence[1:]}.{tail}"


def _correlation(pairs: Sequence[tuple[float, float]]) -> float | None:
    try:
        return correlation(*zip(*pairs, strict=True)) if len(pairs) >= MIN_PAIRS else None
    except StatisticsError:  # one side does not vary
        return None


def _special() -> Any:
    try:
        from scipy import special
    except ImportError:
        raise HalfstepError(
            "the verdict", "scipy is not installed", "Install it with: pip install 'halfstep[torch]'."
        ) from None
    return special
