"""The search for the fewest suspects: against brute force on small rows, and its number of probes on long ones."""

import itertools
import math
import random

import pytest

from halfstep.explain.search import Stopped, minimal_set

SMALL = "abcdef"
TWELVE = "abcdefghijkl"
FIFTY = tuple(f"m{i}" for i in range(1, 51))


def needs(*sets):
    """A test that passes once all of one of ``sets`` are changed: more never break it."""
    wanted = [frozenset(s) for s in sets]
    return lambda names: any(s <= names for s in wanted)


def minimal_sets(suspects, passes):
    """By brute force: every set that passes and of which no one member can be left out."""
    subsets = [frozenset(s) for k in range(len(suspects) + 1) for s in itertools.combinations(suspects, k)]
    return {s for s in subsets if passes(s) and not any(passes(s - {name}) for name in s)}


def bound(n, k):
    """Of the module's docstring."""
    return 2 + 2 * k * math.ceil(math.log2(n)) + k - 1


@pytest.mark.parametrize("size", [0, 1, 2, 3, 6])
def test_finds_the_needed_ones_wherever_they_stand(size):
    for wanted in itertools.combinations(SMALL, size):
        result = minimal_set(SMALL, needs(wanted))
        assert result.found == wanted, "in the order of the suspects"
        assert result.minimal
        assert result.stopped is None


def test_either_of_several_sets_is_found_as_brute_force_finds_it():
    generator = random.Random(0)
    for _ in range(300):
        sets = [generator.sample(SMALL, generator.randint(1, 3)) for _ in range(generator.randint(1, 3))]
        result = minimal_set(SMALL, needs(*sets))
        assert frozenset(result.found) in minimal_sets(SMALL, needs(*sets)), sets


def test_a_fickle_test_ends_with_a_set_that_was_seen_to_pass():
    # Every subset passes or not by the toss of a coin, all suspects together do.
    fickle = 0
    for seed in range(500):
        generator = random.Random(seed)
        coin = {}
        tried = []

        def passes(names, coin=coin, generator=generator, tried=tried):
            tried.append(names)
            return coin.setdefault(names, len(names) == 12 or (bool(names) and generator.random() < 0.4))

        result = minimal_set(TWELVE, passes)
        found = frozenset(result.found)
        assert coin[found]
        assert result.minimal
        assert all(coin.get(found - {name}) is False for name in found), "each was left out once, and it failed"
        assert len(tried) == len(set(tried)) == result.num_probes, "no set is tried twice"
        fickle += any(coin[a] > coin[b] for a in coin for b in coin if a < b)
    assert fickle > 10, "the tosses are of no use unless larger sets fail"


def test_none_needed_and_none_that_helps():
    assert minimal_set(SMALL, lambda names: True).found == ()
    result = minimal_set(SMALL, lambda names: False)
    assert result.found is None
    assert not result.minimal
    assert result.num_probes == 2
    assert minimal_set((), lambda names: False).found is None


def test_one_of_fifty_takes_at_most_14_probes_at_any_place():
    probes = [minimal_set(FIFTY, needs({name})).num_probes for name in FIFTY]
    assert probes[0] == 3
    assert max(probes) == bound(50, 1) == 14


def test_two_of_fifty_take_at_most_27_probes_at_any_places():
    probes = [minimal_set(FIFTY, needs(pair)).num_probes for pair in itertools.combinations(FIFTY, 2)]
    assert max(probes) <= bound(50, 2) == 27
    assert minimal_set(FIFTY, needs(FIFTY[:2])).num_probes <= 6


@pytest.mark.parametrize("n", [2, 3, 4, 7, 8, 9, 33, 64, 65])
def test_probes_stay_within_the_bound(n):
    names = [str(i) for i in range(n)]
    generator = random.Random(n)
    for k in range(1, min(n, 5) + 1):
        for _ in range(30):
            wanted = generator.sample(names, k)
            result = minimal_set(names, needs(wanted))
            assert set(result.found) == set(wanted)
            assert result.num_probes <= bound(n, k)


@pytest.mark.parametrize("signal", [Stopped, KeyboardInterrupt])
@pytest.mark.parametrize("allowed", range(14))
def test_a_stopped_search_keeps_the_best_that_it_saw(signal, allowed):
    seen = []

    def passes(names):
        if len(seen) == allowed:
            raise signal
        seen.append((names, "m34" in names))
        return seen[-1][1]

    # None, all, 1, 2, 4, 8, 16, 32, then 41, 36, 34 and 33 of 50, and the one: 13 probes.
    result = minimal_set(FIFTY, passes)
    working = [names for names, works in seen if works]
    assert isinstance(result.stopped, signal) == (allowed < 13)
    assert result.minimal == (allowed >= 13)
    assert result.num_probes == len(seen)
    assert result.found == (tuple(n for n in FIFTY if n in min(working, key=len)) if working else None)
    assert len(result.found or ()) == {**dict.fromkeys(range(2), 0), 9: 41, 10: 36, 11: 34, 12: 34, 13: 1}.get(
        allowed, 50
    )


def test_other_errors_of_a_test_are_not_swallowed():
    with pytest.raises(ZeroDivisionError):
        minimal_set(SMALL, lambda names: 1 / 0)
