"""The ledger, on plain operations: births, deaths, phases, and what each storage was held for."""

from __future__ import annotations

import contextlib

import torch
from torch import nn

from halfstep.plan.ledger import Ledger, Unplaced
from halfstep.plan.step_trace import BACKWARD, FORWARD, STEP
from halfstep.record import Walk


@contextlib.contextmanager
def forward(ledger):
    ledger.in_forward = True
    yield
    ledger.in_forward = False


def lives(ledger):
    return [(s.nbytes, s.component, s.born, s.died) for s in ledger.storages()]


def test_a_storage_is_born_with_its_first_tensor_and_dies_with_its_last_view():
    ledger = Ledger()
    with Unplaced(ledger):
        a = torch.ones(4)
        view = a.view(2, 2)[0]
        del a
        assert lives(ledger) == [(16, "step temporaries", 1, None)]
        del view
    assert lives(ledger) == [(16, "step temporaries", 1, 2)]
    assert ledger.time == 2


def test_a_write_in_place_is_no_birth():
    ledger = Ledger()
    with Unplaced(ledger):
        a = torch.ones(4).add_(1)
        torch.mul(a, 2, out=a)
    assert len(ledger.storages()) == 1
    assert ledger.num_operations == 3


def test_what_was_there_before_is_born_at_0_under_its_name():
    ledger, weight = Ledger(), torch.ones(3)
    ledger.hold([weight, weight.view(3, 1)], "weights")
    ledger.restart()
    assert lives(ledger) == [(12, "weights", 0, None)]
    assert ledger.storages()[0].phase is None


def test_a_new_name_replaces_the_old_one():
    ledger = Ledger()
    with Unplaced(ledger):
        kept = torch.ones(3)
    ledger.hold([kept], "optimizer states")
    assert ledger.storages()[0].component == "optimizer states"


def test_what_an_earlier_step_left_counts_as_buffers():
    ledger = Ledger()
    with Unplaced(ledger):
        kept = torch.ones(3)
    ledger.restart()
    assert lives(ledger) == [(12, "buffers", 0, None)]
    del kept


def test_phases_and_temporaries_of_each():
    ledger, x = Ledger(), torch.ones(3, requires_grad=True)
    ledger.hold([x], "weights")
    ledger.restart()
    with Unplaced(ledger):
        with forward(ledger):
            middle = x.exp()  # kept for backward
            loss = (middle + 1).sum()  # what is summed is not
        del middle
        loss.backward()
        torch.ones(1)
    found = {(s.op, s.phase, s.component) for s in ledger.storages() if s.op}
    assert ("aten.exp.default", FORWARD, "activations") in found
    assert ("aten.add.Tensor", FORWARD, "forward temporaries") in found
    assert ("aten.mul.Tensor", BACKWARD, "backward temporaries") in found
    assert ("aten.ones_like.default", BACKWARD, "backward temporaries") in found  # where it starts from
    assert ("aten.ones.default", STEP, "step temporaries") in found
    assert [phase for phase, _ in ledger.phases] == [FORWARD, BACKWARD, STEP]
    starts = [start for _, start in ledger.phases]
    assert starts == sorted(starts)
    assert starts[0] == 1


def test_a_cast_of_a_weight_in_the_forward_pass_is_a_16_bit_weight_and_any_other_cast_is_not():
    ledger, weight, x = Ledger(), torch.ones(3), torch.ones(5)
    ledger.hold([weight], "weights")
    ledger.hold([x], "inputs")
    ledger.restart()
    with Unplaced(ledger):
        with forward(ledger):
            casts = [weight.bfloat16(), x.bfloat16()]
        casts.append(weight.bfloat16())
    found = [s.component for s in ledger.storages()[2:]]
    assert found[:2] == ["16-bit weights", "activations"]
    assert "temporaries" in found[2]


def test_a_walk_brings_places():
    ledger, model = Ledger(), nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    with Walk(model, ledger), forward(ledger):
        model(torch.ones(1, 2)).sum()
    made = {s.op: s for s in ledger.storages()}
    assert made["aten.relu.default"].module == "1"
    assert made["aten.addmm.default"].module == "0"
    assert made["aten.sum.default"].module is None
    assert made["aten.sum.default"].file == __file__


def test_what_dies_in_a_row_dies_in_the_order_of_its_birth():
    ledger = Ledger()
    with Unplaced(ledger):
        a, b, c = torch.ones(1), torch.ones(2), torch.ones(3)
        del c, a
        d = torch.ones(4)
        del b, d
    assert [(s.nbytes, s.born, s.died) for s in ledger.storages()] == [(4, 1, 4), (8, 2, 7), (12, 3, 5), (16, 6, 8)]


# --- steady --------------------------------------------------------------------------------------------------------


def is_steady(held, step):
    """Whether a window is steady in which ``step`` changes the list ``held``."""
    ledger = Ledger()
    ledger.hold(held, "buffers")
    ledger.restart()
    with Unplaced(ledger):
        step(held)
    return ledger.is_steady()


def test_a_step_is_steady_that_keeps_nothing_new():
    assert is_steady([torch.ones(3)], lambda held: held[0].sum())
    assert not is_steady([torch.ones(3)], lambda held: held.append(torch.ones(3)))


def test_a_step_is_steady_that_replaces_what_it_keeps():
    assert is_steady([torch.ones(3)], lambda held: held.__setitem__(0, torch.zeros(3)))
    assert not is_steady([torch.ones(3)], lambda held: held.__setitem__(0, torch.zeros(4)))


def test_gradients_and_inputs_come_and_go():
    ledger = Ledger()
    ledger.restart()
    with Unplaced(ledger):
        gradient, batch = torch.ones(3), torch.ones(4)
    ledger.hold([gradient], "gradients")
    ledger.hold([batch], "inputs")
    assert ledger.is_steady()
