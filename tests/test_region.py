"""The region: formats of modules, what stays as it was, held casts, checkpointing, and regions side by side."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import inspect
import io
import itertools
import pickle
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from halfstep import cpu16, oplist
from halfstep import region as region_module
from halfstep.errors import HalfstepError
from halfstep.hardware import Hardware
from halfstep.policy import Policy
from halfstep.region import Region, device_of

CPU = Hardware.of("cpu", "plain CPU")
AMX = Hardware.of("cpu", "CPU with AMX", features=["amx_bf16", "amx_fp16"])
LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}
BF16, FP16, FULL = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(scope="module", autouse=True)
def _kernels_stay():
    """One region that lives as long as the file, so that not every test lays the CPU's kernels anew."""
    return Region(nn.Linear(1, 1), "bf16", CPU)


@pytest.fixture(autouse=True)
def _nothing_is_held():
    """A test that leaves autocast's nesting count above zero would leave stale casts to the next one."""
    yield
    assert nesting() == 0


def nesting():
    """How many autocast regions are open."""
    count = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return count


def autocast_state():
    return (
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
        nesting(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        oplist.active,
        cpu16.active,
        list(region_module._opened),
    )


class Seen(nn.Module):
    """A linear layer that notes the formats it sees and gives."""

    def __init__(self, width=4):
        super().__init__()
        self.linear, self.formats = nn.Linear(width, width), []

    def forward(self, x, scale=None):
        y = self.linear(x)
        self.formats.append((x.dtype, y.dtype, None if scale is None else scale.dtype))
        return y

    @property
    def last(self):
        return self.formats[-1][:2]


class Net(nn.Module):
    """A stem, two blocks of two parts each, and a head."""

    def __init__(self):
        super().__init__()
        self.stem = Seen()
        self.blocks = nn.ModuleList(nn.Sequential(Seen(), Seen()) for _ in range(2))
        self.head = Seen()

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def outputs(model):
    """The format that each layer gave the last time."""
    return {name: module.last[1] for name, module in model.named_modules() if isinstance(module, Seen)}


NAMES = ["stem", "blocks.0.0", "blocks.0.1", "blocks.1.0", "blocks.1.1", "head"]


def run(model, policy, hardware=CPU):
    region = Region(model, policy, hardware)
    with region:
        model(torch.randn(2, 4))
    return [outputs(model)[name] for name in NAMES]


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


# ---- what opening leaves behind


class Broken(nn.Module):
    def __init__(self, where):
        super().__init__()
        self.where = where

    def forward(self, x):
        if self.where == "forward":
            raise KeyboardInterrupt
        return Fails.apply(x) if self.where == "backward" else x


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise KeyboardInterrupt


OUTER = {
    "plain": contextlib.nullcontext,
    "autocast fp16": lambda: torch.autocast("cpu", FP16),
    "autocast without cache": lambda: torch.autocast("cpu", BF16, cache_enabled=False),
    "autocast off": lambda: torch.autocast("cpu", enabled=False),
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "region": lambda: Region(nn.Linear(1, 1), "fp16 op:exp=fp16", CPU),
    "fp32 region": lambda: Region(nn.Linear(1, 1), "fp32", CPU),
    "backward of a region": lambda: Region(nn.Linear(1, 1), "bf16", CPU).backward(),
}
INNER = {"region": lambda region: region, "backward": Region.backward, "inference": Region.inference}


@pytest.mark.parametrize("policy", ["bf16 op:exp=bf16", "fp16 module:0=fp32", "fp32"])
@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("outer", OUTER)
def test_every_state_is_what_it_was(outer, inner, policy):
    model = nn.Sequential(nn.Linear(4, 4), Broken("forward"))
    region = Region(model, policy, CPU)
    outermost = autocast_state()
    with OUTER[outer]():
        before = autocast_state()
        with INNER[inner](region):
            model[0](torch.randn(2, 4))
        assert autocast_state() == before
        with pytest.raises(KeyboardInterrupt), INNER[inner](region):
            model(torch.randn(2, 4))
        assert autocast_state() == before
        with pytest.raises(ZeroDivisionError), INNER[inner](region), INNER[inner](region):
            1 / 0  # noqa: B018
        assert autocast_state() == before
    assert autocast_state() == outermost


def test_an_exception_inside_a_ruled_module_restores_everything():
    model = nn.Sequential(nn.Linear(4, 4), Broken("forward"))
    region = Region(model, "bf16 module:1=fp32", CPU)
    with region:
        inside = autocast_state()
        with pytest.raises(KeyboardInterrupt):
            model(torch.randn(2, 4))
        assert autocast_state() == inside


def test_an_exception_in_the_backward_pass_restores_everything():
    model = nn.Sequential(nn.Linear(4, 4), Broken("backward"))
    region, before = Region(model, "bf16 op:exp=bf16", CPU), autocast_state()
    with region:
        loss = model(torch.randn(2, 4)).sum()
    with pytest.raises(KeyboardInterrupt), region.backward():
        loss.backward()
    assert autocast_state() == before


@pytest.mark.parametrize("order", list(itertools.permutations(["bf16", "fp16", "fp32"])), ids=str)
def test_nested_regions_compute_in_the_innermost_format(order):
    formats = {"bf16": BF16, "fp16": FP16, "fp32": FULL}
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    regions = [Region(model, policy, AMX) for policy in order]

    def descend(depth):
        if depth == 3:
            return
        with regions[depth]:
            assert model(x).dtype == formats[order[depth]]
            descend(depth + 1)
            # Back out, the weights that the inner region cast to its format are not taken for ours.
            assert model(x).dtype == formats[order[depth]]

    descend(0)


def test_one_region_inside_itself():
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    region = Region(model, "bf16", CPU)
    with region:
        with region, region:
            assert model(x).dtype == BF16
        assert model(x).dtype == BF16
    assert model(x).dtype == FULL


def test_a_region_inside_plain_autocast_and_around_it():
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    region = Region(model, "fp16", AMX)
    with torch.autocast("cpu", BF16):
        assert model(x).dtype == BF16
        with region:
            assert model(x).dtype == FP16
            with torch.autocast("cpu", enabled=False):
                assert model(x).dtype == FULL
        assert model(x).dtype == BF16


@pytest.mark.parametrize("policy", ["fp32", "fp32 op:linear=fp32"])
def test_an_fp32_region_inside_plain_autocast_computes_fp32(policy):
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    region, expected = Region(model, policy, CPU), model(x)
    with torch.autocast("cpu", BF16):
        with region:
            assert torch.equal(model(x), expected)
        with region.inference():
            assert torch.equal(model(x), expected)
        assert model(x).dtype == BF16


@pytest.mark.parametrize("policy", ["bf16", "fp16"])
def test_training_without_a_gpu_is_what_it_is_with_native_instructions(policy):
    # The same formats at every operation; the values differ by the order of fp32 sums.
    results = []
    for hardware in (CPU, AMX):
        torch.manual_seed(0)
        model = Net()
        region = Region(model, policy, hardware)
        with region:
            loss = model(torch.randn(8, 4)).float().pow(2).mean()
        with region.backward():
            loss.backward()
        results.append([loss.detach(), *[p.grad for p in model.parameters()]])
    for a, b in zip(*results, strict=True):
        # Six layers, each with one rounding on the way there and one back.
        assert (a - b).abs().max() <= 12 * torch.finfo(LOW[policy]).eps * max(a.abs().max(), 1e-2)


def test_cpu16_runs_where_it_is_needed_and_nowhere_else(monkeypatch):
    calls = []
    own = cpu16._widen
    monkeypatch.setattr(cpu16, "_widen", lambda value: calls.append(1) or own(value))
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    for policy, hardware, runs in (("bf16", CPU, True), ("bf16", AMX, False), ("fp32", CPU, False)):
        calls.clear()
        region = Region(model, policy, hardware)
        with region:
            loss = model(x).sum()
        assert bool(calls) == runs
        calls.clear()
        with region.backward():
            loss.backward()
        assert bool(calls) == runs
        assert ("cpu16" in region.info.reason) == runs


def test_what_a_region_tells_of_itself():
    region = Region(nn.Linear(4, 4), "auto", CPU)
    assert (region.info.requested, region.info.effective) == ("auto", "fp32")
    assert region.info.device == "plain CPU"
    assert region.info.versions == {"torch": torch.__version__}
    region = Region(nn.Linear(4, 4), Policy.parse("bf16 op:exp=fp32"), CPU)
    assert region.info.requested == region.info.effective == "bf16 op:exp=fp32"
    assert region.device == torch.device("cpu")
    with pytest.raises(HalfstepError, match="cannot compute tf32"):
        Region(nn.Linear(4, 4), "tf32", CPU)


# ---- inference


def test_inference_is_inference_mode_in_the_formats_of_the_policy():
    model, x = Net(), torch.randn(2, 4)
    region = Region(model, "bf16 module:head=fp32", CPU)
    with region.inference():
        assert torch.is_inference_mode_enabled()
        result = model(x)
        assert result.is_inference()
        assert not result.requires_grad
    assert [outputs(model)[name] for name in ("stem", "head")] == [BF16, FULL]
    with region:
        assert torch.equal(model(x), result)
    with torch.inference_mode():
        with region.inference():
            assert torch.equal(model(x), result)
        with region:
            assert torch.equal(model(x), result)


def gradients(model, region, x):
    model.zero_grad()
    with region:
        loss = model(x).float().pow(2).sum()
    with region.backward():
        loss.backward()
    return [p.grad for p in model.parameters()]


def equal(a, b):
    return len(a) == len(b) and all(x is not None and torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("evaluate", [Region.inference, None], ids=["inference", "no_grad"])
def test_inference_inside_an_open_region_does_not_poison_its_gradients(evaluate):
    model, x = Net(), torch.randn(2, 4)
    region = Region(model, "bf16", CPU)
    expected = gradients(model, region, x)
    model.zero_grad()
    with region:
        with evaluate(region) if evaluate else torch.no_grad():
            model(x)
        loss = model(x).float().pow(2).sum()
    with region.backward():
        loss.backward()
    assert equal([p.grad for p in model.parameters()], expected)


# ---- held casts


class CountCasts(TorchDispatchMode):
    """Counts how often each shape is cast to 16 bit."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, function, kinds, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is torch.ops.aten._to_copy.default and kwargs.get("dtype") in (BF16, FP16):
            self.shapes.append(tuple(args[0].shape))
        return function(*args, **kwargs)


def window(model, region, hold, between=lambda i: None):
    """The gradients of a window of four micro-batches."""
    model.zero_grad()
    for i in range(4):
        if hold:
            region.hold()
        with region:
            loss = model(torch.full((2, 4), 0.1 * i)).float().pow(2).sum()
        with region.backward():
            loss.backward()
        between(i)
    region.release()
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def counted_window(model, region, hold):
    """The same, and how often it cast a weight of shape (6, 4)."""
    with CountCasts() as count:
        gradients = window(model, region, hold)
    return gradients, count.shapes.count((6, 4))


@pytest.mark.parametrize("hardware", [CPU, AMX], ids=["emulated", "native"])
@pytest.mark.parametrize("policy", ["bf16", "fp16"])
def test_a_held_window_casts_each_weight_once_and_gives_the_same_gradients(policy, hardware):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    region = Region(model, policy, hardware)
    each, num_casts = counted_window(model, region, hold=False)
    assert num_casts == 4
    held, num_casts = counted_window(model, region, hold=True)
    assert num_casts == 1
    assert equal(held, each)
    # Released: the next window casts anew.
    with torch.no_grad():
        model[0].weight.mul_(2)
    held, num_casts = counted_window(model, region, hold=True)
    assert num_casts == 1
    assert equal(held, window(model, region, hold=False))


def test_a_weight_used_twice_is_cast_once_a_region():
    model = nn.Linear(4, 6)
    region = Region(model, "bf16", CPU)
    with CountCasts() as count, region:
        model(torch.randn(2, 4))
        model(torch.randn(2, 4))
    assert count.shapes.count((6, 4)) == 1


def test_hold_and_release_can_be_repeated():
    model = nn.Linear(4, 6)
    region = Region(model, "bf16", CPU)
    num_hooks = len(_global_optimizer_post_hooks)
    for _ in range(3):
        region.hold()
    assert nesting() == 1
    region.release()
    region.release()
    assert nesting() == 0
    assert len(_global_optimizer_post_hooks) == num_hooks
    Region(model, "fp32", CPU).hold()
    assert nesting() == 0


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model[0].weight.mul_(2),
        lambda model: model[2].bias.add_(1),
        lambda model: model.load_state_dict({k: 2 * v for k, v in model.state_dict().items()}),
        lambda model: nn.init.ones_(model[0].weight),
        lambda model: torch._foreach_mul_(list(model.parameters()), 2),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.5).step(),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.5, fused=True).step(),
        lambda model: torch.optim.AdamW(model.parameters(), lr=0.5, fused=True).step(),
        lambda model: setattr(model[0], "weight", nn.Parameter(2 * model[0].weight)),
    ],
    ids=["mul_", "bias", "load_state_dict", "init", "foreach", "sgd", "fused sgd", "fused adamw", "a new parameter"],
)
def test_a_weight_changed_between_micro_batches_is_seen(change):
    results = []
    for hold in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
        region = Region(model, "bf16", CPU)

        def between(i, model=model):
            with torch.no_grad():
                if i == 1:
                    change(model)

        results.append(window(model, region, hold, between=between))
    assert equal(*results)


@pytest.mark.parametrize("policy", ["bf16", "bf16 module:0=fp16", "bf16 module:2=fp32"])
def test_evaluation_in_the_middle_of_a_held_window_does_not_poison_it(policy):
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    region = Region(model, policy, AMX)
    x = torch.randn(2, 4)

    def evaluate(i):
        with region.inference():
            model(x)
        with torch.no_grad(), region:
            model(x)

    def first(i):
        # Before the first cast of the window.
        with region.inference():
            model(x)

    expected = window(model, region, hold=False)
    assert equal(window(model, region, hold=True, between=evaluate), expected)
    region.hold()
    first(0)
    assert equal(window(model, region, hold=True), expected)


def test_evaluation_in_a_held_window_sees_the_weights_of_now():
    model, x = nn.Linear(4, 6), torch.randn(2, 4)
    region = Region(model, "bf16", CPU)
    region.hold()
    with region:
        before = model(x)
    with torch.no_grad():
        model.weight.zero_()
        model.bias.fill_(3.0)
    with region.inference():
        assert (model(x) == 3).all()
    assert not (before == 3).all()
    region.release()


def test_dropping_a_region_that_holds_drops_the_hold():
    model, x = nn.Linear(4, 6), torch.randn(2, 4)
    region = Region(model, "bf16", CPU)
    region.hold()
    with region:
        model(x)
    assert nesting() == 1
    del region
    assert nesting() == 0
    with torch.no_grad():
        model.weight.zero_()
        model.bias.zero_()
    with torch.autocast("cpu", BF16):
        assert model(x).abs().max() == 0


def step(model, region, x, lr=0.5):
    for p, grad in zip(model.parameters(), gradients(model, region, x), strict=True):
        p.data.sub_(0)  # .data is not how to change a weight, and changes nothing here
        with torch.no_grad():
            p.sub_(lr * grad)


@pytest.mark.parametrize("holds", [(True, False), (False, True), (True, True), (False, False)], ids=str)
def test_two_models_whose_windows_overlap_train_as_they_would_alone(holds):
    # As in a GAN: the window of one is open while the other steps.
    x = torch.randn(2, 4)
    results = []
    for together in (True, False):
        torch.manual_seed(0)
        models = [nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)) for _ in range(2)]
        regions = [Region(model, "bf16", CPU) for model in models]
        for i in range(12):
            for j, (model, region, hold) in enumerate(zip(models, regions, holds, strict=True)):
                if together and hold:
                    region.hold()
                step(model, region, x * (i + j))
                # Windows of three and of four.
                if i % (3 + j) == 2:
                    region.release()
        results.append([p.detach().clone() for model in models for p in model.parameters()])
        for region in regions:
            region.release()
    assert equal(*results)


def test_a_window_that_begins_in_anothers_uses_no_casts_of_its_window_before():
    model, other, x = nn.Linear(4, 6), nn.Linear(4, 6), torch.randn(2, 4)
    region, holder = Region(model, "bf16", CPU), Region(other, "bf16", CPU)
    region.hold()
    with region:
        model(x)
    holder.hold()
    region.release()
    with torch.no_grad():
        model.weight.zero_()
        model.bias.zero_()
    region.hold()
    holder.release()
    with region:
        assert model(x).abs().max() == 0
    region.release()


def test_another_model_stepped_inside_a_held_window_is_seen():
    model, critic, x = nn.Linear(4, 6), nn.Linear(4, 6), torch.randn(2, 4)
    region, critics = Region(model, "bf16", CPU), Region(critic, "bf16", CPU)
    region.hold()
    for _ in range(2):
        with region:
            model(x)
        with critics:
            before = critic(x)
        with torch.no_grad():
            critic.weight.mul_(2)
            critic.bias.mul_(2)
        with critics:
            assert torch.equal(critic(x), 2 * before)
    region.release()


def test_a_region_of_another_format_inside_a_held_window():
    model, x = nn.Linear(4, 6), torch.randn(2, 4)
    bf16, fp16 = Region(model, "bf16", AMX), Region(model, "fp16", AMX)
    bf16.hold()
    for _ in range(2):
        bf16.hold()
        with bf16:
            assert model(x).dtype == BF16
        with fp16:
            assert model(x).dtype == FP16
        with fp16.inference():
            assert model(x).dtype == FP16
        with torch.autocast("cpu", BF16):
            assert model(x).dtype == BF16
    bf16.release()


# ---- checkpointing


class Checkpointed(nn.Module):
    """Notes the formats of each run of its block, so that a recomputation in others is seen."""

    def __init__(self, **options):
        super().__init__()
        self.first, self.block, self.head = Seen(), nn.Sequential(Seen(), nn.GELU(), Seen()), Seen()
        self.options, self.gelus = options, []
        self.block[1].register_forward_hook(lambda module, args, output: self.gelus.append(output.dtype))

    def forward(self, x):
        x = self.first(x)
        x = checkpoint(self.block, x, **self.options) if self.options else self.block(x)
        return self.head(x)


POLICIES = [
    "bf16",
    "fp16",
    "fp32",
    "bf16 op:gelu=fp32",
    "fp16 op:linear=fp32 op:gelu=fp16",
    "bf16 module:block.0=fp32",
    "bf16 module:block.2=fp16",
    "bf16 module:block=fp16 module:block.2=fp32",
    "fp32 module:block=bf16 module:head=bf16 op:gelu=fp32",
]


@pytest.mark.parametrize("hardware", [CPU, AMX], ids=["emulated", "native"])
@pytest.mark.parametrize("use_reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_checkpoint_recomputes_in_the_same_formats(policy, use_reentrant, hardware):
    x, results = torch.randn(2, 4), []
    for options in ({}, {"use_reentrant": use_reentrant}):
        torch.manual_seed(0)
        model = Checkpointed(**options)
        region = Region(model, policy, hardware)
        results.append(gradients(model, region, x))
        # The recomputation may stop before the end of the block, once it has what the backward pass needs.
        num_runs = 2 if options else 1
        assert len(model.block[0].formats) == len(model.gelus) == num_runs
        assert 1 <= len(model.block[2].formats) <= num_runs
        gelu = dict(region.policy.ops).get("gelu")
        assert gelu is None or model.gelus[0] == {"fp32": FULL, **LOW}[gelu]
        assert [len(set(formats)) for formats in (model.block[0].formats, model.block[2].formats, model.gelus)] == [
            1
        ] * 3
    assert equal(*results)


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_a_checkpoint_in_a_held_window(use_reentrant):
    torch.manual_seed(0)
    plain, model = Checkpointed(), Checkpointed(use_reentrant=use_reentrant)
    model.load_state_dict(plain.state_dict())
    expected = window(plain, Region(plain, "bf16 module:block.0=fp32", CPU), hold=False)
    region = Region(model, "bf16 module:block.0=fp32", CPU)
    for hold in (False, True):
        assert equal(window(model, region, hold=hold), expected)


# ---- devices


def test_a_model_on_two_devices_is_refused():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(HalfstepError, match=r"a model on cpu, meta: one region serves one device\. Move the model"):
        Region(model, "bf16", CPU)
    model = nn.BatchNorm1d(2)
    model.running_mean = model.running_mean.to("meta")
    with pytest.raises(HalfstepError, match="cpu, meta"):
        device_of(model)


def test_the_device_of_a_model():
    assert device_of(nn.Linear(2, 2, device="meta")) == torch.device("meta")
    assert device_of(nn.Sequential()) == torch.device("cpu")
    assert device_of(nn.BatchNorm1d(2, affine=False)) == torch.device("cpu")
    with pytest.raises(HalfstepError, match="device 'meta'"):
        Region(nn.Linear(2, 2, device="meta"), "bf16")


# ---- threads


def test_regions_of_two_threads_that_overlap_leave_nothing_switched_on():
    """A enters, B enters, A leaves, B leaves: in between B's rules hold, and afterwards none."""
    first, second = Region(nn.Linear(2, 2), "bf16", CPU), Region(nn.Linear(2, 2), "fp16", CPU)
    entered, left = threading.Event(), threading.Event()

    def hold_first():
        with first:
            entered.set()
            left.wait(10)

    thread = threading.Thread(target=hold_first)
    thread.start()
    entered.wait(10)
    with second:
        left.set()
        thread.join()
        assert region_module._opened == [second]
        assert cpu16.active
        assert F.softmax(second.model(torch.randn(2, 2)), -1).dtype == torch.float32
    assert region_module._opened == []
    assert not cpu16.active
    assert oplist.active is None
