"""Casting for inference: the bits of the region on rounded weights, and the error of recurrent layers and bags."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from reference.inference import assert_same, by_region, rounded, tensors
from reference.inference_nets import IDS, MODELS, ROWS, Llama, build
from reference.nets import AMX, BF16, CPU, FULL, LOW, NAMES, Net, outputs
from torch import nn

from halfstep.inference import cast_for_inference

pytestmark = pytest.mark.usefixtures("kernels_stay")


@pytest.mark.parametrize("hardware", [CPU, AMX], ids=["emulated", "native"])
@pytest.mark.parametrize("policy", ["bf16", "fp16"])
@pytest.mark.parametrize("name", MODELS)
def test_a_cast_model_gives_the_bits_of_the_region_on_rounded_weights(name, policy, hardware):
    make, x = MODELS[name]
    model = build(make)
    before = copy.deepcopy(model)
    report = cast_for_inference(model, policy, hardware=hardware)
    assert report.cast
    assert_same(tensors(model(x)), by_region(rounded(before, report), x, policy, hardware))
    if name not in ("gpt", "llama", "bilinear"):
        # Weights that meet products alone are rounded by autocast as well: these are the bits of the model itself.
        assert_same(tensors(model(x)), by_region(before, x, policy, hardware))


@pytest.mark.parametrize("policy", ["bf16", "fp16"])
def test_rounding_a_table_costs_no_more_than_the_rounding_of_products(policy):
    model = build(Llama)
    exact, low = model(IDS).logits, by_region(model, IDS, policy, AMX)[0]
    cast_for_inference(model, policy, hardware=AMX)
    error, usual = ((t.float() - exact).norm() / exact.norm() for t in (model(IDS).logits, low))
    # Each of the roundings on the way is at most eps / 2 of its value; there are about ten, and one more.
    assert error < 10 * {"bf16": 2**-8, "fp16": 2**-11}[policy]
    assert error < 1.5 * usual


@pytest.mark.parametrize("policy", [*(f"bf16 module:{name}=fp32" for name in NAMES), "fp32 module:blocks.0=bf16"])
def test_rules_hold_as_in_the_region(policy):
    for rules in (policy, f"{policy} module:head=fp16", f"{policy} module:blocks.0.1.linear=fp16"):
        model, twin, x = build(Net), build(Net), torch.randn(2, 4)
        cast_for_inference(model, rules, hardware=CPU)
        expected = by_region(twin, x, rules, CPU)
        assert_same([model(x)], expected)
        assert outputs(model) == outputs(twin)


def plain_lstm(module, x, state=None):
    """The equations of torch.nn.LSTM, in fp64, on the weights as they are stored."""
    steps = list(x.double())
    for layer in range(module.num_layers):
        w, r, b, c = (
            getattr(module, f"{n}_l{layer}").double() for n in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        )
        hidden = cell = torch.zeros(x.shape[1], module.hidden_size, dtype=torch.float64)
        if state is not None:
            hidden, cell = (part[layer].double() for part in state)
        for i, step in enumerate(steps):
            enter, forget, new, leave = (step @ w.t() + b + hidden @ r.t() + c).chunk(4, 1)
            cell = forget.sigmoid() * cell + enter.sigmoid() * new.tanh()
            hidden = steps[i] = leave.sigmoid() * cell.tanh()
    return torch.stack(steps)


@pytest.mark.parametrize("hardware", [CPU, AMX], ids=["emulated", "native"])
@pytest.mark.parametrize("policy", ["bf16", "fp16"])
def test_recurrent_layers_compute_in_16_bit(policy, hardware):
    # On a CPU torch's LSTM refuses a mix of formats, so its inputs are cast at its door.
    model = build(lambda: nn.LSTM(8, 6, 2))
    report = cast_for_inference(model, policy, hardware=hardware)
    assert len(report.cast) == 8
    x, state = torch.randn(5, 3, 8), (torch.randn(2, 3, 6), torch.randn(2, 3, 6))
    for inputs in ((x,), (x.to(LOW[policy]),), (x, state)):
        out, (hidden, cell) = model(*inputs)
        assert out.dtype == hidden.dtype == cell.dtype == LOW[policy]
        # Values are below 1 and are rounded at each of 10 steps, gates before them: some 10 halves of eps.
        error = (out.double() - plain_lstm(model, *inputs)).abs().max()
        assert 0 < error < 10 * {"bf16": 2**-8, "fp16": 2**-11}[policy]
        packed = nn.utils.rnn.pack_padded_sequence(inputs[0], torch.tensor([5, 5, 5]))
        again, _ = nn.utils.rnn.pad_packed_sequence(model(packed, *inputs[1:])[0])
        torch.testing.assert_close(again, out, rtol=0, atol=2 * {"bf16": 2**-8, "fp16": 2**-11}[policy])


@pytest.mark.parametrize("kind", [nn.GRU, nn.RNN])
def test_other_recurrent_layers_after_an_embedding_and_a_product(kind):
    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.token, self.mix, self.rnn = nn.Embedding(32, 8), nn.Linear(8, 8), kind(8, 6)

        def forward(self, ids):
            return self.rnn(self.token(ids))[0] + self.rnn(self.mix(self.token(ids)))[0]

    model = build(Tagger)
    exact = model(IDS)
    cast_for_inference(model, "bf16", hardware=AMX)
    assert model(IDS).dtype == BF16
    torch.testing.assert_close(model(IDS).float(), exact, rtol=0, atol=10 * 2**-8)  # as above, 8 steps
    model = build(Tagger)
    report = cast_for_inference(model, "bf16 module:rnn=fp32", hardware=AMX)
    assert len(report.kept) == 4
    assert model(IDS).dtype == FULL


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_embedding_bags(mode):
    bag = build(lambda: nn.EmbeddingBag(32, 8, mode=mode))
    weights = torch.rand(IDS.shape) if mode == "sum" else None
    near = None if weights is None else weights.bfloat16().float()
    expected = F.embedding_bag(IDS, bag.weight.detach().bfloat16().float(), mode=mode, per_sample_weights=near)
    report = cast_for_inference(bag, "bf16", hardware=AMX)
    assert report.cast == {"weight": "bf16"}
    result = bag(IDS, per_sample_weights=weights)
    assert result.dtype == FULL
    # The result is rounded once, by at most half of 2^-7 relative; a product with a weight before it once as well.
    torch.testing.assert_close(result, expected, rtol=2**-8, atol=8 * 2**-9 if mode == "sum" else 0)


# ---- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*MODELS, "lstm"])
def test_on_cuda_a_cast_model_gives_the_bits_of_the_region_on_rounded_weights(name):
    make, x = MODELS.get(name, (lambda: nn.LSTM(8, 6, 2), ROWS))
    model, x = build(make).cuda(), x.cuda()
    before = copy.deepcopy(model)
    report = cast_for_inference(model, "fp16")
    results = [t for t in tensors(model(x)) if isinstance(t, torch.Tensor)]
    assert_same(results, by_region(rounded(before, report), x, "fp16", None)[: len(results)])
