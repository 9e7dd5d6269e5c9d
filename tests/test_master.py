"""Master weights: the same steps as fp32, formats, ties, groups, changes from outside, and exact saving and loading."""

import copy
import io
import math

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from halfstep import HalfstepError, Policy, Stepper, chunks
from halfstep.layouts import LAYOUTS
from halfstep.master import Masters, _rests

pytestmark = pytest.mark.usefixtures("kernels_stay")

NAMES = list(LAYOUTS)
OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1),
    "adamw fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1, fused=True),
    "adamw loop": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1, foreach=False),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9, nesterov=True),
    "sgd fused": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9, fused=True),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=1e-2),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=1e-3, centered=True, momentum=0.5),
}


class Net(nn.Module):
    """Embedding and head share a weight; a norm and biases stay fp32."""

    def __init__(self, width=24, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(40, width)
        self.up, self.norm = nn.Linear(width, 2 * width), nn.LayerNorm(2 * width)
        self.down, self.head = nn.Linear(2 * width, width), nn.Linear(width, 40, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.down(self.norm(self.up(self.embed(tokens)).relu())))


def loss_of(model, tokens):
    return nn.functional.cross_entropy(model(tokens).float().flatten(0, 1), tokens.roll(1, 1).flatten())


def batches(count, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(40, (4, 6), generator=generator) for _ in range(count)]


def build(policy, make=OPTIMIZERS["adamw"], model=None, **settings):
    model = Net() if model is None else model
    stepper = Stepper(model, make(model.parameters()), policy, **settings)
    return model, stepper


def train(stepper, model, tokens):
    reports = [stepper.step(lambda batch=batch: loss_of(model, batch)) for batch in tokens]
    return [report for report in reports if report is not None]


def exact(stepper):
    return {name: weight.clone() for name, weight in stepper.weights()}


def assert_same(first, second):
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name


def watch_gradients(stepper, divisor=lambda: 1.0):
    """What an fp32 optimizer would be given in each step: the gradients, widened, then divided."""
    seen = {}
    names = {parameter: name for name, parameter in stepper.model.named_parameters()}

    def look(optimizer, args, kwargs):
        seen.clear()
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                seen[names[parameter]] = parameter.grad.float() / divisor()

    stepper.optimizer.register_step_pre_hook(look)
    return seen


# The same steps as fp32.


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("layout", ["split16", "copy"])
def test_exact_layouts_take_200_steps_of_an_fp32_master_to_the_bit(layout, make):
    """The plain twin: fp32 weights, and torch's optimizer over the gradients that the 16-bit model made."""
    model, stepper = build(f"bf16 master={layout}", make)
    seen = watch_gradients(stepper)
    twin = Net()
    optimizer = make(twin.parameters())
    start = exact(stepper)
    for batch in batches(200):
        assert train(stepper, model, [batch])[0].applied
        for name, parameter in twin.named_parameters():
            parameter.grad = seen[name].clone()
        optimizer.step()
    masters = exact(stepper)
    assert_same(masters, {name: parameter.detach() for name, parameter in twin.named_parameters()})
    assert not torch.equal(masters["embed.weight"], start["embed.weight"])
    for (name, parameter), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert stepper.optimizer.state[parameter].keys() == optimizer.state[other].keys(), name
        for key, value in optimizer.state[other].items():
            mine = stepper.optimizer.state[parameter][key]
            assert torch.equal(mine, value) if isinstance(value, torch.Tensor) else mine == value, (name, key)


@pytest.mark.parametrize("make", [OPTIMIZERS["adamw"], OPTIMIZERS["adamw fused"]], ids=["host", "device"])
def test_split16_in_fp16_takes_the_steps_of_an_fp32_master_under_a_loss_scale(make):
    """The gradient is divided in fp32, not in fp16, where it would lose bits. Exact from 2^-17; smaller ones nearly."""
    model, stepper = build("fp16 master=split16 scale.init=1024 on_overflow=skip", make)
    seen = watch_gradients(stepper, lambda: 1024.0)
    twin = Net()
    optimizer = make(twin.parameters())
    for batch in batches(200):
        train(stepper, model, [batch])
        for name, parameter in twin.named_parameters():
            parameter.grad = seen[name].clone()
        optimizer.step()
    for name, weight in stepper.weights():
        other = dict(twin.named_parameters())[name].detach()
        # A weight that passes through |w| < 2^-17 is rounded there to 2^-40, once a step at most.
        assert (weight - other).abs().max() <= 200 * 2.0**-40, name
        assert (weight == other).double().mean() > 0.98, name


def test_copy_is_autocast_with_fp32_weights_to_the_bit_where_products_meet_all_weights():
    """Linear layers cast fp32 weights as the layout does, to nearest even; gradients are the same 16-bit numbers."""

    def net():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))

    results = []
    for master in ("fp32", "copy"):
        model, stepper = build(f"bf16 master={master}", model=net(), max_norm=0.5, accumulate=2)
        generator = torch.Generator().manual_seed(2)
        for _ in range(100):
            x = torch.randn(8, 16, generator=generator)
            stepper.step(lambda x=x, model=model: (model(x).float() - x).square().mean())
        results.append(exact(stepper))
    # With one micro-batch the gradients are equal; the sum of two is fp32 in both.
    assert_same(*results)


