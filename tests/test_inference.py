"""Casting for inference: the bits of the region on rounded weights, what stays in fp32, how a cast model is used."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import json
import pickle
import threading
import types
import weakref
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from reference.nets import AMX, BF16, CPU, FP16, FULL, LOW, NAMES, Net, Seen, outputs
from torch import nn

from halfstep import oplist
from halfstep.compare.memory import LiveBytes
from halfstep.errors import HalfstepError
from halfstep.hardware import Hardware
from halfstep.inference import cast_for_inference
from halfstep.region import Region
from halfstep.stepper import Stepper
from halfstep.workloads.charlm import GPT

pytestmark = pytest.mark.usefixtures("kernels_stay")

# ---- models as people write them


class RMSNorm(nn.Module):
    """Written by hand: in fp32, and back to what came in."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x):
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


@dataclass
class Output:
    logits: torch.Tensor
    hidden: torch.Tensor


class Llama(nn.Module):
    """Tied head, rotary tables, hand-written norms, a gated MLP, an additive fp32 mask, a dataclass as output."""

    def __init__(self, vocabulary=32, width=16, num_heads=2, context=8):
        super().__init__()
        self.num_heads = num_heads
        self.token = nn.Embedding(vocabulary, width)
        self.norm1, self.norm2, self.norm = RMSNorm(width), RMSNorm(width), RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, 32, bias=False), nn.Linear(width, 32, bias=False)
        self.down = nn.Linear(32, width, bias=False)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.token.weight
        half = width // num_heads // 2
        angles = torch.arange(context)[:, None] * 100.0 ** (-torch.arange(half) / half)
        self.register_buffer("cos", angles.cos().repeat(1, 2), persistent=False)
        self.register_buffer("sin", angles.sin().repeat(1, 2), persistent=False)

    def rotate(self, x):
        first, second = x.chunk(2, -1)
        return x * self.cos[: x.shape[-2]] + torch.cat([-second, first], -1) * self.sin[: x.shape[-2]]

    def forward(self, ids):
        x = self.token(ids)
        batch, time, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, time, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        mask = torch.full((time, time), torch.finfo(torch.float32).min).triu(1)
        mixed = F.scaled_dot_product_attention(self.rotate(qkv[0]), self.rotate(qkv[1]), qkv[2], attn_mask=mask)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, time, width))
        h = self.norm2(x)
        x = self.norm(x + self.down(F.silu(self.gate(h)) * self.up(h)))
        return Output(self.head(x), x)


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.bn = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.conv, self.bn2 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.norm = nn.GroupNorm(2, 8)
        self.head = nn.Linear(8, 5)
        for norm in (self.bn, self.bn2):
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.5, 2)
            nn.init.uniform_(norm.weight)

    def forward(self, x):
        x = F.relu(self.bn(self.stem(x)))
        x = F.relu(x + self.bn2(self.conv(x)))
        return {"logits": self.head(self.norm(x).mean((2, 3))), "features": x}


