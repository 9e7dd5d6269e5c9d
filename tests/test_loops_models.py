"""Models of kinds that other loops trip over: recurrent, sparse, partly frozen, in 16 bit already, changed in place."""

from __future__ import annotations

import copy
import gc
import math

import pytest
import torch
from reference.loop import assert_same
from reference.nets import CPU
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from halfstep.errors import HalfstepError
from halfstep.region import Region
from halfstep.stepper import Stepper

pytestmark = pytest.mark.usefixtures("kernels_stay")

X = torch.linspace(-2, 2, 192).reshape(24, 8).sin()
Y = X.mean(1, keepdim=True) + 0.5
LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}
POLICIES = ["fp32", "bf16", "fp16 scale.init=1024", "fp16 on_overflow=skip scale.init=1024"]


def sgd_of(model, **settings):
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, **settings)


def loss_of(model, step=0):
    return (model(X.roll(step, 0)).float() - Y.roll(step, 0)).square().mean()


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


# --- recurrent nets --------------------------------------------------------------------------------------------------

RNNS = {
    "lstm": lambda **kw: nn.LSTM(8, 12, **kw),
    "lstm projected": lambda **kw: nn.LSTM(8, 12, proj_size=6, **kw),
    "gru": lambda **kw: nn.GRU(8, 12, **kw),
    "rnn": lambda **kw: nn.RNN(8, 12, **kw),
    "rnn relu": lambda **kw: nn.RNN(8, 12, nonlinearity="relu", **kw),
}
# torch says so of an LSTM with projections in fp32.
without_onednn = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning")


def rnn_of(name, **settings):
    torch.default_generator.manual_seed(0)
    return RNNS[name](**settings)


def run(model, x, policy):
    region = Region(model, policy, CPU)
    with region:
        out, state = model(x)
    with region.backward():
        out.float().square().sum().backward()
    states = state if isinstance(state, tuple) else (state,)
    gradients = [p.grad for p in model.parameters()]
    model.zero_grad()
    return out.detach(), [s.detach() for s in states], gradients


@without_onednn
@pytest.mark.parametrize("settings", [{}, {"num_layers": 2, "bidirectional": True}, {"bias": False}], ids=str)
@pytest.mark.parametrize("policy", LOW)
@pytest.mark.parametrize("name", RNNS)
def test_a_recurrent_net_computes_in_16_bit_as_cudnn_does(name, policy, settings):
    """Output and state are in 16 bit, gradients of the fp32 weights in fp32, and the errors are those of the format."""
    model = rnn_of(name, **settings)
    x = torch.linspace(-2, 2, 6 * 5 * 8).reshape(6, 5, 8).sin()
    out, states, gradients = run(model, x, policy)
    assert {out.dtype, *(state.dtype for state in states)} == {LOW[policy]}
    assert {gradient.dtype for gradient in gradients} == {torch.float32}
    exact, exact_states, exact_gradients = run(copy.deepcopy(model).double(), x.double(), "fp32")
    eps = torch.finfo(LOW[policy]).eps
    for value, other in zip((out, *states, *gradients), (exact, *exact_states, *exact_gradients), strict=True):
        error = ((value.double() - other).norm() / other.norm()).item()
        # Weights, inputs, gates and state are each rounded by at most eps / 2, over six steps whose gates contract.
        # A ReLU that the rounding switches has another gradient. Rounding nothing would be 1e-7.
        assert eps / 100 < error < (32 if name == "rnn relu" else 3) * eps


@without_onednn
@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN:UserWarning")  # torch's, on any use of the flag
@pytest.mark.parametrize("policy", LOW)
@pytest.mark.parametrize("name", RNNS)
def test_packed_sequences_are_those_that_are_not_padded(name, policy):
    model = rnn_of(name, batch_first=True)
    x, lengths = X.reshape(3, 8, 8), [8, 5, 2]
    region = Region(model, policy, CPU)
    # oneDNN takes no packed sequence, so that the kernels would not be the same ones.
    with torch.backends.mkldnn.flags(enabled=False), region:
        packed, _ = model(pack_padded_sequence(x, lengths, batch_first=True))
        out, _ = pad_packed_sequence(packed, batch_first=True)
        assert out.dtype == LOW[policy]
        for row, length in enumerate(lengths):
            alone, _ = model(x[row : row + 1, :length])
            # The sums of a product over another number of rows may run in another order: one last place.
            torch.testing.assert_close(out[row, :length], alone[0], rtol=0, atol=torch.finfo(LOW[policy]).eps)


