"""Questions about values that a fake tensor does not have: what is answered, where it is noted, what is refused."""

import types
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from reference.plan_assertions import asserts_bounds
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.distributions import Normal

from halfstep.errors import HalfstepError
from halfstep.plan import answers as answering
from halfstep.plan.fake import FakeDevice
from halfstep.plan.target import target_of

HERE = Path(__file__).name


@pytest.fixture
def device():
    return FakeDevice(target_of("cpu"))


@pytest.fixture
def x(device):
    """A fake tensor [4, 3], on a device that runs."""
    with device.running():
        yield torch.ones(4, 3) * torch.arange(3)


# --- values --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ask", "expected"),
    [
        (lambda x: x.sum().item(), 0.0),
        (lambda x: float(x.mean()), 0.0),
        (lambda x: x.long().max().item(), 0),
        (lambda x: x[0].tolist(), [0.0] * 3),
        (lambda x: x.long().tolist(), [[0] * 3] * 4),
        (lambda x: x.sum().tolist(), 0.0),
        (lambda x: f"{x.mean():.2f}", "0.00"),
        (lambda x: x.numpy().sum(), 0.0),
        (lambda x: np.asarray(x, dtype=np.float64).shape, (4, 3)),
    ],
)
def test_numbers_are_zero_of_their_kind(ask, expected, x, device):
    answer = ask(x)
    assert answer == expected
    assert type(answer) is type(expected) or isinstance(answer, np.generic)
    assert device.answers.num >= 1
    (note,) = device.answers.notes()
    assert note.startswith(f"Numbers read from the device ({HERE}:")


def test_constants_that_torch_knows_are_no_questions(device):
    with device.running():
        assert torch.tensor(5).item() == 5
    assert device.answers.num == 0
    assert device.answers.notes() == []


def only_finite(x):
    if not torch.isfinite(x).all():
        raise FloatingPointError
    if torch.isnan(x).any() or torch.isinf(x).any():
        raise FloatingPointError
    if (torch.isnan(x) | torch.isinf(x)).any():
        raise FloatingPointError
    return x


def skips_if_not_finite(x):
    return x if torch.isfinite(x.sum()) else None


def raises_in_a_branch(x):
    if (x < 0).any():
        raise ValueError("negative")
    if bool((x >= 0).all()):
        y = x
    else:
        raise ValueError("negative")
    return y


def assertion_of_torch(x):
    torch._assert((x > 0).all(), "not positive")
    return x


def validates(x):
    return Normal(x, x.exp(), validate_args=True).log_prob(x)


def compares(x):
    return x if torch.equal(x, x) else None


def updates_a_condition(x):
    bad = torch.isnan(x).any()
    bad |= torch.isinf(x).any()
    bad.logical_or_(torch.isnan(x).any())
    return None if bad else x


@pytest.mark.parametrize(
    "step",
    [
        only_finite,
        skips_if_not_finite,
        asserts_bounds,
        raises_in_a_branch,
        assertion_of_torch,
        validates,
        compares,
        updates_a_condition,
    ],
)
def test_a_healthy_step_goes_on(step, x):
    assert step(x) is not None


def test_a_condition_that_decides_nothing_is_false(x, device):
    taken = [bool((x > 0).any())]
    if x.sum() > 1:
        taken.append(True)
    assert taken == [False]
    assert device.answers.notes()[0].startswith(f"Conditions on values ({HERE}:")


def test_what_becomes_of_a_known_condition_is_not_known(x):
    known = torch.isfinite(x)
    known &= x > 1
    assert not known.all()


def test_clipping_with_error_if_nonfinite_goes_on(x):
    weight = torch.nn.Parameter(torch.ones(3))
    (weight * x).sum().backward()
    assert torch.nn.utils.clip_grad_norm_([weight], 1.0, error_if_nonfinite=True).shape == ()


# --- loops ---------------------------------------------------------------------------------------------------------


def halves(x):
    while not x.norm() < 1:
        x = x / 2


def halves_for_ever(x):
    while True:
        x = x / 2
        if x.norm() < 1:
            break


def asks_for_each(x):
    return sum(bool(x[index % 4].sum() > 1) for index in range(30))


@pytest.mark.parametrize("loop", [halves, halves_for_ever])
def test_a_loop_that_a_value_ends_is_refused(loop, x, monkeypatch):
    monkeypatch.setattr(answering, "MAX_ASKED_IN_WHILE", 20)
    with pytest.raises(HalfstepError, match=rf"{HERE}:\d+: a loop there ends by a value.* asked for 20 times"):
        loop(x)