class Experts(nn.Module):
    """Products with matrices that belong to the module itself."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, 8, 8))
        self.bias, self.scale = nn.Parameter(torch.randn(8)), nn.Parameter(torch.tensor(0.7))

    def forward(self, x):
        return (torch.einsum("bi,eij->bej", x, self.w) + self.bias) * self.scale


class Vit(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch = nn.Conv2d(3, 8, 4, 4)
        self.position = nn.Parameter(torch.randn(1, 4, 8))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 5)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2) + self.position
        return self.head(self.norm(x).mean(1))


class Attention(nn.Module):
    def __init__(self, **settings):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True, **settings)

    def forward(self, x, mask=None):
        x = self.linear(x)
        return self.attention(x, x, x, key_padding_mask=mask, need_weights=False)[0]


def encoder(**settings):
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.5, batch_first=True, **settings)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=not settings)


class Cells(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru, self.lstm = nn.GRUCell(8, 6), nn.LSTMCell(6, 5)

    def forward(self, x):
        return self.lstm(self.gru(x))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = encoder()

    def forward(self, x):
        mask = torch.arange(x.shape[1]) >= torch.tensor([[5], [3]])
        return self.inner(x, src_key_padding_mask=mask)


IDS = torch.arange(16).reshape(2, 8) * 5 % 32
IMAGE = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))
ROWS = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(2))
MODELS = {
    "gpt": (lambda: GPT(32, 2, 8), IDS),
    "llama": (Llama, IDS),
    "resnet": (ResNet, IMAGE),
    "experts": (Experts, ROWS[0]),
    "attention": (Attention, ROWS),
    "attention with bias_k": (lambda: Attention(add_bias_kv=True), ROWS),
    "encoder": (encoder, ROWS),
    "encoder, norm first": (lambda: encoder(norm_first=True), ROWS),
    "encoder with padding": (Encoder, ROWS),
    "bilinear": (lambda: Twice(nn.Bilinear(8, 8, 4)), ROWS),
    "cells": (Cells, ROWS[0]),
    "transposed": (lambda: nn.Sequential(nn.ConvTranspose2d(3, 4, 2), nn.PReLU(4), nn.InstanceNorm2d(4)), IMAGE),
}


class Twice(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x, x)


def build(make, seed=0):
    torch.default_generator.manual_seed(seed)
    return make().eval()


def tensors(output):
    if isinstance(output, Output):
        return [output.logits, output.hidden]
    if isinstance(output, dict):
        return list(output.values())
    return list(output) if isinstance(output, tuple) else [output]


def by_region(model, x, policy, hardware):
    """What the region gives for the fp32 model, without torch's fused layers, which follow no lists."""
    region = Region(model, policy, hardware)
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with region.inference():
            return [tensor.clone() for tensor in tensors(model(x))]
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def rounded(model, report):
    """The model in fp32, with the weights that ``report`` says were cast rounded by hand."""
    twin = copy.deepcopy(model)
    named = dict(twin.named_parameters())
    with torch.no_grad():
        for name, format in report.cast.items():
            named[name].copy_(named[name].to(LOW[format]))
    return twin


def assert_same(results, expected):
    assert [t.dtype for t in results] == [t.dtype for t in expected]
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


# ---- numbers


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


def test_stored_formats_are_those_of_the_innermost_rule():
    model = build(Net)
    report = cast_for_inference(
        model, "bf16 module:blocks.0=fp32 module:blocks.0.1=fp16 module:head=fp32", hardware=CPU
    )
    stored = {name: model.get_submodule(name).linear.weight.dtype for name in NAMES}
    assert stored == dict(zip(NAMES, [BF16, FULL, FP16, BF16, BF16, FULL], strict=True))
    assert {name: LOW[format] for name, format in report.cast.items()} == {
        name: parameter.dtype for name, parameter in model.named_parameters() if parameter.dtype != FULL
    }
    assert set(report.kept) == {
        f"{name}.linear.{leaf}" for name in ("blocks.0.0", "head") for leaf in ("weight", "bias")
    }
    assert set(report.kept.values()) == {"a module rule keeps it in fp32"}


def test_of_two_rules_for_one_module_the_later_one_decides():
    for rules, expected in (("module:head=fp16 module:hea?=fp32", FULL), ("module:hea?=fp32 module:head=fp16", FP16)):
        model = build(Net)
        cast_for_inference(model, f"bf16 {rules}", hardware=CPU)
        assert model.head.linear.weight.dtype == expected


def test_keep_takes_any_name_of_a_weight():
    model = nn.Module().eval()
    model.first = model.second = nn.Parameter(torch.ones(2, 2))
    model.add_module("part", nn.Module())
    model.part.third = model.first
    model.part.fourth = nn.Parameter(torch.ones(2, 2))
    model.eval()
    for name in ("first", "second", "part.third", "*third", "???st"):
        report = cast_for_inference(copy.deepcopy(model), "bf16", keep=[name], hardware=CPU)
        assert report.kept == {"first": "keep names it"}
        assert report.cast == {"part.fourth": "bf16"}


def test_keep_protects_a_matrix_that_no_rule_can():
    model, twin = build(Vit), build(Vit)
    low = copy.deepcopy(model)
    report = cast_for_inference(model, "bf16", keep="posi*", hardware=AMX)
    assert report.kept["position"] == "keep names it"
    assert_same([model(IMAGE)], by_region(twin, IMAGE, "bf16", AMX))
    # Otherwise the sum with the bf16 patches is taken in bf16: within one rounding more.
    assert cast_for_inference(low, "bf16", hardware=AMX).cast["position"] == "bf16"
    assert not torch.equal(low(IMAGE), model(IMAGE))
    torch.testing.assert_close(low(IMAGE), model(IMAGE), rtol=0, atol=8 * 2**-8)  # a few eps of values near 1


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