@without_onednn
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", RNNS)
def test_a_recurrent_net_learns_whether_a_sum_is_positive(name, policy):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = rnn_of(name, num_layers=2, dropout=0.1, batch_first=True)
            self.head = nn.LazyLinear(1)

        def forward(self, x):
            return self.head(self.rnn(x)[0][:, -1])

    model = Net()
    torch.default_generator.manual_seed(1)
    x = torch.randn(64, 5, 8)
    y = (x[..., 0].sum(1, keepdim=True) > 0).float()
    model(x[:1])
    stepper = Stepper(model, torch.optim.AdamW(model.parameters(), lr=0.02), policy, max_norm=1.0, hardware=CPU)
    loss = nn.functional.binary_cross_entropy_with_logits
    reports = [stepper.step(lambda: loss(model(x).float(), y)) for _ in range(40)]
    assert all(report.applied for report in reports)
    assert reports[-1].loss < 0.5 * reports[0].loss


@pytest.mark.parametrize("rule", ["module:0=fp32", "op:lstm=fp32"])
def test_a_recurrent_net_that_a_rule_keeps_in_fp32(rule):
    model = nn.ModuleList([rnn_of("lstm")])
    plain = copy.deepcopy(model)
    region = Region(model, f"bf16 {rule}", CPU)
    with region:
        out, (h, c) = model[0](X.reshape(6, 4, 8))
    expected, (h2, c2) = plain[0](X.reshape(6, 4, 8))
    assert_same([out.detach(), h.detach(), c.detach()], [expected.detach(), h2.detach(), c2.detach()])


def test_a_state_in_fp32_goes_in_and_one_in_16_bit_comes_out():
    """Truncated backpropagation through time: the state of one step is the input of the next."""
    model = rnn_of("gru")
    stepper = Stepper(model, sgd_of(model), "bf16", hardware=CPU)
    state = torch.zeros(1, 4, 12)
    for _ in range(3):

        def closure(state=state):
            out, closure.state = model(X.reshape(6, 4, 8), state)
            return out.float().square().mean()

        assert stepper.step(closure).applied
        state = closure.state.detach()
        assert state.dtype == torch.bfloat16


def test_plain_autocast_is_as_before_beside_a_region():
    model = rnn_of("gru")
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        beside, _ = model(X.reshape(6, 4, 8))
    assert beside.dtype == torch.float32  # torch's own mixture, which a region does not have


@pytest.mark.parametrize("name", ["LSTMCell", "GRUCell", "RNNCell"])
@pytest.mark.parametrize("policy", LOW)
def test_cells_compute_in_16_bit_too(name, policy):
    cell = getattr(nn, name)(8, 12)
    with Region(cell, policy, CPU):
        out = cell(X)
    for state in out if isinstance(out, tuple) else (out,):
        assert state.dtype == LOW[policy]


# --- sparse gradients ------------------------------------------------------------------------------------------------


class Words(nn.Module):
    def __init__(self, sparse):
        super().__init__()
        torch.default_generator.manual_seed(0)
        self.words, self.head = nn.Embedding(50, 8, sparse=sparse), nn.Linear(8, 1)

    def forward(self, tokens):
        return self.head(torch.tanh(self.words(tokens))).mean(1)


def words_loss(model, step, factor=1.0):
    tokens = (torch.arange(24).reshape(6, 4) * (step + 3)) % 50
    return (model(tokens).float() - 0.5).square().mean() * factor


