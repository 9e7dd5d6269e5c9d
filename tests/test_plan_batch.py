"""The peak of every batch, the largest that fits, and the one from which on a policy saves memory."""

import itertools
from dataclasses import replace

import pytest
from reference.planted_steps import block, drawn_step, fake, plain_peak, step

from halfstep.plan.batch import LIMIT, PeakLine, largest_batch, saves_from

BATCHES = (*range(1, 30), 100, 1000)


def grows(fixed, per_sample, batch_size=2):
    """A step with one storage."""
    one = block(fixed + batch_size * per_sample, "activations", 1, None, "mm", "m")
    return step(one, batch_size=batch_size, growth=[float(per_sample)])


@pytest.mark.parametrize("seed", range(8))
def test_the_line_is_the_peak_of_every_batch(seed):
    trace = drawn_step(seed)
    line = PeakLine.of(trace)
    assert [line.at(n) for n in BATCHES] == [plain_peak(trace.with_batch(n)) for n in BATCHES]
    assert line.starts[0] == 0
    assert list(line.starts) == sorted(set(line.starts))
    growths = [growth for _, growth in line.pieces]
    assert growths == sorted(set(growths))


def test_a_piece_may_be_the_largest_for_one_batch_alone():
    blocks = [
        block(nbytes, "activations", born, born + 1, "mm", "m") for nbytes, born in ((100, 1), (124, 3), (277, 5))
    ]
    line = PeakLine.of(step(*blocks, batch_size=5, growth=[0.0, 10.0, 100.0]))
    # 100, 74 + 10 n from 2.6 on, and 100 n - 223 from 3.3 on.
    assert [line.at(n) for n in (2, 3, 4)] == [100, 104, 177]


def test_a_growth_of_thirds_is_not_rounded():
    growth = [1 / 3, 1 / 3]
    blocks = [block(10, "activations", 1, 4, "mm", "m"), block(21, "activations", 2, 4, "mm", "m")]
    line = PeakLine.of(step(*blocks, batch_size=3, growth=growth))
    assert line.at(3) == 31
    assert line.at(6) == 33
    # What is freed leaves nothing behind, not even a rounding, so that two such steps are equal.
    assert saves_from(step(*blocks, batch_size=3, growth=growth), step(*blocks, batch_size=3, growth=growth)) is None


@pytest.mark.parametrize(
    ("theirs", "ours", "batch"),
    [
        ((0, 10), (0, 10), None),
        ((0, 10), (0, 9), 1),
        ((0, 9), (0, 10), None),
        ((5, 10), (4, 10), 1),
        ((0, 10), (30, 5), 7),  # equal at 6
        ((0, 10), (31, 5), 7),  # equal at 6.2
        ((30, 5), (0, 10), None),  # saves up to 5 samples, and then no more
    ],
)
def test_where_a_policy_saves(theirs, ours, batch):
    assert saves_from(grows(*theirs), grows(*ours)) == batch


def test_where_a_policy_saves_when_the_other_bends_between_two_batches():
    early = block(50, "activations", 1, 2, "mm", "m")
    late = block(275, "activations", 3, 4, "mm", "m")
    reference = step(early, late, batch_size=5, growth=[10.0, 100.0])  # 10 n, and 100 n - 225 from 2.5 on
    assert [PeakLine.of(reference).at(n) for n in (1, 2, 3)] == [10, 20, 75]
    assert saves_from(reference, grows(20, 10)) == 3


@pytest.mark.parametrize("seed", range(60))
def test_where_a_policy_saves_by_trying_every_batch(seed):
    reference, trace = drawn_step(seed, 12), drawn_step(1000 + seed, 12)
    found = saves_from(reference, trace)
    # Peaks of these steps meet far below this: they grow by whole bytes and hold some hundreds of them.
    ours, theirs = PeakLine.of(trace), PeakLine.of(reference)
    is_below = [ours.at(n) < theirs.at(n) for n in range(1, 1500)]
    if found is None:
        assert not is_below[-1]
    else:
        assert all(is_below[found - 1 :])
        assert found == 1 or not is_below[found - 2]


def test_steps_that_cross_twice_are_among_those_tried():
    crossings = []
    for seed in range(60):
        ours, theirs = PeakLine.of(drawn_step(1000 + seed, 12)), PeakLine.of(drawn_step(seed, 12))
        signs = [ours.at(n) < theirs.at(n) for n in range(1, 200)]
        crossings.append(sum(a != b for a, b in itertools.pairwise(signs)))
    assert {0, 1, 2} <= set(crossings)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("capacity", [0, 300, 1000, 5000])
def test_the_largest_batch_by_trying_every_batch(seed, capacity):
    trace = drawn_step(seed)
    line = PeakLine.of(trace)

    def need(nbytes):
        return 100 + 64 * -(-nbytes // 64)  # in steps, as an allocator does

    fits = [n for n in range(1, 1500) if need(line.at(n)) <= capacity]
    assert len(fits) < 1400
    assert largest_batch(trace, lambda t: need(t.peak.nbytes), capacity) == max(fits, default=0)


def test_few_batches_are_tried():
    asked = []

    def need(t):
        asked.append(t.batch_size)
        return t.peak.nbytes

    assert largest_batch(grows(1000, 7), need, 1_000_000) == 142714
    # 1, 2, then leaps of 16 at most, and two around the answer.
    assert len(asked) <= 9
    assert max(asked) <= LIMIT


def test_the_search_is_bounded():
    assert largest_batch(grows(1000, 0), lambda t: t.peak.nbytes, 1000) == LIMIT
    assert largest_batch(grows(1000, 1), lambda t: t.peak.nbytes, 10**18) == LIMIT
    assert largest_batch(grows(1000, 1), lambda t: t.peak.nbytes, 1000) == 0


def test_without_growth_nothing_is_known():
    known = grows(0, 1)
    unknown = replace(known, growth=None)
    assert largest_batch(unknown, lambda t: t.peak.nbytes, 10**9) is None
    assert saves_from(known, unknown) is None
    assert saves_from(unknown, known) is None


@pytest.mark.slow
def test_a_true_step_of_another_batch_has_the_peak_that_its_line_has():
    line = PeakLine.of(fake("charlm", finds_growth=True))
    for batch_size in (5, 40):
        assert line.at(batch_size) == fake("charlm", batch_size=batch_size).peak.nbytes