# ---- what stays


def test_batch_norm_keeps_its_statistics_and_weights_in_fp32():
    model = build(ResNet)
    statistics = {name: buffer.clone() for name, buffer in model.named_buffers()}
    report = cast_for_inference(model, "fp16", hardware=CPU)
    assert {name for name, why in report.kept.items() if why == "a normalisation computes in fp32"} == {
        f"{module}.{leaf}" for module in ("bn", "bn2", "norm") for leaf in ("weight", "bias")
    }
    assert set(report.kept) | set(report.cast) == set(dict(model.named_parameters()))
    for name, buffer in model.named_buffers():
        assert buffer.dtype == statistics[name].dtype
        assert torch.equal(buffer, statistics[name])
    assert model.bn.weight.dtype == FULL


def test_buffers_are_left_as_they_are():
    model = build(Llama)
    model.register_buffer("small", torch.ones(2, dtype=BF16))
    before = dict(model.named_buffers())
    cast_for_inference(model, "fp16", hardware=CPU)
    after = dict(model.named_buffers())
    assert all(after[name] is before[name] for name in before)


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("attention with bias_k", set()),
        ("cells", set()),
        ("transposed", {"1.weight"}),
        ("bilinear", {"inner.bias"}),
        ("encoder", {f"layers.{i}.norm{j}.{leaf}" for i in (0, 1) for j in (1, 2) for leaf in ("weight", "bias")}),
    ],
)
def test_all_that_products_read_is_cast(name, kept):
    # A bias that stayed in fp32 would be cast again in each forward pass, with the same result.
    model = build(MODELS[name][0])
    report = cast_for_inference(model, "bf16", hardware=CPU)
    assert set(report.kept) == kept
    assert {name for name, parameter in model.named_parameters() if parameter.dtype == FULL} == kept


def test_vectors_and_numbers_of_other_modules_stay():
    report = cast_for_inference(build(Experts), "bf16", hardware=CPU)
    assert report.cast == {"w": "bf16"}
    assert report.kept == dict.fromkeys(["bias", "scale"], "a vector or number of a module of another kind")


@pytest.mark.parametrize(
    ("wrap", "names"),
    [
        (nn.utils.parametrizations.spectral_norm, {"0.parametrizations.weight.original"}),
        (nn.utils.parametrizations.weight_norm, {f"0.parametrizations.weight.original{i}" for i in (0, 1)}),
        (lambda module: nn.utils.spectral_norm(module), {"0.weight_orig"}),
    ],
    ids=["spectral_norm", "weight_norm", "spectral_norm by hook"],
)
def test_a_weight_that_is_computed_keeps_its_source(wrap, names):
    model = nn.Sequential(wrap(nn.Linear(8, 8))).eval()
    expected = by_region(model, ROWS, "bf16", AMX)
    report = cast_for_inference(model, "bf16", hardware=AMX)
    assert report.kept == dict.fromkeys(names, "the weight is computed from it in each forward pass")
    assert set(report.cast) == {"0.bias"}
    assert_same([model(ROWS)], expected)


def test_other_dtypes_and_kinds_are_left_alone():
    class Quantised(torch.Tensor):
        pass

    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.wide = nn.Parameter(torch.randn(2, 2, dtype=torch.float64))
            self.complex = nn.Parameter(torch.randn(2, 2, dtype=torch.complex64))
            self.whole = nn.Parameter(torch.ones(2, 2, dtype=torch.int8), requires_grad=False)
            self.eight = nn.Parameter(torch.ones(2, 2).to(torch.float8_e4m3fn), requires_grad=False)
            self.sparse = nn.Parameter(torch.eye(2).to_sparse())
            self.quantised = nn.Parameter(torch.ones(2, 2).as_subclass(Quantised))

    model = Odd().eval()
    before = {name: (id(p), p.dtype, type(p)) for name, p in model.named_parameters()}
    report = cast_for_inference(model, "bf16", hardware=CPU)
    assert not report.cast
    assert report.kept == {
        "wide": "float64 is left alone, as autocast does",
        "complex": "complex64 is left alone, as autocast does",
        "whole": "int8 is left alone, as autocast does",
        "eight": "float8_e4m3fn is left alone, as autocast does",
        "sparse": "a Parameter, torch.sparse_coo, is stored in a way of its own",
        "quantised": "a Quantised, torch.strided, is stored in a way of its own",
    }
    assert {name: (id(p), p.dtype, type(p)) for name, p in model.named_parameters()} == before


