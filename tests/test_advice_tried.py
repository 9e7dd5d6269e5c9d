"""What advise proposes: in order of cost, each tried; a mark that is wrong either way would show here."""

from __future__ import annotations

import inspect
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from halfstep.diagnosis.advice import DOES_NOT, MENDS, NOT_TRIED, Advice, advice_table, advise, try_policies
from halfstep.diagnosis.capture import Capture
from halfstep.diagnosis.intervention import Intervention, away_from_zero, clamped, in_fp32
from halfstep.errors import HalfstepError
from halfstep.policy import Policy
from halfstep.record import Producer

pytestmark = pytest.mark.usefixtures("kernels_stay")

X = torch.linspace(-1, 1, 32).reshape(4, 8).cos()


class Step(nn.Module):
    """A linear layer, ``fault`` of its output, and another one."""

    def __init__(self, fault=None, **kwargs):
        super().__init__()
        torch.default_generator.manual_seed(0)
        self.stem, self.fault, self.head = nn.Linear(8, 8), Calls(fault), nn.Linear(8, 1)

    def forward(self, x):
        return self.head(self.fault(self.stem(x)))


class Calls(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def mean(model, factor=1.0):
    return model(X).float().mean() * factor


def advice_of(model, policy="fp16", scale=None, loss=mean):
    """The advice of one capture, checked for what holds for all."""
    policy = Policy.parse(policy)
    scale = scale or (1.0 if policy.scale.kind == "none" else policy.scale.init)
    capture = Capture(model, lambda: loss(model), policy, scale=scale, step=7)
    before = {name: p.clone() for name, p in model.named_parameters()}
    random = torch.get_rng_state()
    advice = advise(capture, capture.find_producer())
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert torch.equal(torch.get_rng_state(), random)
    assert len(advice) <= 10
    assert len({a.text for a in advice}) == len(advice)
    # Where a lower scale mends it alone, it would mend it under any policy, so that the others are tried without.
    goes_down = policy.scale.kind == "dynamic" and not any(a.result == MENDS and "lower the" in a.text for a in advice)
    for each in advice:
        assert each.result in (MENDS, DOES_NOT, NOT_TRIED)
        if each.policy is not None and each.result != NOT_TRIED:
            assert str(Policy.parse(each.policy)) == each.policy
            assert mends(model, each.policy, scale, loss, goes_down) is (each.result == MENDS), each
    return advice


def mends(model, text, scale, loss, goes_down):
    """Whether a policy does what its advice says, by what a dynamic scale would do: go down until it fits."""
    policy = Policy.parse(text)
    scale = min(scale, policy.scale.init) if policy.scale.kind != "none" else 1.0
    scales = [scale]
    while goes_down and scales[-1] > policy.scale.floor and policy.scale.kind == "dynamic":
        scales.append(scales[-1] / 2)
    return any(Capture(model, lambda: loss(model), policy, scale=s).run().is_finite for s in scales)


def result_of(advice, start):
    (found,) = [a for a in advice if a.text.startswith(start)]
    return found.result


def line_of(function):
    return f"{inspect.unwrap(function).__code__.co_filename.rpartition('/')[2]} line {function.__code__.co_firstlineno}"


# --- forward -------------------------------------------------------------------------------------------------------


def test_an_overflow_of_a_product_can_be_kept_in_fp32_clamped_or_computed_in_bf16():
    fault = lambda x: ((x.abs() + 1) @ torch.full((8, 8), 2.0**14)) * 2.0**-18  # noqa: E731
    advice = advice_of(Step(fault))
    where = line_of(fault)
    assert [(a.text, a.policy, a.result) for a in advice] == [
        ("lower the loss scale (the loss itself is not finite, which no scale mends)", None, DOES_NOT),
        ("keep fault in fp32", "fp16 module:fault=fp32", MENDS),
        (f"clamp the result of matmul in {where} to 65504: .clamp(-65504, 65504)", None, MENDS),
        ("compute in bf16", "bf16", MENDS),
        ("compute in fp32", "fp32", MENDS),
    ]


def test_a_cast_that_overflows_is_clamped_before_it():
    """The value is beyond fp16 in fp32 already, where the next product casts it."""
    advice = advice_of(Step(lambda x: (x.float() + 1e5) @ torch.eye(8) * 1e-5))
    assert result_of(advice, "clamp what goes into matmul") == MENDS
    assert result_of(advice, "keep fault in fp32") == MENDS


class Hot(nn.Module):
    """The gradient of what goes into ``hot`` is beyond fp16, and finite again after the product with 2^-13."""

    def __init__(self):
        super().__init__()
        torch.default_generator.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.hot, self.head = nn.Linear(8, 8, bias=False), nn.Linear(8, 1)
        with torch.no_grad():
            self.hot.weight.fill_(2.0**13)
            self.head.weight.fill_(1.0)

    def forward(self, x):
        return self.head(self.hot(self.body(x) * 2.0**-13))


@pytest.mark.parametrize("rule", ["", "module:hot=fp32 "])
def test_what_feeds_a_module_is_kept_in_fp32_where_the_module_alone_is_not_enough(rule):
    """In fp32 its gradient is finite, and beyond fp16 again where it is handed back."""
    advice = advice_of(Hot(), f"fp16 {rule}scale.init=1", loss=lambda m: (m(X).float() - 10).square().sum())
    rules = [(a.text, a.result) for a in advice if a.text.startswith("keep")]
    alone = [] if rule else [("keep hot in fp32", DOES_NOT)]
    assert rules == [*alone, (f"keep {'' if rule else 'hot and '}body.1 in fp32", MENDS)]


def test_who_makes_it_next_is_kept_in_fp32_as_well():
    """One part makes it, and where that is in fp32 its neighbour does."""
    hot = lambda x: ((x.abs() + 1) @ torch.full((8, 8), 2.0**14)) * 2.0**-18  # noqa: E731
    model = Step()
    model.fault = nn.Sequential(Calls(hot), Calls(hot))
    advice = advice_of(model)
    rules = [(a.text, a.result) for a in advice if a.text.startswith("keep")]
    assert rules == [("keep fault.0 in fp32", DOES_NOT), ("keep fault.0 and fault.1 in fp32", MENDS)]


def test_a_name_with_brackets_is_no_pattern():
    model = nn.Sequential()
    model.add_module("a[0]", Step(lambda x: ((x.abs() + 1) @ torch.full((8, 8), 2.0**14)) * 2.0**-18))
    advice = advice_of(model)
    assert result_of(advice, "keep a[0].fault in fp32") == MENDS
    (policy,) = [a.policy for a in advice if a.text == "keep a[0].fault in fp32"]
    assert policy == "fp16 module:a[[]0].fault=fp32"


def test_a_loss_function_is_widened_before_its_line():
    def loss(model):
        h = model(X) * 2.0**10
        return (h * h * 2.0**-20).mean()

    model = nn.Sequential(nn.Linear(8, 8))
    with torch.no_grad():
        model[0].weight.fill_(1.0)
    advice = advice_of(model, loss=loss)
    assert [a.text.partition(" in ")[0] for a in advice] == [
        "lower the loss scale (the loss itself is not finite, which no scale mends)",
        "compute mul",
        "keep 0",  # its fp32 output makes the loss fp32
        "clamp the result of mul",
        "compute",
        "compute",
    ]
    assert [a.result for a in advice] == [DOES_NOT] + [MENDS] * 5


def test_an_overflow_that_does_no_harm_yet_is_mended_where_its_line_makes_none():
    """A score beyond fp16 that the softmax turns into 1: loss and gradient stay finite."""
    fault = lambda x: (x @ torch.eye(8) * 2.0**8 * 2.0**9).tanh()  # noqa: E731
    model = Step(fault)
    producer = Producer("fault", "forward", "inf", "mul", "mul", __file__, fault.__code__.co_firstlineno)
    capture = Capture(model, lambda: mean(model), Policy("fp16"), scale=1.0)
    assert capture.run().is_finite
    advice = advise(capture, producer)
    assert result_of(advice, "keep fault in fp32") == MENDS
    assert result_of(advice, "compute in bf16") == MENDS
    assert result_of(advice, "lower the loss scale") == DOES_NOT
    assert not any("clamp" in a.text for a in advice)
    assert advise(capture, None) == ()


# --- backward ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("exponent", [3, 9])
def test_the_largest_scale_that_fits_is_proposed(exponent, kind):
    policy = "fp16" if kind == "dynamic" else "fp16 scale=static"
    model = Step(lambda x: x)
    with torch.no_grad():
        model.head.weight.fill_(1.0)
    # A scaled gradient of scale x 2^(16 - exponent) / 4 rows meets fp16's limit just below 2^16.
    loss = lambda m: mean(m, 2.0 ** (17 - exponent))  # noqa: E731
    advice = advice_of(model, policy, 2.0**16, loss)
    (found,) = [a for a in advice if a.text.startswith("lower the loss scale")]
    assert found.result == MENDS
    init = Policy.parse(found.policy).scale.init
    assert f"to {init:g}" in found.text
    assert ("by itself" in found.text) is (kind == "dynamic")
    run = {
        s: Capture(model, lambda: loss(model), Policy.parse(policy), scale=s).run().is_finite for s in (init, 2 * init)
    }
    assert run == {init: True, 2 * init: False}


def test_at_its_floor_a_scale_cannot_be_lowered():
    model = Step(lambda x: x)
    advice = advice_of(model, "fp16 scale.init=1", loss=lambda m: mean(m, 2.0**20))
    assert advice[0] == Advice("lower the loss scale (it is at its floor of 1)", None, DOES_NOT)
    assert advice[-1].result == MENDS


def test_at_a_large_scale_the_advice_is_for_what_still_fails_at_the_floor():
    """Under 2^16 the cast of the loss overflows first, which the scale mends; ``fault`` does at any scale."""
    model = Step(lambda x: (x @ torch.full((8, 8), 2.0**-13)) * 2.0**18)
    with torch.no_grad():
        model.head.weight.fill_(1.0)
    advice = advice_of(model, loss=lambda m: mean(m, 8.0))
    assert advice[0].text == "lower the loss scale, down to its floor of 1"
    assert advice[1].text == "keep fault in fp32"


@pytest.mark.parametrize("function", ["sqrt", "log", "rsqrt", "reciprocal"])
@pytest.mark.parametrize("policy", ["fp16", "bf16"])
def test_a_function_at_zero_is_kept_away_from_it(policy, function):
    """A product with 0 is 0 in fp32 as well: not the precision, and mended all the same."""
    fault = lambda x: getattr(torch, function)(x * 0) * 1e-3  # noqa: E731
    model = Step(fault)
    advice = advice_of(model, policy, scale=1.0)
    assert advice[0].text.startswith("Not the precision: fp32 fails as well at step 7: lower the learning rate or look")
    assert advice[0].result == NOT_TRIED
    assert advice[-1] == Advice("compute in fp32", "fp32", DOES_NOT)
    guard = f"keep the argument of {function} in {line_of(fault)} away from 0: .clamp_min(6.10352e-05)"
    assert result_of(advice, guard) == MENDS
    assert not any(a.text.startswith(("keep fault", "lower")) for a in advice)


def test_a_divisor_is_kept_away_from_zero():
    advice = advice_of(Step(lambda x: torch.ones_like(x) / (x * 0) * 1e-3), "fp16", 1.0)
    assert result_of(advice, "keep the divisor of div in") == MENDS


def test_a_small_eps_that_16_bit_loses_is_made_larger():
    """1e-12 is 0 in fp16, and the norm of a row of zeros is 0."""
    fault = lambda x: F.normalize((x * 0).half(), dim=1)  # noqa: E731
    with torch.autocast("cpu", enabled=False):
        advice = advice_of(Step(fault), "fp16", 1.0)
    guard = [a for a in advice if "eps" in a.text]
    assert [a.text for a in guard] == [f"give normalize in {line_of(fault)} a larger eps: eps=6.10352e-05"]
    assert guard[0].result == MENDS


def test_a_row_that_is_masked_out_wholly_is_named():
    def fault(x):
        mask = torch.zeros(8, 8, dtype=torch.bool)
        mask[3] = True
        return x @ (x.T @ x).masked_fill(mask, -math.inf).softmax(1).to(x.dtype)

    advice = advice_of(Step(fault))
    assert advice[0].text.startswith("Not the precision")
    assert result_of(advice, "leave something unmasked in each row of softmax in") == MENDS


# --- not the precision -----------------------------------------------------------------------------------------------


def test_a_batch_that_holds_it_is_a_matter_of_the_data():
    x = X.clone()
    x[1, 2] = math.nan
    advice = advice_of(Step(lambda x: x), loss=lambda m: m(x).float().mean())
    assert advice[0].text == "Not the precision: fp32 fails as well at step 7: look at the data, the batch holds nan"
    assert [a.result for a in advice] == [NOT_TRIED, DOES_NOT, DOES_NOT]


def test_a_weight_that_holds_it_is_a_matter_of_a_step_before():
    model = Step(lambda x: x)
    with torch.no_grad():
        model.stem.weight[0, 0] = math.inf
    capture = Capture(model, lambda: mean(model), Policy("fp16"), step=7)
    (first, *_) = advise(capture, capture.find_producer())
    assert first.text.endswith("step 7: go back to a checkpoint from before, stem.weight holds inf already")


def test_a_run_in_fp32_is_told_so():
    advice = advice_of(Step(lambda x: x.exp() * 1e30 * 1e30), "fp32")
    assert advice[0].text.startswith("Not the precision: fp32 fails as well")
    assert [a.policy for a in advice[1:]] == ["fp32"]


def test_a_good_micro_batch_needs_no_advice():
    assert advice_of(Step(lambda x: x), scale=256.0) == ()


# --- what cannot be tried --------------------------------------------------------------------------------------------


def test_a_format_that_the_device_lacks_is_not_tried_and_says_why():
    hot = Step(lambda x: ((x.abs() + 1) @ torch.full((8, 8), 2.0**14)) * 2.0**-18)
    capture = Capture(hot, lambda: mean(hot), Policy("fp16"))
    region = capture.region

    def refuse(policy):
        if policy.compute == "bf16":
            raise HalfstepError("policy bf16", "this card has no bf16", "Use fp16.")
        return region(policy)

    capture.region = refuse
    (found,) = [a for a in advise(capture, capture.find_producer()) if "bf16" in a.text]
    assert found == Advice("compute in bf16 (this card has no bf16)", "bf16", NOT_TRIED)


def test_code_that_does_not_run_in_another_format_is_not_tried_and_says_why():
    """A cast of the user's own ties the module to fp16."""
    fault = lambda x: (x.half() @ torch.full((8, 8), 2.0**14, dtype=torch.half)) * 2.0**-14  # noqa: E731
    model = Step(fault)
    model.head = nn.Linear(8, 1)
    advice = advice_of(model)
    for each in advice:
        if each.text.startswith("compute in fp32"):
            assert each.result == NOT_TRIED
            assert "it raised RuntimeError" in each.text


def test_a_call_that_is_not_met_again_is_not_tried():
    model = Step(lambda x: ((x.abs() + 1) @ torch.full((8, 8), 2.0**14)) * 2.0**-18)
    capture = Capture(model, lambda: mean(model), Policy("fp16"))
    producer = Producer("fault", "forward", "inf", "mm", "matmul", __file__, 1)
    (clamp,) = [a for a in advise(capture, producer) if "clamp" in a.text]
    assert clamp.result == NOT_TRIED
    assert clamp.text.endswith("(the call was not met again)")


def test_without_a_producer_what_needs_none_is_tried():
    model = Step(lambda x: ((x.abs() + 1) @ torch.full((8, 8), 2.0**14)) * 2.0**-18)
    advice = advise(Capture(model, lambda: mean(model), Policy("fp16")), None)
    assert [(a.policy, a.result) for a in advice] == [(None, DOES_NOT), ("bf16", MENDS), ("fp32", MENDS)]


@pytest.mark.parametrize(("enough", "result", "text"), [
    (1e-6, MENDS, "raise the eps of the optimizer to 1e-06"),
    (1.0, DOES_NOT, "raise the eps of the optimizer, up to 0.0001"),
    (None, NOT_TRIED, "raise the eps of the optimizer, to 1e-07 or more "
                      "(the optimizer's step cannot be repeated here)"),
])  # fmt: skip
def test_an_update_that_fails_gets_a_larger_eps(enough, result, text):
    model = Step(lambda x: x)
    producer = Producer("stem", "update", "nan")
    update = None if enough is None else lambda eps: eps >= enough
    assert advise(Capture(model, lambda: mean(model), Policy("fp16")), producer, update) == (
        Advice(text, None, result),
    )


# --- edits ---------------------------------------------------------------------------------------------------------


def test_a_call_that_works_in_place_is_edited_in_place():
    """Nobody may look at what it returns."""
    values = torch.tensor([0.0, 4.0])
    assert away_from_zero(0, 0.25)(torch.Tensor.sqrt_, (values,), {}) is values
    assert torch.equal(values, torch.tensor([0.5, 2.0]))
    assert clamped(1.0)(torch.Tensor.mul_, (values, -3.0), {}) is values
    assert torch.equal(values, torch.tensor([-1.0, -1.0]))
    half = torch.tensor([300.0]).half()
    assert in_fp32("cpu")(torch.Tensor.mul_, (half, 200.0), {}) is half
    assert half.item() == 60000.0
    assert clamped(2.0, goes_in=True)(torch.Tensor.mul_, (half, 3.0), {}) is half
    assert half.item() == 6.0


def test_a_call_in_fp32_is_not_cast_by_autocast():
    with torch.autocast("cpu", dtype=torch.float16):
        assert in_fp32("cpu")(torch.mm, (X.half(), X.T), {}).dtype == torch.float32


def test_only_the_call_of_the_module_is_edited_where_several_share_a_line():
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])
    line = inspect.currentframe().f_lineno + 3
    edit = Intervention(model, Producer("1", "forward", "inf", "addmm", "linear", __file__, line), clamped(0.0))
    with edit:
        model(X)
    assert edit.num_changed == 1
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model)


