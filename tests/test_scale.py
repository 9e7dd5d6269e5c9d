"""The loss scale against its plain twin and against torch's, over random verdicts and into every corner."""

from __future__ import annotations

import io
import math
import random
import warnings

import pytest
import torch
from reference.scaler import Scaler

from halfstep.errors import HalfstepError
from halfstep.policy import LossScale
from halfstep.scale import DynamicScale, NoScale, StaticScale, make_scale

CPU = torch.device("cpu")
BAD, CLEAN = torch.ones(()), torch.zeros(())
SETTINGS = {
    "torch's": LossScale("dynamic"),
    "quick": LossScale("dynamic", init=256.0, interval=7),
    "every step": LossScale("dynamic", init=4.0, interval=1, ceiling=64.0, floor=2.0),
    "big strides": LossScale("dynamic", init=2.0**10, growth=16.0, backoff=2.0**-5, interval=11, ceiling=2.0**13),
    "below one": LossScale("dynamic", init=1.0, floor=2.0**-20, ceiling=2.0, interval=3),
    "patient": LossScale("dynamic", init=2.0**12, interval=5, hysteresis=2),
    "very patient": LossScale("dynamic", init=2.0**12, interval=4, hysteresis=5, floor=2.0**3),
    "patient at interval 1": LossScale("dynamic", init=2.0**12, interval=1, hysteresis=3),
    "pinned": LossScale("dynamic", init=8.0, floor=8.0, ceiling=8.0, interval=2),
    "the top of fp32": LossScale("dynamic", init=2.0**125, ceiling=2.0**127, interval=1),
    "the bottom of fp32": LossScale("dynamic", init=2.0**-120, floor=2.0**-126, backoff=2.0**-60, interval=1),
}


def twin_of(settings):
    names = ("growth", "backoff", "interval", "floor", "ceiling", "hysteresis")
    return Scaler(settings.init, **{name: getattr(settings, name) for name in names})


def kinds(cls=NoScale):
    """The class and all below it, so that a new kind is tested as soon as it is written."""
    return [cls, *(found for child in cls.__subclasses__() for found in kinds(child))]


def is_power_of_two(value):
    return value > 0 and math.isfinite(value) and math.frexp(value)[0] == 0.5


# --- the sequence --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("share_bad", [0.02, 0.3, 0.8])
def test_random_verdicts_give_the_twins_sequence(name, share_bad):
    settings = SETTINGS[name]
    scale, twin = make_scale(settings, CPU), twin_of(settings)
    draw = random.Random(f"{name} {share_bad}")
    for step in range(1500):
        bad = draw.random() < share_bad
        assert scale.is_exhausted() == twin.is_exhausted(), step
        scale.update(BAD if bad else CLEAN)
        twin.update(bad)
        if draw.random() < 0.03:
            assert scale.back_off() == twin.back_off(), step
        value = scale.value.item()
        assert value == twin.scale, step
        assert is_power_of_two(value), step
        assert settings.floor <= value <= settings.ceiling, step
        state = scale.state_dict()
        assert state["num_clean"] == twin.num_clean, step
        # Without hysteresis nobody asks for this count, and it is not kept.
        assert settings.hysteresis == 1 or state["num_overflows"] == twin.num_overflows, step


def test_the_defaults_give_the_sequence_of_gradscaler():
    """Overflows, 2000 clean steps in a row of which the first 1900 are in the states they begin with, overflows."""
    draw = random.Random(1)
    verdicts = [False] * 120 + [True] * 2 + [draw.random() < 0.05 for _ in range(150)]
    weight = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.0)
    scaler = torch.amp.GradScaler("cpu")
    scaler.load_state_dict(scaler.state_dict() | {"_growth_tracker": 1900})
    scaler.scale(weight.sum())  # its tensors come into being with the first use
    scale = make_scale(LossScale("dynamic"), CPU)
    scale.load_state_dict(scale.state_dict() | {"num_clean": 1900})
    values = []
    for step, bad in enumerate(verdicts):
        values.append(scale.value.item())
        assert values[-1] == scaler.get_scale(), step
        weight.grad = torch.full((1,), math.inf if bad else 1.0)
        scaler.step(optimizer)
        scaler.update()
        scale.update(BAD if bad else CLEAN)
    assert (values[99], values[100]) == (2.0**16, 2.0**17)
    assert 1.0 < min(values) < 2.0**12  # it went down, and not to the floor


