"""Casting for inference: which weights are cast, which stay in fp32 and why, what that saves, and the report of it."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from reference.inference import assert_same, by_region, tensors
from reference.inference_nets import IDS, IMAGE, MODELS, ROWS, Experts, Llama, ResNet, Vit, build
from reference.nets import AMX, BF16, CPU, FP16, FULL, LOW, NAMES, Net
from torch import nn

from halfstep.compare.memory import LiveBytes
from halfstep.hardware import Hardware
from halfstep.inference import cast_for_inference

pytestmark = pytest.mark.usefixtures("kernels_stay")


# ---- rules and keep


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
