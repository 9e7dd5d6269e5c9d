"""Module rules: who computes in which format, and what a ruled model can still do."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import io
import itertools
import pickle
import weakref

import pytest
import torch
import torch.nn.functional as F
from reference.nets import AMX, BF16, CPU, FP16, FULL, NAMES, Net, Seen, outputs, run
from torch import nn

from halfstep.errors import HalfstepError
from halfstep.policy import Policy
from halfstep.region import Region

pytestmark = pytest.mark.usefixtures("kernels_stay")


# ---- formats of modules

RULES = [
    ("bf16", [BF16] * 6),
    ("fp16", [FP16] * 6),
    ("fp32", [FULL] * 6),
    ("bf16 module:head=fp32", [BF16] * 5 + [FULL]),
    ("bf16 module:head=fp16", [BF16] * 5 + [FP16]),
    ("fp32 module:head=bf16", [FULL] * 5 + [BF16]),
    ("fp32 module:head=bf16 module:stem=fp16", [FP16, *[FULL] * 4, BF16]),
    ("bf16 module:blocks.0=fp32", [BF16, FULL, FULL, BF16, BF16, BF16]),
    ("bf16 module:blocks.*=fp32", [BF16, FULL, FULL, FULL, FULL, BF16]),
    ("bf16 module:*.1=fp32", [BF16, BF16, FULL, FULL, FULL, BF16]),
    ("bf16 module:blocks.?.0=fp32", [BF16, FULL, BF16, FULL, BF16, BF16]),
    ("bf16 module:blocks.[!0].0=fp32", [BF16, BF16, BF16, FULL, BF16, BF16]),
    # The innermost module decides, whatever the order of the rules.
    ("bf16 module:blocks.0=fp32 module:blocks.0.1=fp16", [BF16, FULL, FP16, BF16, BF16, BF16]),
    ("bf16 module:blocks.0.1=fp16 module:blocks.0=fp32", [BF16, FULL, FP16, BF16, BF16, BF16]),
    ("bf16 module:blocks.0=fp16 module:blocks.0.1=bf16", [BF16, FP16, BF16, BF16, BF16, BF16]),
    # A 16-bit part hands its result on in fp32 where the module around it computes in fp32.
    ("bf16 module:blocks.0=fp32 module:blocks.0.1.linear=fp16", [BF16, FULL, FULL, BF16, BF16, BF16]),
    # Of two rules for one module the later one decides.
    ("bf16 module:head=fp16 module:head=fp32", [BF16] * 5 + [FULL]),
    ("bf16 module:*=fp32 module:head*=fp16", [FULL] * 5 + [FP16]),
    ("bf16 module:head*=fp16 module:*=fp32", [FULL] * 6),
    # head.linear is inside head, and its own rule says fp32.
    ("bf16 module:*=fp32 module:head=fp16", [FULL] * 6),
    ("bf16 module:blocks.?=fp32 module:blocks.?.0=fp16", [BF16, FP16, FULL, FP16, FULL, BF16]),
]


@pytest.mark.parametrize("hardware", [CPU, AMX], ids=["emulated", "native"])
@pytest.mark.parametrize(("policy", "expected"), RULES, ids=[policy for policy, _ in RULES])
def test_module_rules(policy, expected, hardware):
    assert run(Net(), policy, hardware) == expected


@pytest.mark.parametrize("pattern", ["hed", "Head", "blocks.2", "*.2", "head.*.x", "linear"])
def test_a_pattern_that_matches_nothing_is_refused_with_names(pattern):
    with pytest.raises(HalfstepError) as caught:
        Region(Net(), f"bf16 module:head=fp32 module:{pattern}=fp32", CPU)
    assert caught.value.what == f"module rule {pattern!r}"
    assert "such as stem, stem.linear, blocks" in caught.value.fix
    for name in caught.value.fix.removesuffix(".").partition("such as ")[2].split(", "):
        Region(Net(), f"bf16 module:{name}=fp32", CPU)


def test_a_refused_rule_leaves_the_model_as_it_was():
    model = Net()
    with pytest.raises(HalfstepError, match="hed"):
        Region(model, "bf16 module:head=fp32 module:hed=fp32", CPU)
    assert "forward" not in model.head.__dict__


def test_a_model_without_parts_has_no_module_to_rule():
    with pytest.raises(HalfstepError, match="none, it has no parts"):
        Region(nn.Linear(4, 4), "bf16 module:head=fp32", CPU)


def test_an_fp32_module_sees_fp32_in_arguments_keywords_and_nests():
    class Deep(nn.Module):
        def forward(self, x, pair, *rest, table, **more):
            return [x, *pair, *rest, *table.values(), *more.values()]

    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.deep = Deep()

        def forward(self, x):
            return self.deep(
                x.bfloat16(),
                (x.half(), [x.bfloat16()]),
                x.double(),
                x.int(),
                None,
                table={"a": x.bfloat16()},
                more=x.bool(),
                text="t",
            )

    model = Holder()
    region = Region(model, "bf16 module:deep=fp32", CPU)
    with region:
        x, a, (b,), double, whole, none, c, boolean, text = model(torch.randn(3))
    assert [t.dtype for t in (x, a, b, c)] == [FULL] * 4
    # What is no 16-bit number is not touched.
    assert [t.dtype for t in (double, whole, boolean)] == [torch.float64, torch.int32, torch.bool]
    assert (none, text) == (None, "t")


def test_an_fp32_module_computes_what_fp32_computes_and_its_gradient_flows_on():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    x = torch.randn(2, 4)
    region = Region(model, "bf16 module:1=fp32", CPU)
    with region:
        low = F.linear(x, model[0].weight, model[0].bias)
        result = model(x)
    assert torch.equal(result, F.linear(low.float(), model[1].weight, model[1].bias))
    with region.backward():
        result.sum().backward()
    assert all(p.grad.dtype == FULL and p.grad.abs().sum() > 0 for p in model.parameters())


def test_a_16_bit_module_in_an_fp32_region_computes_what_that_region_would():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(2, 4)
    ruled, low = Region(model, "fp32 module:0=bf16", CPU), Region(model, "bf16", CPU)
    with low:
        expected = model[0](x)
    with ruled:
        result = model(x)
        # What follows it computes in fp32 and could not take 16 bit.
        assert model[0](x).dtype == FULL
        assert torch.equal(model[0](x), expected.float())
    assert torch.equal(result, model[1](expected.float()))
    with ruled.backward():
        result.sum().backward()
    assert all(parameter.grad.dtype == FULL for parameter in model.parameters())


def test_rules_act_in_their_own_region_alone():
    model, x = Net(), torch.randn(2, 4)
    region = Region(model, "bf16 module:head=fp32", CPU)
    model(x)
    assert outputs(model)["head"] == FULL
    with torch.autocast("cpu", BF16):
        model(x)
    assert outputs(model)["head"] == BF16
    with Region(nn.Linear(1, 1), "bf16", CPU):
        model(x)
    assert outputs(model)["head"] == BF16
    with region:
        model(x)
    assert outputs(model)["head"] == FULL


def test_two_regions_with_other_rules_on_one_model_do_not_disturb_each_other():
    model, x = Net(), torch.randn(2, 4)
    first = Region(model, "bf16 module:head=fp32 module:stem=fp16", CPU)
    second = Region(model, "fp16 module:head=bf16", CPU)
    for region, expected in ((first, [FP16, BF16, FULL]), (second, [FP16, FP16, BF16])) * 2:
        with region:
            model(x)
        seen = outputs(model)
        assert [seen["stem"], seen["blocks.0.0"], seen["head"]] == expected
    with first, second:
        model(x)
        assert outputs(model)["head"] == BF16
    with second:
        with first:
            model(x)
            assert outputs(model)["head"] == FULL
        model(x)
        assert outputs(model)["head"] == BF16


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_regions_come_and_go_in_any_order_and_leave_no_trace(order):
    model, x = Net(), torch.randn(2, 4)
    formats = ["fp32", "fp16", "bf16"]
    regions = {i: Region(model, f"bf16 module:head={format}", CPU) for i, format in enumerate(formats)}
    for gone in order:
        for i, region in regions.items():
            with region:
                model(x)
            assert outputs(model)["head"] == [FULL, FP16, BF16][i]
        region = None
        del regions[gone]
    assert "forward" not in model.head.__dict__


def test_making_a_region_again_and_again_does_not_pile_up_wrappers():
    model, x = Net(), torch.randn(2, 4)
    region = Region(model, "bf16 module:head=fp32", CPU)
    for _ in range(50):
        region = Region(model, "bf16 module:head=fp32", CPU)  # made before the one before is gone
    assert len(model.head.forward.rules) == 1
    with region:
        assert len(inspect.stack()) < 100
        model(x)
    assert outputs(model)["head"] == FULL
    del region
    assert "forward" not in model.head.__dict__


def test_a_region_is_collected_with_its_model_still_there_and_the_other_way_round():
    model = Net()
    region = Region(model, "bf16 module:head=fp32", CPU)
    seen = weakref.ref(region)
    del region
    assert seen() is None
    assert "forward" not in model.head.__dict__
    region = Region(model, "bf16 module:head=fp32", CPU)
    seen = weakref.ref(model)
    del region, model
    gc.collect()
    assert seen() is None


def test_a_model_that_refers_to_its_own_region_is_collected():
    model = Net()
    model.head.region = Region(model, "bf16 module:head=fp32", CPU)
    seen = weakref.ref(model)
    del model
    gc.collect()
    assert seen() is None


# ---- what a ruled model can still do


def test_state_dict_and_training_mode_are_unaffected():
    model = Net()
    before = model.state_dict()
    region = Region(model, "bf16 module:head=fp32 module:blocks.*=fp16", CPU)
    assert list(model.state_dict()) == list(before)
    Net().load_state_dict(model.state_dict())
    assert [name for name, _ in model.named_modules()] == [name for name, _ in Net().named_modules()]
    model.train().eval().double().float().requires_grad_(False)
    assert region.policy.modules


def test_a_ruled_model_can_be_pickled():
    model, x = Net(), torch.randn(2, 4)
    region = Region(model, "bf16 module:head=fp32", CPU)
    again = pickle.loads(pickle.dumps(model))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (again, torch.load(file, weights_only=False)):
        assert torch.equal(other(x), model(x))
        with region:
            other(x)
            # It has left its region: it does what any model does there.
            assert outputs(other)["head"] == BF16
        with Region(other, "bf16 module:head=fp32", CPU):
            other(x)
            assert outputs(other)["head"] == FULL


def test_a_deep_copy_follows_the_same_rules_with_its_own_weights():
    model, x = Net(), torch.randn(2, 4)
    region = Region(model, "bf16 module:head=fp32", CPU)
    region.promote("stem")
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert other(x).abs().max() == 0
    with region:
        assert other(x).abs().max() == 0
        assert [outputs(other)[name] for name in ("stem", "blocks.0.0", "head")] == [FULL, BF16, FULL]
        assert model(x).abs().max() > 0
    own = Region(other, "bf16 module:head=fp16", CPU)
    with own:
        assert other(x).abs().max() == 0
        assert outputs(other)["head"] == FP16
        model(x)
        assert outputs(model)["head"] == BF16
    del region, own
    assert "forward" not in model.head.__dict__
    assert other(x).abs().max() == 0


def test_the_copy_of_a_model_of_two_regions_is_its_own_too():
    model, x = Net(), torch.randn(2, 4)
    regions = [Region(model, "bf16 module:head=fp32", CPU), Region(model, "fp16 module:head=fp32", CPU)]
    other = copy.deepcopy(copy.deepcopy(model))
    with torch.no_grad():
        other.head.linear.weight.zero_()
        other.head.linear.bias.zero_()
    for region in regions:
        with region:
            assert other(x).abs().max() == 0
            assert outputs(other)["head"] == FULL


def own_forward(log, inner):
    @functools.wraps(inner)
    def forward(*args, **kwargs):
        log.append("own")
        return inner(*args, **kwargs)

    return forward


def test_a_forward_of_the_instance_is_kept_and_put_back():
    model, x, log = Net(), torch.randn(2, 4), []
    mine = model.head.forward = own_forward(log, model.head.forward)
    region = Region(model, "bf16 module:head=fp32", CPU)
    with region:
        model(x)
    assert log == ["own"]
    assert outputs(model)["head"] == FULL
    del region
    assert model.head.forward is mine


def test_a_method_bound_to_the_instance_is_rebound_in_a_copy():
    def double(self, x):
        return 2 * self.linear(x)

    model, x = Net(), torch.randn(2, 4)
    model.head.forward = double.__get__(model.head)
    region = Region(model, "bf16 module:head=fp32", CPU)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.head.linear.weight.zero_()
        other.head.linear.bias.zero_()
    with region:
        assert other(x).abs().max() == 0
        assert model(x).abs().max() > 0


def test_a_forward_wrapped_after_us_is_not_taken_away():
    # functools.wraps copies the marks on our wrapper to the other's.
    model, x, log = Net(), torch.randn(2, 4), []
    first = Region(model, "bf16 module:head=fp32", CPU)
    mine = model.head.forward = own_forward(log, model.head.forward)
    second = Region(model, "bf16 module:head=fp16", CPU)
    for region, expected in ((first, FULL), (second, FP16)):
        with region:
            model(x)
        assert outputs(model)["head"] == expected
    del region, second
    assert model.head.forward is mine
    del first
    assert model.head.forward is mine
    model(x)
    assert log == ["own"] * 3


def test_hooks_and_direct_calls_see_the_rule():
    model, x = Net(), torch.randn(2, 4)
    region = Region(model, "bf16 module:head=fp32", CPU)
    dtypes = []
    model.head.register_forward_hook(lambda module, args, output: dtypes.append(output.dtype))
    with region:
        model(x)
        assert model.head.forward(x).dtype == FULL
    assert dtypes == [FULL]


def test_a_shared_module_follows_the_rule_of_either_name():
    model = nn.Sequential(nn.Linear(4, 4))
    model.append(model[0])
    region = Region(model, "bf16 module:0=fp32", CPU)
    with region:
        assert model(torch.randn(2, 4)).dtype == FULL


def test_weights_shared_between_formats():
    # Autocast's cache holds one cast for a weight, whatever its format.
    for policy, expected in (
        ("bf16 module:1=fp16", [BF16, FP16, BF16]),
        ("fp32 module:0=bf16 module:1=fp16 module:2=bf16", [BF16, FP16, BF16]),
        ("fp16 module:1=fp32", [FP16, FULL, FP16]),
    ):
        model = nn.Sequential(*[Seen() for _ in range(3)])
        for layer in model[1:]:
            layer.linear.weight = model[0].linear.weight
        region = Region(model, policy, AMX)
        with region:
            result = model(torch.randn(2, 4))
        assert [layer.last[1] for layer in model] == expected
        result.sum().backward()
        assert model[0].linear.weight.grad.abs().sum() > 0


def test_promote_is_one_more_rule():
    model, x = Net(), torch.randn(2, 4)
    region = Region(model, "bf16 module:head=fp16", CPU)
    region.promote("head")
    region.promote("blocks.1")
    with region:
        model(x)
    assert [outputs(model)[name] for name in NAMES] == [BF16] * 3 + [FULL] * 3
    assert str(region.policy) == "bf16 module:head=fp32 module:blocks.1=fp32"
    assert region.info.effective == str(region.policy)
    assert region.info.requested == "bf16 module:head=fp16"
    assert "head was promoted to fp32" in region.info.reason
    assert "blocks.1 was promoted to fp32" in region.info.reason
    with pytest.raises(HalfstepError, match="module rule 'nothing'"):
        region.promote("nothing")
    assert str(region.policy) == region.info.effective == "bf16 module:head=fp32 module:blocks.1=fp32"
    del region
    assert "forward" not in model.head.__dict__
    assert "forward" not in model.blocks[1].__dict__


def test_promote_takes_a_name_and_no_pattern():
    model = nn.ModuleDict({"a[0]": Seen(), "a0": Seen()})
    region = Region(model, "bf16", CPU)
    region.promote("a[0]")
    with region:
        for part in model.values():
            part(torch.randn(2, 4))
    assert [part.last[1] for part in model.values()] == [FULL, BF16]
    assert Policy.parse(str(region.policy)) == region.policy