def test_tied_weights_stay_tied():
    model = build(Llama)
    report = cast_for_inference(model, "bf16", hardware=AMX)
    assert model.head.weight is model.token.weight
    assert "token.weight" in report.cast
    assert "head.weight" not in report.cast
    # Two parameters on one storage are tied as well.
    pair = nn.ModuleList([nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)]).eval()
    pair[1].weight.data = pair[0].weight.data
    report = cast_for_inference(pair, "bf16", hardware=CPU)
    assert report.cast == {"0.weight": "bf16"}
    assert pair[1].weight.dtype == BF16
    assert pair[1].weight.data_ptr() == pair[0].weight.data_ptr()
    assert (report.num_bytes_before, report.num_bytes_after) == (64, 32)


def test_a_weight_that_one_owner_needs_in_fp32_stays():
    model, twin = build(Llama), build(Llama)
    report = cast_for_inference(model, "bf16 module:head=fp32", hardware=AMX)
    assert report.kept["token.weight"] == "a module rule keeps it in fp32"
    assert_same(tensors(model(IDS)), by_region(twin, IDS, "bf16 module:head=fp32", AMX))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).eval()
    model[1].weight = model[0].weight
    report = cast_for_inference(model, "bf16 module:1=fp16", hardware=CPU)
    assert report.kept == {"0.weight": "a bf16 and an fp16 module share it"}
    assert model(torch.randn(2, 4)).dtype == FP16
    shared = nn.Linear(4, 4)
    model = nn.Sequential(shared, nn.Sequential(shared)).eval()
    report = cast_for_inference(model, "bf16 module:1=fp32", hardware=CPU)
    assert len(report.kept) == 2
    assert model(torch.randn(2, 4)).dtype == FULL


def test_an_fp32_policy_changes_no_weight():
    plain = Hardware.of("cpu", "plain CPU")
    for policy in ("auto", "fp32"):
        model, x = build(Net), torch.randn(2, 4)
        expected = model(x)
        report = cast_for_inference(model, policy, hardware=plain)
        assert not report.cast
        assert set(report.kept.values()) == {"the policy computes in fp32"}
        assert report.num_bytes_before == report.num_bytes_after
        assert torch.equal(model(x), expected)
        assert report.info.effective == "fp32"
        assert "none in 16 bit" in str(report)
    assert "no 16-bit matrix instructions" in cast_for_inference(build(Net), hardware=plain).info.reason


# ---- what a format cannot hold


def test_a_weight_beyond_fp16_is_refused_by_name_and_nothing_is_changed():
    model = build(Net)
    model.head.linear.weight.data[1, 2], model.head.linear.weight.data[0, 0] = -65520.0, 1e9
    model.stem.linear.weight.grad = torch.ones(4, 4)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(HalfstepError) as caught:
        cast_for_inference(model, "fp16", hardware=CPU)
    assert caught.value.what == "head.linear.weight in fp16"
    assert caught.value.why == "2 of its elements, up to 1e+09, are beyond 65504 and would become inf"
    assert "keep=['head.linear.weight']" in caught.value.fix
    assert all(value.dtype == FULL and torch.equal(value, before[n]) for n, value in model.state_dict().items())
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert model.stem.linear.weight.grad is not None
    assert "forward" not in model.__dict__
    cast_for_inference(model, "fp16", keep=["head.linear.weight"], hardware=CPU)
    assert cast_for_inference(model, "bf16", hardware=CPU).cast["head.linear.weight"] == "bf16"


def test_the_largest_weight_that_fits_and_what_is_not_finite_already():
    model = nn.Linear(4, 1, bias=False).eval()
    model.weight.data = torch.tensor([[65519.996, -65504.0, float("inf"), float("nan")]])
    cast_for_inference(model, "fp16", hardware=CPU)
    assert model.weight[0, :3].tolist() == [65504.0, -65504.0, float("inf")]
    assert model.weight[0, 3].isnan()
    model = nn.Linear(1, 1, bias=False).eval()
    model.weight.data = torch.tensor([[3.4e38]])
    with pytest.raises(HalfstepError, match="weight in bf16"):
        cast_for_inference(model, "bf16", hardware=CPU)