def test_what_is_kept_away_from_zero_keeps_its_sign():
    values = torch.tensor([0.0, -0.0, 1e-9, -1e-9, 2.0, -2.0])
    moved = away_from_zero(1, 0.5)(torch.div, (torch.ones(6), values), {})
    assert torch.equal(moved, 1 / torch.tensor([0.5, 0.5, 0.5, -0.5, 2.0, -2.0]))


# --- the pieces ----------------------------------------------------------------------------------------------------


def test_policies_are_tried_until_enough_of_them_mend_it():
    tried = []

    def good(policy):
        tried.append(policy.compute)
        return policy.compute == "bf16"

    proposals = [(name, Policy(name)) for name in ("fp16", "bf16", "fp32")]
    assert [a.result for a in try_policies(proposals, good)] == [DOES_NOT, MENDS, NOT_TRIED]
    assert tried == ["fp16", "bf16"]
    assert [a.result for a in try_policies(proposals, good, limit=2)] == [DOES_NOT, MENDS, DOES_NOT]


def test_the_table_shows_each_mark_in_its_tone():
    advice = [Advice("a", "bf16", MENDS), Advice("b", None, DOES_NOT), Advice("c", None, NOT_TRIED)]
    rows = advice_table(advice).rows
    assert [(row[0], row[1], row[2].text, row[2].tone) for row in rows] == [
        ("a", "bf16", "mends it", "good"),
        ("b", "-", "does not", "bad"),
        ("c", "-", "not tried", "open"),
    ]
    assert advice[0].to_dict() == {"text": "a", "policy": "bf16", "result": "mends it"}