@pytest.mark.parametrize("layout", NAMES)
@pytest.mark.parametrize("format", ["bf16", "fp16"])
def test_every_layout_trains_as_well_as_fp32(layout, format):
    tokens = batches(1) * 120
    _, stepper = build(f"{format} master={layout}", max_norm=1.0)
    losses = [report.loss for report in train(stepper, stepper.model, tokens)]
    _, plain = build("fp32", max_norm=1.0)
    reference = [report.loss for report in train(plain, plain.model, tokens)]
    # From 3.7 to below 0.1; the paths differ by rounding alone, and end within a tenth of the way.
    assert losses[-1] < 0.1 * losses[0]
    assert abs(losses[-1] - reference[-1]) < 0.1 * losses[0]


def test_updates_under_half_an_ulp_survive_in_every_layout():
    """AdamW at lr 1e-4 from weights of 1.0: 100 updates of 1e-4, each 1/40 of the bf16 ulp below 1."""
    for layout in NAMES:
        model = nn.Linear(64, 64, bias=False)
        nn.init.ones_(model.weight)
        _, stepper = build(
            f"bf16 master={layout}", lambda ps: torch.optim.AdamW(ps, lr=1e-4, weight_decay=0), model=model
        )
        for _ in range(100):
            stepper.step(lambda model=model: model(torch.ones(1, 64)).float().sum())
        moved = 1 - dict(stepper.weights())["weight"].double().mean().item()
        # Drawn roundings: 4,096 weights of one ulp 2^-8 each, 100 draws with chance 1/39: a standard error of 1e-4.
        tolerance = {"stochastic": 5e-4, "split8": 7.7e-4, "kahan": 7.7e-4}.get(layout, 3e-6)
        assert abs(moved - 0.01) < tolerance, layout


# Gradients.


@pytest.mark.parametrize("accumulate", [1, 3])
def test_gradients_are_16_bit_and_their_sums_fp32(accumulate):
    model, stepper = build("bf16 master=split16", accumulate=accumulate)
    twin = Net()
    total = torch.zeros_like(twin.up.weight)
    dtypes = []
    up = model.up.weight
    stepper.optimizer.register_step_pre_hook(lambda *_: dtypes.append((up.grad.dtype, up.grad.clone())))
    for batch in batches(accumulate):
        other, lone = build("bf16 master=split16")
        got = []
        lone.optimizer.register_step_pre_hook(lambda *_, w=other.up.weight, got=got: got.append(w.grad.float()))
        train(lone, other, [batch])
        total += got[0]
        train(stepper, model, [batch])
    dtype, gradient = dtypes[0]
    assert dtype == (torch.bfloat16 if accumulate == 1 else torch.float32)
    assert torch.equal(gradient.float(), total)


def test_zero_grad_and_a_gradient_of_somebody_else():
    model, stepper = build("bf16 master=split16")
    with stepper.region:
        loss_of(model, batches(1)[0]).backward()
    assert model.up.weight.grad.dtype == torch.bfloat16
    stepper.optimizer.zero_grad()
    assert model.up.weight.grad is None
    with stepper.region:
        loss_of(model, batches(1)[0]).backward()
    other, clean = build("bf16 master=split16")
    train(stepper, model, batches(2))
    train(clean, other, batches(2))
    assert_same(exact(stepper), exact(clean))