def test_weights_that_round_to_zero_are_counted():
    model = nn.Sequential(nn.Linear(4, 2, bias=False), nn.Linear(2, 2)).eval()
    model[0].weight.data = torch.tensor([[2.0**-25, -(2.0**-26), 0.0, 2.0**-24], [1.0, float("nan"), -1e-20, 3.1e-8]])
    report = cast_for_inference(copy.deepcopy(model), "fp16", hardware=CPU)
    assert report.underflow == {"0.weight": 3}  # half the smallest subnormal and less: 2^-25, 2^-26, 1e-20
    assert "rounded to zero  0.weight 3" in str(report)
    report = cast_for_inference(model, "bf16", hardware=CPU)
    assert report.underflow == {}
    assert "rounded to zero" not in str(report)


def test_a_model_that_is_in_16_bit_already():
    model = build(ResNet).bfloat16()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    report = cast_for_inference(model, "fp16 module:head=fp32", hardware=CPU)
    assert report.converted == ("stem.weight", "conv.weight")
    assert "rounded twice  stem.weight, conv.weight" in str(report)
    assert report.kept["head.weight"] == "a module rule keeps it in fp32, widened from bf16"
    for name, value in model.state_dict().items():
        expected = FP16 if name in report.cast else before[name].dtype if "batches" in name else FULL
        assert value.dtype == expected, name
        assert torch.equal(value.float(), before[name].to(expected).float())
    assert model(IMAGE)["logits"].isfinite().all()
    large = nn.Linear(1, 1).bfloat16().eval()
    large.weight.data.fill_(1e6)
    with pytest.raises(HalfstepError, match="beyond 65504"):
        cast_for_inference(large, "fp16", hardware=CPU)
    same = nn.Linear(4, 4).half().eval()
    weight = same.weight.data_ptr()
    report = cast_for_inference(same, "fp16", hardware=CPU)
    assert report.converted == ()
    assert same.weight.data_ptr() == weight


# ---- what is refused


def test_refusals_leave_the_model_as_it_was():
    for call, message in (
        (lambda model: cast_for_inference(model.train(), "bf16", hardware=CPU), r"Call model.eval\(\) first"),
        (lambda model: cast_for_inference(model, "bf16 module:hed=fp32", hardware=CPU), "module rule 'hed'"),
        (
            lambda model: cast_for_inference(model, "bf16", keep=["*", "hed*"], hardware=CPU),
            r"keep 'hed\*'.*such as 0.linear",
        ),
        (lambda model: cast_for_inference(model, "bf15", hardware=CPU), "bf15"),
        (
            lambda model: cast_for_inference(model.append(nn.LazyLinear(4)).eval(), "bf16", hardware=CPU),
            "6.weight of a laz",
        ),
    ):
        model = nn.Sequential(*[Seen() for _ in NAMES]).eval()
        with pytest.raises(HalfstepError, match=message):
            call(model)
        assert "forward" not in model.__dict__
        assert not any("forward" in module.__dict__ for module in model)
        assert all(parameter.requires_grad for parameter in model.parameters())
        assert model[0].linear.weight.dtype == FULL


def test_scripted_models_and_those_of_inference_mode_are_refused():
    with torch.inference_mode():
        model = build(Net)
    with pytest.raises(HalfstepError, match=r"stem\.linear\.weight, made in torch"):
        cast_for_inference(model, "bf16", hardware=CPU)
    scripted = nn.Linear(4, 4).eval()
    scripted.__class__ = type("Scripted", (nn.Linear, torch.jit.ScriptModule), {})  # torch.jit.script is deprecated
    with pytest.raises(HalfstepError, match="a scripted model"):
        cast_for_inference(scripted, "bf16", hardware=CPU)


def test_a_cast_model_does_not_train():
    model = build(Net)
    cast_for_inference(model, "bf16", hardware=CPU)
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16", hardware=CPU)
    with pytest.raises(HalfstepError, match="without a gradient"):
        stepper.step(lambda: model(torch.randn(2, 4)).float().sum())


# ---- how it is called


def test_parameters_are_frozen_and_gradients_reach_inputs_that_ask():
    model = build(Net)
    model(torch.randn(2, 4)).sum().backward()
    parameters = list(model.parameters())
    cast_for_inference(model, "bf16", hardware=AMX)
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert not any(parameter.requires_grad or parameter.grad is not None for parameter in parameters)
    assert not model(torch.randn(2, 4)).requires_grad
    x = torch.randn(2, 4, requires_grad=True)
    model(x).float().sum().backward()
    assert x.grad.dtype == FULL
    assert x.grad.abs().sum() > 0