@pytest.mark.parametrize("max_norm", [None, 0.05])
@pytest.mark.parametrize("policy", POLICIES)
def test_sparse_gradients_train_as_dense_ones(policy, max_norm):
    """SGD moves a word that was not used by nothing, so that both are the same rule."""
    results = []
    for sparse in (True, False):
        model = Words(sparse)
        stepper = Stepper(model, sgd_of(model), policy, accumulate=2, max_norm=max_norm, hardware=CPU)
        reports = [stepper.step(lambda s=step, m=model: words_loss(m, s)) for step in range(8)]
        results.append((weights(model), [report.grad_norm for report in reports if report]))
    for (a, norm_a), (b, norm_b) in zip(*[zip(*result, strict=False) for result in results], strict=True):
        # The rows of a word that stands in several places are summed in another order: a few last places of fp32.
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
        assert norm_a == pytest.approx(norm_b, rel=1e-5)


@pytest.mark.parametrize("policy", POLICIES)
def test_sparse_adam_beside_a_dense_optimizer_skips_an_overflow(policy):
    """Two steppers over the two halves of one model would be two windows; SparseAdam takes the sparse half alone."""
    model = Words(True)
    model.head.requires_grad_(False)
    stepper = Stepper(model, torch.optim.SparseAdam([model.words.weight], lr=0.01), policy, max_norm=1.0, hardware=CPU)
    losses = [stepper.step(lambda s=step: words_loss(model, s % 2)).loss for step in range(20)]
    assert losses[-1] < losses[0]
    before, state = weights(model), copy.deepcopy(stepper.optimizer.state_dict()["state"])
    report = stepper.step(lambda: words_loss(model, 0, math.inf))
    assert not report.applied
    assert_same(weights(model), before)
    assert_same(stepper.optimizer.state_dict()["state"], state)


def test_a_sparse_gradient_that_overflows_is_replayed():
    results = []
    for scale in (2**16, None):
        scale = scale or int(results[0][1].scale)
        model = Words(True)
        stepper = Stepper(model, sgd_of(model), f"fp16 scale.init={scale}", hardware=CPU)
        reports = [stepper.step(lambda s=step, m=model: words_loss(m, s, 1e4)) for step in range(2)]
        results.append((weights(model), reports[0]))
    assert results[0][1].num_replays > 0 == results[1][1].num_replays
    assert_same(results[0][0], results[1][0])


# --- frozen and thawed in mid-run ------------------------------------------------------------------------------------


def net():
    torch.default_generator.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))


def by_hand(model, optimizer, plan, policy, max_norm=None):
    """The same windows of two micro-batches written out; ``plan`` changes the model before each micro-batch."""
    region = Region(model, policy, CPU)
    scale = 1024.0 if "fp16" in policy else 1.0
    for step, change in enumerate(plan):
        change(model, optimizer)
        with region:
            loss = loss_of(model, step)
        with region.backward():
            (loss * scale).backward()
        if step % 2:
            gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            norm = torch.nn.utils.get_total_norm(gradients) / (2 * scale)
            clip = 1.0 if max_norm is None else ((norm + 1e-6) / max_norm).clamp(min=1.0)
            for gradient in gradients:
                gradient /= clip * (2 * scale)
            optimizer.step()
            for p in model.parameters():
                p.grad = None


def keep(model, optimizer):
    pass


def freeze(number):
    return lambda model, optimizer: model[number].requires_grad_(False)


def thaw(number):
    return lambda model, optimizer: model[number].requires_grad_(True)


def grow(number):
    return lambda model, optimizer: optimizer.add_param_group({"params": list(model[number].parameters()), "lr": 0.02})


PLANS = {
    "between windows": [freeze(0), keep, thaw(0), keep, freeze(2), keep, thaw(2), keep],
    "between micro-batches": [keep, freeze(0), thaw(0), freeze(2), keep, thaw(2), keep, freeze(4)],
    "all but one": [freeze(0), freeze(2), keep, keep, thaw(2), thaw(0), keep, keep],
}