@pytest.mark.parametrize("layout", NAMES)
@pytest.mark.parametrize("fused", [False, True])
def test_a_non_finite_gradient_moves_no_bit(layout, fused):
    model, stepper = build(
        f"bf16 master={layout}", lambda ps: torch.optim.AdamW(ps, lr=1e-2, fused=fused), max_norm=1.0
    )
    train(stepper, model, batches(3))
    before = copy.deepcopy((model.state_dict(), stepper.optimizer.state_dict(), exact(stepper)))
    report = stepper.step(lambda: loss_of(model, batches(1)[0]) * math.inf)
    assert not report.applied
    assert_same(dict(model.state_dict()), dict(before[0]))
    assert_same(exact(stepper), before[2])
    for number, state in stepper.optimizer.state_dict()["state"].items():
        for key, value in state.items():
            assert torch.equal(value, before[1]["state"][number][key]), key


@pytest.mark.parametrize("layout", NAMES)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_replay_mends_an_overflow(layout, accumulate):
    """A first scale that overflows: replayed until it fits, no sample lost, the same in every layout."""
    model, stepper = build(f"fp16 master={layout} scale.init=16777216", accumulate=accumulate)
    reports = train(stepper, model, batches(4))
    assert all(report.applied for report in reports)
    assert reports[0].num_replays > 0
    other, gentle = build(f"fp16 master={layout} scale.init={int(stepper.scale.value)}", accumulate=accumulate)
    train(gentle, other, batches(4))
    for name, weight in exact(stepper).items():
        # Gradients that were finite at a higher scale keep bits that are subnormal at the lower one.
        assert torch.allclose(weight, exact(gentle)[name], atol=2e-3), name


# Formats.


def test_matrices_are_16_bit_and_vectors_fp32():
    model, stepper = build("bf16 master=split16")
    for name, parameter in model.named_parameters():
        assert parameter.dtype == (torch.bfloat16 if parameter.dim() > 1 else torch.float32), name
        assert parameter.requires_grad
    train(stepper, model, batches(1))
    for parameter, state in stepper.optimizer.state.items():
        assert {value.dtype for value in state.values()} == {torch.float32}, parameter.shape


def test_a_16_bit_embedding_hands_on_fp32_and_sums_its_rows_in_fp32():
    """4,096 gradients of 2^-10 for one row: torch's own CPU kernel stops at 256 of them in bf16."""
    model, stepper = build("bf16 master=split16", model=nn.Embedding(4, 8))
    index = torch.zeros(4096, dtype=torch.long)
    seen = watch_gradients(stepper)
    outputs = []
    stepper.step(lambda: outputs.append(model(index)) or outputs[0].mean(dim=0).sum())
    assert outputs[0].dtype == torch.float32
    assert model.weight.dtype == torch.bfloat16
    assert torch.equal(seen["weight"][0], torch.ones(8))


@pytest.mark.parametrize("layer", ["norm", "rnn", "bag", "parametrised", "weight_norm", "pruned", "conv"])
def test_what_stays_fp32(layer):
    """Norms compute in fp32, recurrent kernels take one format, and a source of a weight is no weight."""
    model = {
        "norm": lambda: nn.LayerNorm((4, 6)),
        "rnn": lambda: nn.GRU(6, 5, batch_first=True),
        "bag": lambda: nn.EmbeddingBag(10, 6),
        "parametrised": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(6, 5)),
        "pruned": lambda: prune.random_unstructured(nn.Linear(6, 5), "weight", 0.5),
        "conv": lambda: nn.utils.spectral_norm(nn.Conv1d(4, 5, 3)),
        "weight_norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 5)),
    }[layer]()
    x = torch.zeros(3, 4, dtype=torch.long) if layer == "bag" else torch.randn(3, 4, 6)
    _, stepper = build("bf16 master=split16", model=model)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}

    def loss():
        output = model(x)
        return (output[0] if isinstance(output, tuple) else output).float().square().mean()

    assert stepper.step(loss).applied


def test_a_module_rule_keeps_its_weights_fp32():
    model, stepper = build("bf16 master=split16 module:up=fp32")
    assert model.up.weight.dtype == torch.float32
    assert model.down.weight.dtype == torch.bfloat16
    train(stepper, model, batches(3))
    assert all(weight.isfinite().all() for weight in exact(stepper).values())


@pytest.mark.parametrize("module", ["embed", "head"])
def test_a_weight_shared_with_a_module_in_fp32_is_fp32(module):
    model, _ = build(f"bf16 master=split16 module:{module}=fp32")
    assert model.embed.weight.dtype == torch.float32
    assert model.head.weight is model.embed.weight