def test_casting_inside_inference_mode_leaves_a_model_that_works_outside():
    model, x = build(Net), torch.randn(2, 4, requires_grad=True)
    with torch.inference_mode():
        cast_for_inference(model, "bf16", hardware=AMX)
        assert torch.is_inference_mode_enabled()
    model(x).float().sum().backward()
    assert x.grad.abs().sum() > 0


def test_results_can_be_changed_and_trained_on():
    model, head, x = build(Net), nn.Linear(4, 2), torch.randn(2, 4)
    cast_for_inference(model, "bf16", hardware=AMX)
    features = model(x)
    features /= 2  # an inference tensor would refuse both
    head(features.float()).sum().backward()
    assert head.weight.grad is not None
    with torch.inference_mode():
        assert model(x).is_inference()
    with torch.no_grad():
        assert not model(x.requires_grad_()).requires_grad
    assert model(x).requires_grad


def test_the_region_is_closed_after_a_call_and_after_one_that_fails():
    class Modes(nn.Module):
        def forward(self, x, fail=False):
            self.seen = torch.is_autocast_enabled("cpu"), torch.backends.mha.get_fastpath_enabled()
            assert not fail
            return x

    model = nn.Sequential(Modes(), nn.MultiheadAttention(4, 2)).eval()
    model.forward = lambda *args: model[0](*args)
    cast_for_inference(model, "bf16", hardware=CPU)
    model(torch.ones(1))
    assert model[0].seen == (True, False)
    with pytest.raises(AssertionError):
        model(torch.ones(1), True)
    assert not torch.is_autocast_enabled("cpu")
    assert torch.backends.mha.get_fastpath_enabled()
    assert oplist.active is None


def test_inside_other_regions_it_follows_its_own():
    model, x = build(Net), torch.randn(2, 4)
    expected = by_region(model, x, "bf16 module:head=fp32", CPU)
    cast_for_inference(model, "bf16 module:head=fp32", hardware=CPU)
    with Region(nn.Linear(1, 1), "fp16", CPU):
        assert_same([model(x)], expected)
    with torch.autocast("cpu", dtype=FP16):
        assert_same([model(x)], expected)
    # As a part of a model that trains, too.
    whole = nn.Sequential(model, nn.Linear(4, 1))
    with Region(whole, "fp16 module:0=fp32", CPU):
        assert_same([whole[0](x)], expected)


def test_calls_from_several_threads():
    make, x = MODELS["encoder"]
    model = build(make)
    cast_for_inference(model, "bf16", hardware=AMX)
    expected, results, barrier = model(x), [], threading.Barrier(4)

    def call():
        barrier.wait()
        results.extend(model(x) for _ in range(20))

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 80
    assert all(torch.equal(result, expected) for result in results)
    assert torch.backends.mha.get_fastpath_enabled()


def test_a_copy_is_cast_too_and_has_its_own_weights():
    model, x = build(Net), torch.randn(2, 4)
    cast_for_inference(model, "bf16 module:head=fp32", hardware=CPU)
    other = copy.deepcopy(model)
    assert torch.equal(other(x), model(x))
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert other(x).abs().max() == 0
    assert model(x).abs().max() > 0
    del model
    gc.collect()
    assert other(x).dtype == FULL
    cast_for_inference(other, "fp16", hardware=CPU)
    assert other(x).dtype == FP16


def test_a_pickled_model_is_whole_after_another_cast():
    model = build(Llama)
    cast_for_inference(model, "bf16", hardware=AMX)
    expected = tensors(model(IDS))
    other = pickle.loads(pickle.dumps(model))
    report = cast_for_inference(other, "bf16", hardware=AMX)
    assert report.num_bytes_before == report.num_bytes_after
    assert_same(tensors(other(IDS)), expected)
    fresh = build(Llama, seed=1)
    cast_for_inference(fresh, "bf16", hardware=AMX)
    fresh.load_state_dict(model.state_dict())
    assert_same(tensors(fresh(IDS)), expected)


