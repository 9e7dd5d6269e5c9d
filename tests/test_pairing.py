"""Pairing of two streams of operations: against brute force, and where the streams differ as formats make them."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from reference.pairing import length_of_longest_common

from halfstep.explain.pairing import Key, Pair, longest_common, pair_up


def keys(text, place="m", call="f"):
    """``mm add`` as keys of one call; ``linear:mm`` names another one."""
    parts = [word.rpartition(":") for word in text.split()]
    return [Key(place, head or call, op, (2, 2)) for head, _, op in parts]


def pairs(a, b, sources_a=None, sources_b=None):
    none = [frozenset()] * max(len(a), len(b))
    return pair_up(a, b, sources_a or none[: len(a)], sources_b or none[: len(b)])


def single(*numbers):
    return [Pair((i,), (j,)) for i, j in numbers]


# --- longest common subsequence --------------------------------------------------------------------------------------


@pytest.mark.parametrize("letters", ["a", "ab", "abcd", "abcdefgh"])
def test_the_longest_common_subsequence_is_as_long_as_brute_force_finds(letters):
    draw = random.Random(len(letters))
    for _ in range(300):
        a, b = ([draw.choice(letters) for _ in range(draw.randint(0, 9))] for _ in range(2))
        places = longest_common(a, b)
        assert all(a[i] == b[j] for i, j in places)
        assert all(x[0] < y[0] and x[1] < y[1] for x, y in pairwise(places))
        assert len(places) == length_of_longest_common(a, b)


def test_long_equal_streams_take_one_sweep_and_long_different_ones_end():
    assert longest_common(range(20_000), range(20_000)) == [(i, i) for i in range(20_000)]
    assert longest_common([0] * 400, [1] * 400) == []


# --- pairs -----------------------------------------------------------------------------------------------------------


def test_equal_streams_pair_one_by_one():
    stream = keys("mm add mm relu")
    assert pairs(stream, stream) == single((0, 0), (1, 1), (2, 2), (3, 3))


def test_modules_and_phases_are_apart():
    a, b = keys("mm", "one") + keys("mm", "two"), keys("mm", "two") + keys("mm", "one")
    assert pairs(a, b) == single((1, 0), (0, 1))
    assert pairs(keys("mm", "one"), keys("mm", "two")) == []


def test_shapes_tell_operations_of_one_name_apart():
    wide = keys("mm")[0]._replace(shapes=(2, 8))
    assert pairs([wide, *keys("mm")], [*keys("mm"), wide]) == single((1, 0), (0, 1))


def test_another_order_pairs_all_the_same():
    a, b = keys("f:mm g:sum h:add"), keys("g:sum h:add f:mm")
    assert pairs(a, b) == single((1, 0), (2, 1), (0, 2))


def test_one_more_operation_leaves_the_others_their_partners():
    assert pairs(keys("f:mm h:relu"), keys("f:mm g:add h:relu")) == single((0, 0), (1, 2))


def test_a_call_that_is_made_of_others_pairs_as_a_whole():
    a, b = keys("x:mul linear:addmm y:relu"), keys("x:mul linear:mm linear:add y:relu")
    assert pairs(a, b) == [Pair((0,), (0,)), Pair((1,), (1, 2)), Pair((2,), (3,))]
    assert pairs(b, a) == [Pair((0,), (0,)), Pair((1, 2), (1,)), Pair((3,), (2,))]


def test_such_a_call_in_a_loop_is_parted_by_how_often_it_ran():
    a, b = keys("linear:addmm " * 3), keys("linear:mm linear:add " * 3)
    assert pairs(a, b) == [Pair((0,), (0, 1)), Pair((1,), (2, 3)), Pair((2,), (4, 5))]


def test_what_two_forms_of_a_call_share_by_chance_does_not_pair_alone():
    a, b = keys("rnn:layer rnn:stack"), keys("rnn:mm rnn:stack rnn:mul rnn:add rnn:tanh")
    assert pairs(a, b) == [Pair((0, 1), (0, 1, 2, 3, 4))]
    a, b = keys("norm:mul norm:mean norm:rsqrt norm:mul"), keys("norm:mul norm:var norm:rsqrt norm:mul")
    assert pairs(a, b) == [Pair((0,), (0,)), Pair((1,), (1,)), Pair((2,), (2,)), Pair((3,), (3,))]


def test_equal_operations_pair_with_those_that_their_inputs_pair_with():
    # Two additions of one key, in another order; what made their inputs tells them apart.
    a, b = keys("p:mm q:sum f:add f:add"), keys("p:mm q:sum f:add f:add")
    sources_a = [frozenset(), frozenset(), frozenset({0}), frozenset({1})]
    sources_b = [frozenset(), frozenset(), frozenset({1}), frozenset({0})]
    assert pairs(a, b, sources_a, sources_b) == single((0, 0), (1, 1), (3, 2), (2, 3))


def test_of_more_operations_than_partners_the_one_with_the_inputs_is_taken():
    a, b = keys("p:mm q:sum f:add f:add"), keys("p:mm q:sum f:add")
    sources_a = [frozenset(), frozenset(), frozenset({0}), frozenset({1})]
    for source, partner in ((0, 2), (1, 3)):
        found = pairs(a, b, sources_a, [frozenset(), frozenset(), frozenset({source})])
        assert found == single((0, 0), (1, 1), (partner, 2))


def test_a_gradient_that_is_added_up_in_another_module_pairs_by_its_inputs():
    a, b = keys("p:mm q:sum", "one") + keys("f:add", "one"), keys("p:mm q:sum", "one") + keys("g:add", "two")
    sources = [frozenset(), frozenset(), frozenset({0, 1})]
    assert pairs(a, b, sources, sources) == single((0, 0), (1, 1), (2, 2))
    assert pairs(a, b, sources, [*sources[:2], frozenset({0})]) == single((0, 0), (1, 1))


def test_no_operation_is_in_two_pairs_whatever_the_streams():
    draw = random.Random(0)
    for _ in range(200):
        a, b = (
            [Key(draw.choice("mn"), draw.choice("fg"), draw.choice("xyz"), ()) for _ in range(draw.randint(0, 12))]
            for _ in range(2)
        )
        sources = [[frozenset(draw.sample(range(i), min(i, 2))) for i in range(len(s))] for s in (a, b)]
        found = pair_up(a, b, *sources)
        for side, stream in ((0, a), (1, b)):
            numbers = [number for pair in found for number in pair[side]]
            assert len(numbers) == len(set(numbers))
            assert set(numbers) <= set(range(len(stream)))
        assert all(a[i].place == b[j].place for pair in found for i in pair.a for j in pair.b)
        assert found == sorted(found, key=lambda pair: pair.b[-1])