def test_tied_weights_stay_tied():
    model, stepper = build("bf16 master=split16")
    train(stepper, model, batches(5))
    assert model.head.weight is model.embed.weight
    assert [name for name, _ in stepper.weights() if "head" in name] == []
    state = stepper.fp32_state_dict()
    assert torch.equal(state["head.weight"], state["embed.weight"])


def test_16_bit_weights_of_the_model_are_taken_as_they_are():
    model = Net().bfloat16()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    _, stepper = build("bf16 master=split16", model=model)
    for name, weight in stepper.weights():
        assert torch.equal(weight, before[name].float()), name
    train(stepper, model, batches(2))


def test_16_bit_states_that_an_optimizer_made_before_become_fp32():
    model = Net().bfloat16()
    optimizer = torch.optim.Adagrad(model.parameters(), initial_accumulator_value=0.5)
    assert optimizer.state[model.up.weight]["sum"].dtype == torch.bfloat16
    stepper = Stepper(model, optimizer, "bf16 master=split16")
    assert optimizer.state[model.up.weight]["sum"].dtype == torch.float32
    assert (optimizer.state[model.up.weight]["sum"] == 0.5).all()
    train(stepper, model, batches(1))


def test_frozen_parameters_outside_the_optimizer_are_left_alone():
    model = Net()
    model.up.weight.requires_grad_(False)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    stepper = Stepper(model, torch.optim.SGD(trainable, 0.1), "bf16 master=copy")
    assert model.up.weight.dtype == torch.float32
    train(stepper, model, batches(2))


def test_a_group_that_is_added_is_narrowed_with_the_next_window():
    model = Net()
    optimizer = torch.optim.AdamW([{"params": [model.embed.weight]}], lr=1e-2)
    stepper = Stepper(model, optimizer, "bf16 master=split16")
    train(stepper, model, batches(2))
    assert model.up.weight.dtype == torch.float32
    optimizer.add_param_group({"params": list(model.up.parameters()) + list(model.down.parameters()), "lr": 1e-3})
    train(stepper, model, batches(1))
    assert model.up.weight.dtype == torch.bfloat16
    assert optimizer.state[model.up.weight]["exp_avg"].dtype == torch.float32
    before = exact(stepper)
    train(stepper, model, batches(2))
    assert not torch.equal(exact(stepper)["up.weight"], before["up.weight"])


def test_a_fp16_weight_beyond_its_range_is_refused_by_name():
    model = Net()
    with torch.no_grad():
        model.down.weight[0, 0] = 70000.0
    with pytest.raises(HalfstepError, match=r"down\.weight with a weight of 70000.*65504.*module:down=fp32"):
        build("fp16 master=split16", model=model)
    with torch.no_grad():
        model.down.weight[0, 0] = math.nan
    with pytest.raises(HalfstepError, match=r"down\.weight with a weight of nan"):
        build("fp16 master=split16", model=model)


def test_16_bit_weights_without_a_layout_are_refused_with_the_cure():
    with pytest.raises(HalfstepError, match=r"embed\.weight .*16 bit loses.*master=split16"):
        build("bf16", model=Net().bfloat16())


def test_a_layout_needs_a_16_bit_policy():
    with pytest.raises(HalfstepError, match="keeps 16-bit weights in the model"):
        Policy.parse("fp32 master=split16")


# Changes from outside.


@pytest.mark.parametrize("layout", NAMES)
def test_a_weight_that_is_set_between_steps_is_the_new_weight(layout):
    model, stepper = build(f"bf16 master={layout}")
    train(stepper, model, batches(2))
    with torch.no_grad():
        model.up.weight.fill_(0.5)
    assert (dict(stepper.weights())["up.weight"] == 0.5).all()
    seen = watch_gradients(stepper)
    train(stepper, model, batches(1))
    assert "up.weight" in seen
    # One AdamW step from 0.5 moves at most a few lr; a stale master would be anywhere.
    assert (dict(stepper.weights())["up.weight"] - 0.5).abs().max() < 0.05


def test_hooks_of_the_optimizer_fire_once_a_step():
    model, stepper = build("bf16 master=split16")
    calls = []
    stepper.optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    stepper.optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    train(stepper, model, batches(2))
    assert calls == ["pre", "post"] * 2