def test_casting_again_replaces_the_region():
    model = build(lambda: nn.Sequential(nn.EmbeddingBag(32, 4), Seen(), nn.GRU(4, 4)))
    for policy, expected in (("bf16", BF16), ("fp16 module:2=fp32", FP16), ("bf16", BF16)):
        report = cast_for_inference(model, policy, hardware=CPU)
        model(IDS)
        assert model[1].last[1] == expected
    assert report.converted == ("0.weight", "1.linear.weight", "1.linear.bias")
    assert "forward" not in model[2].__dict__
    assert len(model[0]._forward_hooks) == len(model[0]._forward_pre_hooks) == len(model[2]._forward_pre_hooks) == 1
    assert len(inspect.getclosurevars(model.forward.__func__).nonlocals) == 2
    before = len(inspect.stack())

    class Depth(nn.Module):
        def forward(self, x):
            return len(inspect.stack()) - before

    model = Depth().eval()
    depths = set()
    for _ in range(5):
        cast_for_inference(model, "bf16", hardware=CPU)
        depths.add(model(0))
    assert len(depths) == 1


def test_a_forward_of_the_instance_is_called_and_its_arguments_are_seen():
    def double(self, x, scale: float = 2.0, *, text="t"):
        return scale * self.stem(x)

    bound, model, x = build(Net), build(Net), torch.randn(2, 4)
    bound.forward = double.__get__(bound)
    model.forward = functools.partial(double, model)
    for net in (bound, model):
        expected = by_region(net, x, "bf16", CPU)
        for _ in range(2):
            cast_for_inference(net, "bf16", hardware=CPU)
            assert_same([net(x, text="u")], expected)
            assert list(inspect.signature(net.forward).parameters) == ["x", "scale", "text"]
    other = copy.deepcopy(bound)
    other.stem.linear.weight.data.zero_()
    other.stem.linear.bias.data.zero_()
    cast_for_inference(other, "bf16", hardware=CPU)
    assert other(x).abs().max() == 0
    # A wrapper that copies our marks is still called.
    inner, log = bound.forward, []

    @functools.wraps(inner.__func__)
    def wrapper(self, *args):
        log.append(args)
        return inner(*args)

    bound.forward = types.MethodType(wrapper, bound)
    cast_for_inference(bound, "bf16", hardware=CPU)
    assert_same([bound(x)], expected)
    assert len(log) == 1


def test_a_cast_model_is_collected():
    model = build(Net)
    cast_for_inference(model, "bf16 module:head=fp32", hardware=CPU)
    model(torch.randn(2, 4))
    seen = weakref.ref(model)
    del model
    gc.collect()
    assert seen() is None


def test_a_compiled_cast_model_gives_the_same_bits():
    model, x = build(Net), torch.randn(2, 4)
    cast_for_inference(model, "bf16 module:head=fp32", hardware=AMX)
    for module in model.modules():
        module.formats = None
        if isinstance(module, Seen):
            module.forward = module.linear.forward
    expected = model(x)
    compiled = torch.compile(model, backend="eager")
    assert torch.equal(compiled(x), expected)
    assert torch.equal(compiled(x), expected)


# ---- memory and report


def test_memory_is_two_bytes_a_weight_and_the_cast_needs_one_parameter_more():
    model = build(lambda: nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(8)]))
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    live = LiveBytes()
    live.count(model.parameters())
    start = live.now
    with live:
        report = cast_for_inference(model, "bf16", hardware=AMX)
    weight = 64 * 64 * 2
    assert start == report.num_bytes_before == 16 * weight
    assert live.now == report.num_bytes_after == 8 * weight
    # Beside the copy, the smallest and largest element and a count.
    assert start + weight <= live.peak < start + weight + 100
    # A forward pass casts no weight: nothing but the activations is there.
    x = torch.randn(1, 64)
    with live:
        live.peak = live.now
        model(x)
    assert live.peak < live.now + 4 * 128 * 2


def test_the_report_says_what_was_done():
    report = cast_for_inference(build(Llama), "bf16", hardware=AMX)
    assert json.loads(json.dumps(report.to_dict()))["cast"] == report.cast
    text = str(report)
    assert text.splitlines()[0] == "policy      bf16 on CPU with AMX: as asked for"
    assert "parameters  9: 6 in bf16, 3 kept" in text
    assert "3 kept: a vector or number of a module of another kind" in text
    assert report.num_bytes_before - report.num_bytes_after == 2 * (32 * 16 + 16 * 48 + 16 * 16 + 3 * 16 * 32)


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