@pytest.mark.parametrize("max_norm", [None, 0.02])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("plan", PLANS)
def test_freezing_and_thawing_in_mid_run(plan, momentum, policy, max_norm):
    """A parameter without a gradient in this window stays where it is, its momentum too."""
    model, twin = net(), net()
    optimizer, other = (torch.optim.SGD(m.parameters(), lr=0.05, momentum=momentum) for m in (model, twin))
    stepper = Stepper(model, optimizer, policy, accumulate=2, max_norm=max_norm, hardware=CPU)
    for step, change in enumerate(PLANS[plan]):
        change(model, optimizer)
        report = stepper.step(lambda s=step: loss_of(model, s))
        assert report is None or report.applied
    by_hand(twin, other, PLANS[plan], policy, max_norm)
    assert_same(weights(model), weights(twin))
    assert_same(optimizer.state_dict()["state"], other.state_dict()["state"])


@pytest.mark.parametrize("policy", POLICIES)
def test_a_group_that_is_added_in_mid_run_trains_from_then_on(policy):
    plan = [keep, keep, grow(0), keep, keep, keep, grow(2), keep]
    model, twin = net(), net()
    optimizer, other = (torch.optim.SGD(m[4].parameters(), lr=0.05, momentum=0.9) for m in (model, twin))
    stepper = Stepper(model, optimizer, policy, accumulate=2, hardware=CPU)
    for step, change in enumerate(plan):
        change(model, optimizer)
        stepper.step(lambda s=step: loss_of(model, s))

    def without_older_gradients(model, optimizer):
        # A window starts without the gradients of those that were in no group; ours drops them when it begins.
        owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for p in model.parameters():
            if id(p) not in owned:
                p.grad = None

    def both(change):
        return lambda model, optimizer: (without_older_gradients(model, optimizer), change(model, optimizer))

    by_hand(twin, other, [both(change) for change in plan], policy)
    assert_same(weights(model), weights(twin))


def test_everything_frozen_says_what_is_wrong():
    model = net()
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.05), "bf16", hardware=CPU)
    model.requires_grad_(False)
    with pytest.raises(HalfstepError, match="depends on no trainable parameter"):
        stepper.step(lambda: loss_of(model))
    model.requires_grad_(True)
    assert stepper.step(lambda: loss_of(model)).applied


# --- losses in 16 bit ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["fp16", "fp16 on_overflow=skip"])
def test_a_loss_that_overflows_in_16_bit_is_a_fault_of_the_forward_pass(policy):
    model = net()
    stepper = Stepper(model, sgd_of(model), policy, hardware=CPU)
    before = weights(model)
    report = stepper.step(lambda: model(X).abs().mean() * 60000 * 60000)
    assert (report.applied, report.loss, report.num_replays) == (False, math.inf, 0)
    assert "no loss scale mends" in report.reason
    assert_same(weights(model), before)


# --- modules that hold 16-bit weights already ------------------------------------------------------------------------


class Adapted(nn.Module):
    """A frozen linear layer with a low-rank change of it (LoRA, Hu et al. 2021)."""

    def __init__(self, base, rank=2, dtype=torch.float32):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features, dtype=dtype) / base.in_features)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank, dtype=dtype))

    def forward(self, x):
        return self.base(x) + nn.functional.linear(nn.functional.linear(x, self.down), self.up)


def adapted(held, stored=torch.bfloat16, adapter=torch.float32):
    """The base holds values of the format ``held``, stored as ``stored``."""
    torch.default_generator.manual_seed(0)
    layers = [nn.Linear(8, 16).to(held), nn.Linear(16, 1).to(held)]
    return nn.Sequential(Adapted(layers[0].to(stored), dtype=adapter), nn.Tanh(), Adapted(layers[1].to(stored)))