def test_a_scheduler_works_as_ever():
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    stepper = Stepper(model, optimizer, "bf16 master=split16", scheduler=scheduler)
    train(stepper, model, batches(3))
    assert optimizer.param_groups[0]["lr"] == 1e-2 / 8


def test_an_optimizer_that_fails_leaves_the_model_whole():
    model, stepper = build("bf16 master=split16")
    train(stepper, model, batches(1))
    before = exact(stepper)

    def fail():
        raise RuntimeError("no")

    stepper.optimizer.step, step = fail, stepper.optimizer.step
    with pytest.raises(RuntimeError, match="no"):
        train(stepper, model, batches(1))
    stepper.optimizer.step = step
    assert model.up.weight.dtype == torch.bfloat16
    assert_same(exact(stepper), before)
    train(stepper, model, batches(1))


# Saving and loading.


def saved(stepper):
    """Through a file, as a user does."""
    file = io.BytesIO()
    torch.save((stepper.model.state_dict(), stepper.optimizer.state_dict(), stepper.state_dict()), file)
    file.seek(0)
    return torch.load(file)


def resume(policy, state, make=OPTIMIZERS["adamw"], **settings):
    model, stepper = build(policy, make, model=Net(seed=9), **settings)
    model.load_state_dict(state[0])
    stepper.optimizer.load_state_dict(state[1])
    stepper.load_state_dict(state[2])
    return model, stepper


@pytest.mark.parametrize("layout", NAMES)
@pytest.mark.parametrize("format", ["bf16", "fp16"])
def test_a_resumed_run_takes_the_same_steps_to_the_bit(layout, format):
    policy = f"{format} master={layout}"
    model, stepper = build(policy, accumulate=2)
    train(stepper, model, batches(5))  # in the middle of a window
    state = saved(stepper)
    train(stepper, model, batches(5, seed=3))
    other, resumed = resume(policy, state, accumulate=2)
    train(resumed, other, batches(5, seed=3))
    assert_same(exact(resumed), exact(stepper))
    assert_same(dict(other.state_dict()), dict(model.state_dict()))


@pytest.mark.parametrize("target", ["fp32", *NAMES])
@pytest.mark.parametrize("source", ["fp32", *NAMES])
def test_a_run_goes_on_in_another_layout(source, target):
    model, stepper = build(f"bf16 master={source}")
    train(stepper, model, batches(20))
    state, before = saved(stepper), exact(stepper)
    other, resumed = resume(f"bf16 master={target}", state)
    after = exact(resumed)
    can_hold = target in ("fp32", "copy", "split16") or source in (target, "stochastic")
    for name, weight in before.items():
        if can_hold or weight.dim() == 1:
            assert torch.equal(after[name], weight), name
        else:
            # bf16's half ulp is 2^-9 relative, and a drawn rounding moves by up to a whole one.
            assert torch.allclose(after[name], weight, rtol=2.0**-7, atol=1e-38), name
    for parameter, state in resumed.optimizer.state.items():
        assert state["exp_avg"].dtype == torch.float32, parameter.shape
    assert train(resumed, other, batches(2))[-1].applied


def test_optimizer_states_are_not_rounded_on_the_way():
    model, stepper = build("bf16 master=split16")
    train(stepper, model, batches(3))
    state = copy.deepcopy(stepper.optimizer.state_dict())
    stepper.optimizer.load_state_dict(state)
    for number, values in stepper.optimizer.state_dict()["state"].items():
        for key, value in values.items():
            assert value.dtype == torch.float32
            assert torch.equal(value, state["state"][number][key])


@pytest.mark.parametrize("layout", ["copy", "split16"])
def test_fp32_weights_that_the_model_loads_keep_every_bit(layout):
    model, stepper = build(f"bf16 master={layout}")
    train(stepper, model, batches(1))
    weights = Net(seed=5).state_dict()
    model.load_state_dict(weights)
    for name, weight in stepper.weights():
        assert torch.equal(weight, weights[name]), name
    assert_same(stepper.fp32_state_dict(), dict(weights))


def test_exported_weights_make_a_plain_fp32_model():
    model, stepper = build("bf16 master=split16")
    train(stepper, model, batches(5))
    plain = Net(seed=7)
    plain.load_state_dict(stepper.fp32_state_dict())
    for name, weight in stepper.weights():
        assert torch.equal(dict(plain.named_parameters())[name], weight)