def test_a_loop_over_a_range_may_ask_more_often(x, device, monkeypatch):
    monkeypatch.setattr(answering, "MAX_ASKED_IN_WHILE", 20)
    assert asks_for_each(x) == 0
    monkeypatch.setattr(answering, "MAX_ASKED", 40)
    with pytest.raises(HalfstepError, match="asked for 40 times"):
        asks_for_each(x)
    device.answers.restart()
    assert asks_for_each(x) == 0


# --- sizes ---------------------------------------------------------------------------------------------------------

MATRIX = torch.arange(12.0).view(4, 3)


def _parts(value):
    return [value] if isinstance(value, torch.Tensor) else list(value)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x[x > -1],
        lambda x: x[(x > -1).all(1)],
        lambda x: x.masked_select(x > -1),
        lambda x: torch.nonzero(x + 1),
        lambda x: torch.where(x > -1),
        lambda x: torch.argwhere(x > -1),
        lambda x: x.clone().index_put_((x > -1,), x.new_zeros(())),
        lambda x: torch.unique(x),
        lambda x: torch.unique(x, return_inverse=True, return_counts=True),
        lambda x: torch.unique(x, dim=1, return_counts=True),
        lambda x: torch.unique_consecutive(x, return_inverse=True),
        lambda x: torch.bincount(x.long().flatten(), minlength=20),
        lambda x: torch.bincount(x.long().flatten(), x.flatten(), minlength=20),
        lambda x: F.one_hot(x.long(), 12),
    ],
)
def test_what_values_select_is_as_much_as_there_can_be(function, device):
    expected = function(MATRIX)
    with device.running():
        found = function(device.batch(MATRIX))
        assert [tuple(part.shape) for part in _parts(found)] == [tuple(part.shape) for part in _parts(expected)]
        assert [part.dtype for part in _parts(found)] == [part.dtype for part in _parts(expected)]


def test_a_size_is_noted_as_an_upper_bound(x, device):
    x[x > 0]
    (note,) = device.answers.notes()
    assert HERE in note
    assert note.endswith("are as many as there can be: an upper bound.")


@pytest.mark.parametrize("lengths", [([5, 4], [3, 2]), (torch.tensor([5, 4]), torch.tensor([3, 2]))])
def test_a_ctc_loss_has_its_gradient(lengths, device):
    with device.running():
        logits = torch.zeros(5, 2, 7, requires_grad=True)
        targets = torch.ones(2, 3, dtype=torch.long)
        loss = F.ctc_loss(logits.log_softmax(-1), targets, *lengths)
        loss.backward()
        assert loss.shape == ()
        assert logits.grad.shape == logits.shape


def test_a_ctc_loss_keeps_what_the_longest_targets_need(device):
    arguments = torch.zeros(5, 2, 7), torch.ones(2, 3, dtype=torch.long), torch.full((2,), 5), torch.full((2,), 3)
    expected = torch._ctc_loss(*arguments)
    with device.running():
        found = torch._ctc_loss(*device.batch(arguments))
    assert [part.shape for part in found] == [part.shape for part in expected]


@pytest.mark.parametrize(
    ("function", "error", "operation"),
    [
        (lambda x: torch.bincount(x.long().flatten()), DynamicOutputShapeException, "bincount"),
        (lambda x: x.repeat_interleave(x[:, 0].long(), 0), DynamicOutputShapeException, "repeat_interleave"),
        (lambda x: F.one_hot(x.long()), DataDependentOutputException, "one_hot"),
    ],
)
def test_a_size_without_a_bound_is_not_guessed(function, error, operation, x):
    with pytest.raises(error) as raised:
        function(x)
    assert operation in str(raised.value.func)


# --- where ---------------------------------------------------------------------------------------------------------


def test_places_are_lines_of_the_users_even_where_torch_asks(x, device):
    Normal(x, x.exp(), validate_args=True)
    line = test_places_are_lines_of_the_users_even_where_torch_asks.__code__.co_firstlineno + 1
    assert {place for _, place in device.answers.places} == {f"{HERE}:{line}"}


def test_what_halfstep_asks_is_counted_but_is_no_place_of_the_users(device):
    source = "def ask(x):\n    return x.sum().item()\n"
    module = types.ModuleType("own")
    own = Path(answering.__file__).parent.parent / "stepper" / "step.py"
    exec(compile(source, str(own), "exec"), module.__dict__)
    with device.running():
        assert module.ask(torch.ones(3) * torch.arange(3)) == 0
    assert device.answers.num == 1
    assert not device.answers.places
