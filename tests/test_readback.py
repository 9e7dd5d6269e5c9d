"""Numbers read late: in order, with their values, and without a wait unless one is asked for."""

import math

import pytest
import torch

from halfstep import readback
from halfstep.readback import Readback


class Arrival:
    """A copy that arrives when the test says so."""

    def __init__(self):
        self.has_come, self.num_waits = False, 0

    def query(self):
        return self.has_come

    def synchronize(self):
        self.num_waits += 1
        self.has_come = True


@pytest.fixture
def arrivals(monkeypatch):
    """Copies that take their time, as CUDA's do."""
    made = []

    def start(flat):
        made.append(Arrival())
        return flat, made[-1]

    monkeypatch.setattr(readback, "_start_copy", start)
    return made


def fill(queue, *items):
    for item in items:
        queue.put(item, torch.full((3,), float(item)), torch.tensor(item + 0.5))
        queue.send()


def test_items_come_back_with_their_own_numbers():
    queue = Readback()
    queue.put("a", torch.arange(4.0))
    queue.put("b", torch.tensor(7.0), torch.tensor([1.0, float("nan")]))
    assert queue.take() == []  # not sent
    queue.send()
    (first, one), (second, two) = queue.take()
    assert (first, second) == ("a", "b")
    assert one == [[0.0, 1.0, 2.0, 3.0]]
    assert two[0] == [7.0]
    assert two[1][0] == 1
    assert math.isnan(two[1][1])
    assert queue.take() == []


def test_a_loss_in_fp64_keeps_its_digits():
    queue = Readback()
    queue.put("loss", torch.tensor([1 + 2**-40], dtype=torch.float64), torch.tensor([2**-149]))
    queue.send()
    assert queue.take() == [("loss", [[1 + 2**-40], [2**-149]])]


def test_what_has_not_arrived_is_not_waited_for(arrivals):
    queue = Readback()
    fill(queue, 1, 2)
    assert queue.take() == []
    arrivals[1].has_come = True
    assert queue.take() == []  # in order
    arrivals[0].has_come = True
    assert queue.take() == [(1, [[1.0] * 3, [1.5]]), (2, [[2.0] * 3, [2.5]])]
    assert [arrival.num_waits for arrival in arrivals] == [0, 0]


def test_who_waits_gets_all_that_was_sent(arrivals):
    queue = Readback()
    fill(queue, 1, 2)
    queue.put(3, torch.zeros(1))
    arrivals[0].has_come = True
    assert [item for item, _ in queue.take(waits_for=queue.send() - 1)] == [1, 2]
    assert [arrival.num_waits for arrival in arrivals] == [0, 1, 0]
    assert [item for item, _ in queue.take(waits_for=3)] == [3]


def test_nothing_put_is_nothing_sent(arrivals):
    Readback().send()
    assert arrivals == []


@pytest.mark.gpu
def test_a_copy_from_cuda_waits_for_nothing():
    queue = Readback()
    spin = torch.randn(4096, 4096, device="cuda")
    for _ in range(50):
        spin = spin @ spin
    queue.put("late", spin.isfinite().sum().float())
    torch.cuda.set_sync_debug_mode("error")
    try:
        queue.send()
        assert queue.take() == []  # the products are still queued
    finally:
        torch.cuda.set_sync_debug_mode("default")
    ((_, ((count,),)),) = queue.take(waits_for=1)
    assert count == spin.isfinite().sum().item()