@pytest.mark.parametrize("layout", NAMES)
def test_exported_weights_are_copies(layout):
    model, stepper = build(f"bf16 master={layout}")
    train(stepper, model, batches(1))
    before = exact(stepper)
    for value in stepper.fp32_state_dict().values():
        value.zero_()
    assert_same(exact(stepper), before)


def test_rests_without_their_weights_are_refused():
    model, stepper = build("bf16 master=split16")
    train(stepper, model, batches(3))
    state = saved(stepper)
    _, fresh = build("bf16 master=split16", model=Net(seed=9))
    before = exact(fresh)
    with pytest.raises(HalfstepError, match=r"does not hold the 16-bit weight.*Load the model's state first"):
        fresh.load_state_dict(state[2])
    assert_same(exact(fresh), before)


def test_a_copied_or_pickled_model_loads_as_any_model():
    model, stepper = build("bf16 master=split16")
    for other in (copy.deepcopy(model), torch.load(_pickled(model), weights_only=False)):
        weights = Net(seed=5).state_dict()
        before = exact(stepper)
        other.load_state_dict(weights)
        assert torch.equal(other.up.weight, weights["up.weight"].bfloat16())
        assert_same(exact(stepper), before)


def _pickled(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return file


def test_a_stepper_that_goes_takes_its_hooks_along():
    model, stepper = build("bf16 master=split16")
    optimizer = stepper.optimizer
    assert any(module._load_state_dict_post_hooks for module in model.modules())
    del stepper
    assert not any(module._load_state_dict_post_hooks for module in model.modules())
    assert not optimizer._optimizer_load_state_dict_post_hooks


def test_replicas_round_alike_whatever_else_draws():
    weights = []
    for noise in range(2):
        model, stepper = build("bf16 master=stochastic")
        for batch in batches(5):
            torch.rand(noise + 1)
            train(stepper, model, [batch])
        weights.append(exact(stepper))
    assert_same(*weights)


def test_roundings_are_drawn_anew_for_every_step_matrix_and_slice(monkeypatch):
    """100 updates of 1/39 ulp: with the same draws in each step a weight would move always or never."""
    monkeypatch.setattr(chunks, "_SMALLEST_BYTES", 0)  # two slices each
    model = nn.Sequential(nn.Linear(64, 128, bias=False), nn.Linear(64, 128, bias=False))
    for layer in model:
        nn.init.ones_(layer.weight)
    _, stepper = build("bf16 master=stochastic", lambda ps: torch.optim.AdamW(ps, lr=1e-4, weight_decay=0), model=model)
    for _ in range(100):
        stepper.step(lambda: sum(layer(torch.ones(1, 64)).float().sum() for layer in model))
    first, second = (weight for _, weight in stepper.weights())
    assert len(first.unique()) > 4
    assert not torch.equal(first, second)
    assert not torch.equal(first[:64], first[64:])


def test_the_step_of_a_fused_optimizer_counts_as_a_change():
    """torch's own fused kernels do not count it, and a graph from before would go through the new weights unseen."""
    model, stepper = build("bf16 master=split16", OPTIMIZERS["adamw fused"])
    version = model.up.weight._version
    train(stepper, model, batches(1))
    assert model.up.weight._version > version


def test_a_promoted_module_gets_its_exact_fp32_weights_back():
    model, stepper = build("fp16 master=split16 on_exhausted=promote scale.init=1")
    train(stepper, model, batches(2))
    before = exact(stepper)
    stepper.region.promote("up")
    stepper.masters.settle(stepper.policy)
    assert model.up.weight.dtype == torch.float32
    assert model.up.weight.grad_dtype == torch.float32
    assert model.up.weight not in _rests  # whose memory is free again
    assert torch.equal(model.up.weight, before["up.weight"])
    train(stepper, model, batches(2))
    stepper._promoted.append("up")
    state, now = saved(stepper), exact(stepper)
    _, resumed = resume("fp16 master=split16 on_exhausted=promote scale.init=1", state)
    assert_same(exact(resumed), now)


def test_values_at_places():
    model, stepper = build("bf16 master=split8")
    train(stepper, model, batches(2))
    index = torch.tensor([0, 5, 17])
    assert isinstance(stepper.masters, Masters)
    for name, weight in exact(stepper).items():
        parameter = dict(model.named_parameters())[name]
        assert torch.equal(stepper.masters.values_at(parameter, index), weight.flatten()[index])