@pytest.mark.parametrize("backoff", [0.5, 0.125, 2.0**-12])
@pytest.mark.parametrize("floor", [1.0, 2.0**-10, 2.0**5])
def test_n_overflows_give_the_closed_form_and_never_zero(backoff, floor):
    settings = LossScale("dynamic", backoff=backoff, floor=floor)
    scale = make_scale(settings, CPU)
    for n in range(1, 1001):
        scale.update(BAD)
        # math.ldexp of a sum of exponents: init * backoff^n itself leaves the range of a float.
        exponent = max(math.log2(floor), 16 + n * math.log2(backoff))
        assert scale.value.item() == math.ldexp(1.0, int(exponent)), n
    assert scale.value.item() == floor
    assert scale.is_exhausted()
    scale.update(CLEAN)
    assert scale.value.item() == floor


def test_a_thousand_overflows_poison_gradscaler_and_not_us():
    """The fault that the floor is there for: torch's own scale reaches 0."""
    weight = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.0)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(weight.sum())
    scale = make_scale(LossScale("dynamic"), CPU)
    for _ in range(1000):
        weight.grad = torch.full((1,), math.inf)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            scaler.step(optimizer)
        scaler.update()
        scale.update(BAD)
    assert scaler.get_scale() == 0.0
    assert scale.value.item() == 1.0


def test_growth_stops_at_the_ceiling():
    scale = make_scale(LossScale("dynamic", interval=1), CPU)
    for n in range(1, 400):
        scale.update(CLEAN)
        assert scale.value.item() == min(2.0**24, 2.0 ** (16 + n))


def test_one_overflow_before_the_interval_starts_the_count_anew():
    scale = make_scale(LossScale("dynamic", init=8.0, interval=10), CPU)
    for verdict in [CLEAN] * 9 + [BAD] + [CLEAN] * 9:
        scale.update(verdict)
    assert scale.value.item() == 4.0
    scale.update(CLEAN)
    assert scale.value.item() == 8.0


# --- hysteresis ----------------------------------------------------------------------------------------------------


def test_hysteresis_counts_consecutive_overflows_alone():
    scale = make_scale(LossScale("dynamic", init=64.0, hysteresis=3), CPU)
    for _ in range(50):
        for verdict in (BAD, BAD, CLEAN):
            scale.update(verdict)
    assert scale.value.item() == 64.0
    for expected in (64.0, 64.0, 32.0, 16.0):
        scale.update(BAD)
        assert scale.value.item() == expected


def test_a_tolerated_overflow_is_no_clean_step():
    scale = make_scale(LossScale("dynamic", init=64.0, hysteresis=2, interval=4), CPU)
    for verdict in (CLEAN, CLEAN, CLEAN, BAD, CLEAN, CLEAN, CLEAN):
        scale.update(verdict)
    assert scale.value.item() == 64.0
    scale.update(CLEAN)
    assert scale.value.item() == 128.0


def test_an_isolated_overflow_at_the_floor_is_tolerated_like_any_other():
    scale = make_scale(LossScale("dynamic", init=1.0, hysteresis=2), CPU)
    assert not scale.is_exhausted()
    scale.update(BAD)
    assert scale.is_exhausted()
    scale.update(CLEAN)
    assert not scale.is_exhausted()


# --- backing off ---------------------------------------------------------------------------------------------------


def test_back_off_gives_the_factor_and_none_at_the_floor():
    scale = make_scale(LossScale("dynamic", init=8.0, backoff=0.25), CPU)
    assert [scale.back_off() for _ in range(4)] == [0.25, 0.5, None, None]
    assert scale.value.item() == 1.0


def test_back_off_starts_the_count_of_clean_steps_anew():
    scale = make_scale(LossScale("dynamic", init=8.0, interval=3), CPU)
    scale.update(CLEAN)
    scale.update(CLEAN)
    assert scale.back_off() == 0.5
    scale.update(CLEAN)
    scale.update(CLEAN)
    assert scale.value.item() == 4.0


@pytest.mark.parametrize("cls", [NoScale, StaticScale])
def test_a_scale_that_stays_stays(cls):
    scale = make_scale(LossScale(cls.kind, init=128.0), CPU)
    for verdict in (BAD, CLEAN, BAD):
        scale.update(verdict)
        assert scale.back_off() is None
        assert not scale.is_exhausted()
    assert scale.value.item() == (1.0 if cls is NoScale else 128.0)


# --- state ---------------------------------------------------------------------------------------------------------


def worked(cls, num_verdicts=40):
    """A scale of this kind after some verdicts, so that its counters are not those of a new one."""
    hysteresis = 3
    scale = make_scale(LossScale(cls.kind, init=2.0**9, interval=5, hysteresis=hysteresis), CPU)
    draw = random.Random(num_verdicts)
    for _ in range(num_verdicts):
        scale.update(BAD if draw.random() < 0.4 else CLEAN)
    return scale


