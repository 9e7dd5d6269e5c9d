"""Cast weights held over a window, evaluation in the middle of one, and recomputation."""

from __future__ import annotations

import pytest
import torch
from reference.nets import AMX, BF16, CPU, FP16, FULL, LOW, Net, Seen, nesting, outputs
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from halfstep.region import Region

pytestmark = pytest.mark.usefixtures("kernels_stay")


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
