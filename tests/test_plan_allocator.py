"""The caching allocator that a plan simulates: closed forms, a plain twin, and what holds for every replay."""

import itertools
import random
import subprocess
import sys

import pytest
from reference.allocator import Full, simulate_plainly, trace_of

from halfstep.plan.allocator import FIRST_ADDRESS, GAP, MIB, simulate
from halfstep.plan.fake_step import fake_step
from halfstep.plan.subject import Subject
from halfstep.plan.target import target_of


def random_trace(seed):
    """A step with storages of all sizes, some there before, some that come and go between steps."""
    draw = random.Random(seed)

    def nbytes():
        near = draw.choice([0, 512, 1024, MIB, 2 * MIB, 9 * MIB, 10 * MIB, 11 * MIB, 20 * MIB])
        return max(0, near + draw.choice([0, 0, -1, 1, 513, -700, draw.randrange(3 * MIB)]))

    num = draw.randrange(20, 70)
    storages = []
    for component in ("weights", "optimizer states"):
        storages += [(nbytes(), 0, None, component) for _ in range(draw.randrange(8))]
    times = list(range(1, 2 * num + 1))
    draw.shuffle(times)
    for _ in range(num):
        born, died = sorted((times.pop(), times.pop()))
        storages.append((nbytes(), *draw.choice([(born, died)] * 8 + [(0, died), (born, None)])))
    return trace_of(*storages, phases=(("forward", 1), ("backward", num // 2), ("step", num)))


@pytest.fixture(scope="module", params=[("charlm", "bf16"), ("digits", "fp32")], ids="-".join)
def real(request):
    spec, policy = request.param
    return fake_step(Subject(spec), policy, target_of())


@pytest.mark.parametrize(
    ("nbytes", "allocated", "reserved"),
    [
        (1, 512, 2 * MIB),
        (512, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (10 * MIB + 1, 10 * MIB + 512, 12 * MIB),  # more than 1 MiB is left, which is split off
        (11 * MIB, 12 * MIB, 12 * MIB),  # 1 MiB is left, which is not
        (100 * MIB + 1, 100 * MIB + 512, 102 * MIB),
    ],
)
def test_sizes_of_one_block(nbytes, allocated, reserved):
    found = simulate(trace_of((nbytes, 1, 2)))
    assert (found.peak_asked, found.peak_allocated, found.peak_reserved) == (nbytes, allocated, reserved)
    assert (found.rounding, found.fragmentation) == (allocated - nbytes, reserved - allocated)
    assert (found.num_segments, found.num_retries, found.out_of_memory) == (1, 0, False)


def test_a_storage_of_no_bytes_takes_no_block():
    found = simulate(trace_of((0, 0, None), (0, 1, 2)))
    assert found.peak_reserved == found.peak_allocated == 0
    assert found.blocks == [None, None]
    assert found.segments == []


def test_the_small_pool_fills_its_segment_to_the_last_512_bytes():
    full = [(1, 0, None)] * 4096
    assert simulate(trace_of(*full)).peak_reserved == 2 * MIB
    assert simulate(trace_of(*full, (1, 1, 2))).peak_reserved == 4 * MIB


def test_the_pools_share_nothing():
    found = simulate(trace_of((3 * MIB, 1, 4), (512, 2, 3)))
    assert found.peak_reserved == 22 * MIB
    assert found.num_segments == 2


def test_the_smallest_block_that_holds_it_is_taken():
    # 40 and 12 MiB lie free when 11.5 MiB come: they take the 12, and all of it.
    found = simulate(trace_of((40 * MIB, 1, 3), (12 * MIB, 2, 4), (23 * MIB // 2, 5, 6)))
    assert found.blocks[2].address == found.blocks[1].address == FIRST_ADDRESS + 40 * MIB + GAP
    assert found.blocks[2].size == 12 * MIB


def test_of_equal_blocks_the_one_at_the_lowest_address_is_taken():
    found = simulate(trace_of((12 * MIB, 1, 4), (12 * MIB, 2, 3), (12 * MIB, 5, 6)))
    assert found.blocks[2].address == FIRST_ADDRESS


def test_neighbours_merge_whatever_the_order_of_their_ends():
    # Three of 2 MiB in a segment of 20; once all are free it holds 20 again, in one block.
    for ends in ((4, 5, 6), (6, 5, 4), (4, 6, 5), (5, 4, 6)):
        storages = [(2 * MIB, born, died) for born, died in zip((1, 2, 3), ends, strict=True)]
        assert simulate(trace_of(*storages, (19 * MIB + 1, 7, 8))).peak_reserved == 20 * MIB


def test_blocks_of_two_segments_never_merge():
    assert simulate(trace_of((12 * MIB, 1, 3), (12 * MIB, 2, 4), (24 * MIB, 5, 6))).peak_reserved == 48 * MIB


def test_the_first_step_makes_the_states_where_activations_lay():
    storages = [(30 * MIB, 0, None, "optimizer states"), (30 * MIB, 1, 2)]
    phases = (("forward", 1), ("backward", 2), ("step", 3))
    found = simulate(trace_of(*storages, phases=phases))
    assert [block.address for block in found.blocks] == [FIRST_ADDRESS, FIRST_ADDRESS + 30 * MIB + GAP]
    weights = simulate(trace_of((30 * MIB, 0, None, "weights"), (20 * MIB, 1, 2), phases=phases))
    assert weights.blocks[0].address == FIRST_ADDRESS


def test_what_a_step_leaves_behind_is_there_when_the_next_begins():
    found = simulate(trace_of((30 * MIB, 0, 2), (30 * MIB, 1, None)))
    assert found.peak_asked == 60 * MIB
    assert found.peak_reserved == 60 * MIB


def test_workspaces_come_after_what_was_there_and_stay():
    found = simulate(trace_of((12 * MIB, 0, None, "weights"), (12 * MIB, 1, 2)), before=(12 * MIB, 1))
    assert [block.address for block in found.before] == [
        FIRST_ADDRESS + 12 * MIB + GAP,
        FIRST_ADDRESS + 2 * (12 * MIB + GAP),
    ]
    assert found.peak_asked == 36 * MIB + 1
    assert found.peak_reserved == 38 * MIB


def test_a_full_card_gives_back_what_lies_free_and_tries_again():
    # Blocks of 12, 12 and 14 MiB. When the last one comes, the first has ended: its segment is given back for it. In
    # the next step the second block lies in the 14, and the last needs another 14.
    trace = trace_of((11 * MIB, 1, 3), (11 * MIB, 2, 5), (13 * MIB, 4, 6))
    roomy = simulate(trace, 38 * MIB)
    assert (roomy.peak_reserved, roomy.num_segments, roomy.num_retries) == (38 * MIB, 3, 0)
    tight = simulate(trace, 28 * MIB)
    assert (tight.peak_reserved, tight.num_segments, tight.num_retries) == (28 * MIB, 2, 1)
    assert not tight.out_of_memory
    assert [(s.nbytes, s.born, s.died) for s in tight.segments] == [
        (12 * MIB, 0, 4),
        (14 * MIB, 0, None),
        (14 * MIB, 4, None),
    ]


def test_a_step_that_does_not_fit_says_when():
    trace = trace_of((11 * MIB, 1, 3), (11 * MIB, 2, 5), (13 * MIB, 4, 6))
    none = simulate(trace, 25 * MIB)
    assert none.out_of_memory
    assert none.failed_at == 4
    assert none.blocks[2] is None
    assert none.peak_reserved == 24 * MIB
    assert simulate(trace_of((12 * MIB, 0, None, "weights")), 11 * MIB).failed_at == 0
    assert simulate(trace, 30 * MIB, before=(32 * MIB,)).failed_at == 0


def test_a_segment_in_use_is_not_given_back():
    # 1 MiB + 1 in use keeps all 20 MiB, though the other 3 MiB in it are free.
    trace = trace_of((MIB + 1, 1, None), (3 * MIB, 2, 3), (30 * MIB, 4, 5))
    assert simulate(trace, 50 * MIB).num_retries == 0
    assert simulate(trace, 50 * MIB - 1).failed_at == 4


def check_against_twin(trace, capacity=None, before=()):
    found = simulate(trace, capacity, before)
    try:
        plain = simulate_plainly(trace, capacity, before)
    except Full:
        assert found.out_of_memory
        return found
    assert not found.out_of_memory
    for name in ("peak_reserved", "peak_allocated", "peak_asked", "num_segments", "num_retries"):
        assert getattr(found, name) == plain[name], name
    assert [block and (block.address, block.size) for block in found.blocks] == plain["blocks"]
    assert [(block.address, block.size) for block in found.before] == plain["before"]
    return found


@pytest.mark.parametrize("seed", range(20))
def test_random_steps_agree_with_the_plain_twin(seed):
    trace = random_trace(seed)
    free = check_against_twin(trace, before=random.Random(seed).choices([1, MIB, 8 * MIB, 32 * MIB], k=seed % 4))
    check_invariants(trace, free)
    # From too little, over some that needs retries, to enough.
    for share in (0.8, 0.93, 0.97, 1.0):
        tight = check_against_twin(trace, int(share * free.peak_reserved))
        assert tight.peak_reserved <= share * free.peak_reserved
        if not tight.out_of_memory:
            check_invariants(trace, tight)


def test_random_steps_meet_retries_and_failures():
    traces = [random_trace(seed) for seed in range(20)]
    found = [simulate(trace, int(0.93 * simulate(trace).peak_reserved)) for trace in traces]
    assert any(each.num_retries and not each.out_of_memory for each in found)
    assert any(each.out_of_memory for each in found)
    assert any(each.fragmentation for each in found)


def test_real_steps_agree_with_the_plain_twin(real):
    found = check_against_twin(real, before=(8 * MIB + 128 * 1024, MIB))
    check_invariants(real, found)


def test_the_peak_asked_is_the_peak_of_the_trace(real):
    assert simulate(real).peak_asked == real.peak.nbytes
    assert simulate(real, before=(100, 5)).peak_asked == real.peak.nbytes + 105


def test_one_step_is_as_the_next(real):
    """A job that runs on holds no more: a step that starts with the segments of the first one finds room in them."""
    found = simulate(real)
    again = simulate(real, capacity=found.peak_reserved)
    assert (again.num_retries, again.peak_reserved) == (0, found.peak_reserved)


def check_invariants(trace, found):
    """Blocks lie in segments that are held, never over each other, and the sums are in order at every time."""
    assert found.peak_reserved >= found.peak_allocated >= found.peak_asked
    most_reserved = most_allocated = 0
    for time in range(trace.num_events + 1):
        held = [s for s in found.segments if s.born <= time and (s.died is None or s.died > time)]
        used = [
            block
            for storage, block in zip(trace.storages, found.blocks, strict=True)
            if block is not None and storage.born <= time and (storage.died is None or storage.died > time)
        ] + list(found.before)
        used.sort()
        for block, behind in itertools.pairwise(used):
            assert block.address + block.size <= behind.address
        for block in used:
            assert block.address % 512 == block.size % 512 == 0
            assert block.nbytes <= block.size
            assert any(s.address <= block.address and block.address + block.size <= s.address + s.nbytes for s in held)
        most_reserved = max(most_reserved, sum(s.nbytes for s in held))
        most_allocated = max(most_allocated, sum(block.size for block in used))
    assert most_reserved == found.peak_reserved
    assert most_allocated == found.peak_allocated


def test_it_needs_no_torch():
    code = "import halfstep.plan.allocator, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