@pytest.mark.parametrize("cls", kinds())
def test_every_kind_is_made_from_its_settings(cls):
    assert type(make_scale(LossScale(cls.kind), CPU)) is cls


@pytest.mark.parametrize("cls", kinds())
@pytest.mark.parametrize("num_verdicts", [0, 1, 2, 7, 40])
def test_state_round_trip_is_exact_and_goes_on_the_same(cls, num_verdicts):
    first = worked(cls, num_verdicts)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second = make_scale(first.settings, CPU)
    second.load_state_dict(torch.load(file, weights_only=True))
    assert second.state_dict() == first.state_dict()
    draw = random.Random(7)
    for _ in range(60):
        verdict = BAD if draw.random() < 0.3 else CLEAN
        first.update(verdict)
        second.update(verdict)
        assert second.state_dict() == first.state_dict()


@pytest.mark.parametrize("cls", kinds())
def test_a_state_shares_nothing_with_the_scale_that_gave_it(cls):
    scale = worked(cls)
    before = scale.state_dict()
    saved = dict(before)
    for _ in range(20):
        scale.update(BAD)
    assert before == saved


@pytest.mark.parametrize("cls", kinds())
@pytest.mark.parametrize("other", kinds())
def test_only_the_state_of_the_same_kind_is_taken(cls, other):
    scale, state = make_scale(LossScale(cls.kind), CPU), worked(other).state_dict()
    before = scale.state_dict()
    if cls is other:
        scale.load_state_dict(state)
        assert scale.state_dict() == state
        return
    with pytest.raises(HalfstepError, match=f"the state of a {other.kind} loss scale: this run has scale={cls.kind}"):
        scale.load_state_dict(state)
    assert scale.state_dict() == before


def test_the_state_of_gradscaler_is_refused():
    scale = make_scale(LossScale("dynamic"), CPU)
    with pytest.raises(HalfstepError, match="the state of a None loss scale"):
        scale.load_state_dict(torch.amp.GradScaler("cpu").state_dict())


@pytest.mark.parametrize("value", [0.0, -2.0, 3.0, math.inf, math.nan])
def test_a_value_that_no_run_can_have_written_is_refused(value):
    scale = make_scale(LossScale("dynamic"), CPU)
    with pytest.raises(HalfstepError, match="not a positive power of two"):
        scale.load_state_dict({"kind": "dynamic", "value": value, "num_clean": 0, "num_overflows": 0.0})
    assert scale.value.item() == 2.0**16
    scale.load_state_dict({"kind": "dynamic", "value": 4.0, "num_clean": 0, "num_overflows": 0.0})
    assert scale.value.item() == 4.0


@pytest.mark.parametrize("key", ["value", "num_clean", "num_overflows"])
def test_a_state_with_a_part_missing_changes_nothing(key):
    scale = make_scale(LossScale("dynamic"), CPU)
    state = worked(DynamicScale).state_dict()
    before = scale.state_dict()
    del state[key]
    with pytest.raises(HalfstepError, match=f"it lacks {key}"):
        scale.load_state_dict(state)
    assert scale.state_dict() == before


@pytest.mark.parametrize(("floor", "ceiling", "expected"), [(64.0, 2.0**24, 64.0), (1.0, 4.0, 4.0), (1.0, 64.0, 8.0)])
def test_a_loaded_value_is_brought_between_the_bounds_of_this_run(floor, ceiling, expected):
    scale = make_scale(LossScale("dynamic", init=floor, floor=floor, ceiling=ceiling), CPU)
    scale.load_state_dict({"kind": "dynamic", "value": 8.0, "num_clean": 3, "num_overflows": 0.0})
    assert scale.value.item() == expected


def test_the_value_is_updated_in_place_so_that_who_holds_it_sees_it():
    scale = make_scale(LossScale("dynamic"), CPU)
    value = scale.value
    scale.update(BAD)
    scale.back_off()
    scale.load_state_dict(worked(DynamicScale).state_dict())
    assert scale.value is value


def test_a_scale_goes_on_from_a_scaler_of_torch():
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=7)
    scaler.load_state_dict({**scaler.state_dict(), "_growth_tracker": 5})
    dynamic, none = (make_scale(LossScale(kind), torch.device("cpu")) for kind in ("dynamic", "none"))
    assert dynamic.load_from_scaler(scaler.state_dict())
    assert dynamic.state_dict() == {"kind": "dynamic", "value": 2.0**12, "num_clean": 5, "num_overflows": 0.0}
    assert not dynamic.load_from_scaler({})  # of one that was not enabled
    assert dynamic.value.item() == 2.0**12
    assert not none.load_from_scaler(scaler.state_dict())
    assert none.value.item() == 1.0