@pytest.mark.parametrize("policy", POLICIES[1:])
@pytest.mark.parametrize("held", LOW.values(), ids=LOW)
def test_adapters_in_fp32_on_a_16_bit_base(held, policy):
    """As on the same base kept in fp32, to the bit; the base is not touched, and every gradient is fp32."""
    results, formats = [], set()
    for stored in (held, torch.float32):
        model = adapted(held, stored)
        base = [p.detach().clone() for p in model.parameters() if not p.requires_grad]
        for p in model.parameters():
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(lambda p: formats.add(p.grad.dtype))
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
        stepper = Stepper(model, optimizer, policy, accumulate=2, max_norm=1.0, hardware=CPU)
        reports = [stepper.step(lambda s=step, m=model: loss_of(m, s)) for step in range(8)]
        assert all(report is None or report.applied for report in reports)
        assert_same([p.detach() for p in model.parameters() if not p.requires_grad], base)
        assert {p.dtype for p in model.parameters() if not p.requires_grad} == {stored}
        results.append([p.detach() for p in model.parameters() if p.requires_grad])
    assert_same(*results)
    assert formats == {torch.float32}


def test_adapters_in_16_bit_are_refused_by_name():
    model = adapted(torch.bfloat16, adapter=torch.bfloat16)
    with pytest.raises(HalfstepError, match=r"0\.down"):
        Stepper(model, sgd_of(model), "bf16", hardware=CPU)


# --- weights that are changed in place while a region is open --------------------------------------------------------


@pytest.mark.parametrize("keeps", [False, True])
def test_a_weight_changed_in_place_inside_a_region_is_cast_anew(keeps):
    model = nn.Sequential(nn.Linear(8, 4))
    region = Region(model, "bf16", CPU)
    if keeps:
        region.hold()
    with region:
        first = model(X)
        with torch.no_grad():
            model[0].weight.mul_(2)
            model[0].bias.mul_(2)
        second = model(X)
    region.release()
    assert torch.equal(second, first * 2)


@pytest.mark.parametrize("settings", [{}, {"fused": True}, {"foreach": True}], ids=str)
def test_an_optimizer_that_steps_inside_a_region_is_seen(settings):
    """A whole loop inside one region, as some have it: autocast goes on with the weights of the first step."""
    model, twin = net(), net()
    region, other = Region(model, "bf16", CPU), Region(twin, "bf16", CPU)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1, **settings) for m in (model, twin)]
    with region:
        for step in range(3):
            loss_of(model, step).backward()
            optimizers[0].step()
            optimizers[0].zero_grad()
    for step in range(3):
        # Backward inside the region, as above: autocast is on in its formulas.
        with other:
            loss_of(twin, step).backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
    assert_same(weights(model), weights(twin))


def test_a_closure_that_changes_weights_before_its_forward_pass():
    """Weights kept on a sphere, inside a window that holds its casts."""
    results = []
    for keep_casts in (True, False):
        model = net()
        stepper = Stepper(model, sgd_of(model), "bf16", accumulate=4, keep_casts=keep_casts, hardware=CPU)

        def closure(step, model=model):
            with torch.no_grad():
                model[0].weight.copy_(nn.functional.normalize(model[0].weight) * (1 + step))
            return loss_of(model, step)

        for step in range(8):
            stepper.step(lambda s=step: closure(s))
        results.append(weights(model))
    assert_same(*results)


def test_the_hooks_that_watch_go_with_their_region():
    from torch.optim.optimizer import _global_optimizer_post_hooks

    gc.collect()
    num_hooks = len(_global_optimizer_post_hooks)
    model = net()
    region = Region(model, "bf16", CPU)
    other = copy.deepcopy(model)
    with region:
        other(X)
        model(X)
    assert len(_global_optimizer_post_hooks) == num_hooks + 1
    del region
    gc.collect()
    assert len(_global_optimizer_post_hooks) == num_hooks
    assert not model._forward_pre_hooks
    other(X)


def test_a_weight_that_is_used_twice_is_cast_once():
    """The cache is there for that, and nothing changed the weight in between."""
    model = net()
    region = Region(model, "bf16", CPU)
    seen = []
    with region, torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t.data_ptr()) or t, lambda t: t):
        model(X)
        first = set(seen)
        seen.clear()
        model(X)
    assert len(first & set(seen)) >= 2  # the casts of two weights that a product saves
