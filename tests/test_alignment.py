"""What align reports, against layers that are really built larger; and padding, against the plain twin to the bit.

Twins of small whole numbers are compared to the bit: every sum is exact, whatever order a kernel adds in.
"""

from __future__ import annotations

import copy
import io
import json
import pickle
import runpy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from reference.nets import AMX, BF16, CPU, FULL, LOW
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from halfstep import oplist
from halfstep.alignment import PaddedLinear, align
from halfstep.errors import HalfstepError
from halfstep.hardware import CARDS
from halfstep.region import Region
from halfstep.stepper import Stepper

ROOT = Path(__file__).parent.parent
SHAPES = [(12, 13), (16, 13), (13, 16), (1, 1), (7, 30)]
both_low = pytest.mark.parametrize("name", LOW)


def whole(*shape, low=-1, high=2, seed=0):
    """Whole numbers of -1, 0 and 1: sums of up to 256 products are exact even in bf16."""
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed + sum(shape))).float()


def twins(layer, multiple=8, dtype=FULL):
    """A plain layer of whole numbers and its padded copy."""
    with torch.no_grad():
        for seed, parameter in enumerate(layer.parameters()):
            parameter.copy_(whole(*parameter.shape, seed=seed))
    layer = layer.to(dtype)
    padded = copy.deepcopy(layer)
    align(padded, multiple=multiple, pad=True)
    return layer, padded


def results(layer, x, start=None):
    """Output, gradient of the input and of each parameter."""
    layer.zero_grad()
    x = x.clone().requires_grad_()
    out = layer(x)
    out.backward(whole(*out.shape, seed=9).to(out.dtype) if start is None else start)
    return [out.detach(), x.grad, *(parameter.grad for parameter in layer.parameters())]


def assert_same(ours, twin):
    for a, b in zip(ours, twin, strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert torch.equal(a, b)


class TiedNet(nn.Module):
    """A language model of 13 tokens whose embedding and head share one weight; token 0 is padding."""

    def __init__(self, vocabulary=13, width=10, hidden=15):
        super().__init__()
        self.wte = nn.Embedding(vocabulary, width, padding_idx=0)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, tokens):
        x = self.wte(tokens)
        return self.head(x + self.down(F.gelu(self.up(x))))


def tied_twins(dtype=torch.float64):
    torch.manual_seed(0)
    net = TiedNet().to(dtype)
    padded = copy.deepcopy(net)
    assert align(padded, pad=True).num_off == 0
    return net, padded


# ---- the report


LAYERS = {
    "Linear": (nn.Linear, {"in_features": 30, "out_features": 50}, {}),
    "Linear of one": (nn.Linear, {"in_features": 1, "out_features": 1}, {}),
    "Linear that fits": (nn.Linear, {"in_features": 16, "out_features": 8}, {}),
    "Conv1d": (nn.Conv1d, {"in_channels": 3, "out_channels": 20}, {"kernel_size": 5}),
    "Conv2d": (nn.Conv2d, {"in_channels": 3, "out_channels": 64}, {"kernel_size": (3, 2)}),
    "Conv3d": (nn.Conv3d, {"in_channels": 9, "out_channels": 7}, {"kernel_size": (1, 2, 3)}),
    "ConvTranspose2d": (nn.ConvTranspose2d, {"in_channels": 9, "out_channels": 7}, {"kernel_size": 2}),
    "RNN": (nn.RNN, {"input_size": 30, "hidden_size": 20}, {}),
    "LSTM": (nn.LSTM, {"input_size": 30, "hidden_size": 20}, {"num_layers": 3, "bidirectional": True}),
    "LSTM with projections": (nn.LSTM, {"input_size": 30, "hidden_size": 70, "proj_size": 5}, {"num_layers": 2}),
    "GRU": (nn.GRU, {"input_size": 8, "hidden_size": 20}, {"num_layers": 2}),
    "RNNCell": (nn.RNNCell, {"input_size": 30, "hidden_size": 20}, {}),
    "LSTMCell": (nn.LSTMCell, {"input_size": 30, "hidden_size": 20}, {}),
    "GRUCell": (nn.GRUCell, {"input_size": 30, "hidden_size": 20}, {}),
}


def num_weights(module):
    return sum(parameter.numel() for parameter in module.parameters() if parameter.dim() > 1)


def padded_sizes(layer):
    return {size.dimension: size.padded for size in layer.sizes}


@pytest.mark.parametrize("multiple", [8, 16, 64])
@pytest.mark.parametrize("name", LAYERS)
def test_cost_is_that_of_a_layer_built_larger(name, multiple):
    kind, sizes, options = LAYERS[name]
    module = kind(**sizes, **options, device="meta")
    (layer,) = align(module, multiple=multiple).layers
    assert {size.dimension: size.size for size in layer.sizes} == sizes
    larger = {dimension: multiple * ((size + multiple - 1) // multiple) for dimension, size in sizes.items()}
    assert padded_sizes(layer) == larger
    built = num_weights(kind(**larger, **options, device="meta"))
    assert layer.num_weights == num_weights(module)
    assert layer.extra_weights == built - num_weights(module)
    assert layer.extra_flops_pct == pytest.approx(100 * (built / num_weights(module) - 1), abs=1e-12)
    assert layer.is_off == (larger != sizes)
    status = "fits" if larger == sizes else "can be padded" if kind is nn.Linear else "fixed"
    assert layer.status == status
    assert bool(layer.reason) == (status == "fixed")


def test_groups_pad_the_channels_of_each_group():
    (layer,) = align(nn.Conv2d(6, 10, 3, groups=2)).layers
    assert padded_sizes(layer) == {"in_channels of a group": 8, "out_channels of a group": 8}
    built = nn.Conv2d(16, 16, 3, groups=2).weight.numel()
    assert layer.num_weights + layer.extra_weights == built


def test_a_depthwise_convolution_is_no_matrix_product():
    (layer,) = align(nn.Conv2d(6, 12, 3, groups=6)).layers
    assert (layer.sizes, layer.status, layer.num_weights) == ((), "fits", 12 * 9)


@pytest.mark.parametrize("others", [{}, {"kdim": 9, "vdim": 16}], ids=["self", "cross"])
def test_attention_is_judged_by_its_head(others):
    report = align(nn.MultiheadAttention(36, 4, **others))
    (layer,) = report.layers  # and not the layer inside that it never calls
    assert report.not_examined == ()
    assert padded_sizes(layer) == {"head_dim": 16, **({"kdim": 16, "vdim": 16} if others else {})}
    larger = nn.MultiheadAttention(64, 4, **(others and {"kdim": 16, "vdim": 16}))
    assert layer.num_weights == num_weights(nn.MultiheadAttention(36, 4, **others))
    assert layer.num_weights + layer.extra_weights == num_weights(larger)
    assert layer.status == "fixed"


def test_the_vocabulary_of_gpt2():
    class GPT2(nn.Module):
        def __init__(self):
            super().__init__()
            self.wte, self.lm_head = nn.Embedding(50257, 768), nn.Linear(768, 50257, bias=False)
            self.lm_head.weight = self.wte.weight

    with torch.device("meta"):
        report = align(GPT2())
    wte, head = report.layers
    assert padded_sizes(head) == {"in_features": 768, "out_features": 50264}
    assert head.extra_weights == 7 * 768 == 5376
    assert f"{head.extra_flops_pct:.3f}" == "0.014"
    assert (wte.status, wte.reason, wte.extra_flops_pct) == ("lookup", "lm_head multiplies by its weight", 0)
    assert report.num_off == 1
    with torch.device("meta"):
        (_, head) = align(GPT2(), multiple=64).layers
    assert (padded_sizes(head)["out_features"], head.extra_weights) == (50304, 47 * 768)


def test_an_embedding_by_itself_multiplies_nothing():
    for module in (nn.Embedding(13, 8), nn.EmbeddingBag(13, 8)):
        report = align(module)
        (layer,) = report.layers
        assert (report.num_off, layer.status, layer.extra_weights, layer.extra_flops_pct) == (0, "lookup", 24, 0)
        assert "where a product reads this weight" in str(report)
    for module in (nn.Embedding(16, 8), nn.Conv2d(16, 8, 3)):
        assert (align(module).layers[0].status, align(module).layers[0].reason) == ("fits", "")


@pytest.mark.parametrize(
    ("policy", "multiple"),
    [
        ("bf16", 8),
        ("fp16", 8),
        ("auto", 8),
        ("tf32", 4),
        ("fp32", 1),
        ("fp32 module:0=bf16", 8),
        ("bf16 module:0=fp32", 1),
        ("bf16 module:0=fp32 tf32=on", 4),
        ("bf16 module:0=fp32 module:[0-9]=fp16", 8),
    ],
)
def test_the_multiple_is_16_bytes_of_what_the_policy_computes_in(policy, multiple):
    report = align(nn.Sequential(nn.Linear(6, 6)), policy)
    assert report.layers[0].multiple == multiple
    assert report.num_off == (multiple > 1)
    assert align(nn.Sequential(nn.Linear(6, 6)), policy, multiple=32).layers[0].multiple == (1 if multiple == 1 else 32)


def test_the_innermost_module_rule_decides():
    model = nn.Sequential(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)), nn.Linear(6, 6))
    report = align(model, "fp16 module:0=fp32 module:0.1=bf16")
    assert [layer.format for layer in report.layers] == ["fp32", "bf16", "fp16"]
    assert [layer.status for layer in report.layers] == ["fits", "can be padded", "can be padded"]


def test_a_model_without_layers_has_an_empty_report():
    report = align(nn.ReLU(), pad=True)
    assert (report.layers, report.not_examined, report.num_off) == ((), (), 0)
    assert str(report) == "bf16: no layer multiplies on tensor cores"


def test_what_was_not_examined_is_named():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.norm, self.bilinear = nn.Linear(8, 8), nn.LayerNorm(8), nn.Bilinear(3, 4, 5)
            self.table = nn.Parameter(torch.zeros(3, 3))
            self.same = self.linear.weight

    report = align(Net())
    assert report.not_examined == ("table", "bilinear.weight")
    assert "holds them: table, bilinear.weight" in str(report)


def test_the_text_is_a_table():
    model = nn.Sequential(nn.Linear(30, 50), nn.Linear(16, 16), nn.Conv2d(3, 8, 3))
    lines = str(align(model)).splitlines()
    assert lines[0] == "bf16: 2 of 3 layers have a size off multiples of 8"
    assert [" ".join(line.split()) for line in lines[1:5]] == [
        "layer kind dimension size padded extra weights extra FLOPs status",
        "0 Linear in_features 30 32 292 19% can be padded",
        "0 Linear out_features 50 56",
        "2 Conv2d in_channels 3 8 360 167% fixed: choose its channels in the model",
    ]
    starts = {line.index(word) for line, word in zip(lines[1:5], ["dimension", "in_", "out_", "in_"], strict=True)}
    assert len(starts) == 1
    assert lines[5].startswith("gain: not known without the card")
    assert str(align(nn.Linear(6, 8))).splitlines()[2].split()[0] == "(the"


def test_the_keys_of_the_report():
    report = align(nn.Sequential(nn.Linear(30, 50)), pad=True)
    document = report.to_dict()
    assert list(document) == ["policy", "num_layers", "num_off", "gain", "layers", "not_examined"]
    assert json.loads(json.dumps(document)) == document
    assert document["layers"] == [
        {
            "name": "0",
            "kind": "PaddedLinear",
            "format": "bf16",
            "multiple": 8,
            "sizes": [
                {"dimension": "in_features", "size": 30, "padded": 32},
                {"dimension": "out_features", "size": 50, "padded": 56},
            ],
            "num_weights": 1500,
            "extra_weights": 292,
            "extra_flops_pct": pytest.approx(100 * 292 / 1500),
            "status": "padded",
            "reason": "",
        }
    ]


# ---- which layers are padded


def kinds(model):
    return [type(module).__name__ for module in model]


def test_nothing_is_padded_unasked():
    model = nn.Sequential(nn.Linear(6, 6))
    align(model)
    assert kinds(model) == ["Linear"]


def test_a_pattern_pads_what_it_matches():
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(3)), nn.Linear(8, 8), nn.Conv1d(3, 3, 3))
    report = align(model, pad="[0-1]")
    assert kinds(model) == ["PaddedLinear", "PaddedLinear", "Linear", "Linear", "Conv1d"]
    assert [layer.status for layer in report.layers] == ["padded", "padded", "can be padded", "fits", "fixed"]
    assert report.num_off == 2
    align(model, pad="*")  # what is fixed stands in the report
    assert kinds(model) == ["PaddedLinear"] * 3 + ["Linear", "Conv1d"]
    assert align(model, pad="3").layers[3].status == "fits"  # nothing to do is fine


def test_padding_again_changes_nothing_and_a_larger_multiple_pads_more():
    model = nn.Sequential(nn.Linear(30, 50, bias=False))
    for multiple, kept, sizes in ((8, 8, (32, 56)), (8, 8, (32, 56)), (16, 16, (32, 64)), (8, 16, (32, 64))):
        (layer,) = align(model, multiple=multiple, pad=True).layers
        assert model[0].multiple == kept
        assert tuple(padded_sizes(layer).values()) == sizes
        assert layer.extra_weights == sizes[0] * sizes[1] - 1500
        assert layer.status == "padded"
    assert align(model, multiple=64).layers[0].status == "can be padded"
    assert align(model, "fp32").layers[0].status == "padded"
    # 30 and 50 are multiples of 10, but 32 and 64 are none, and those are what it multiplies with.
    assert align(model, multiple=10).num_off == 1
    (layer,) = align(model, multiple=10, pad=True).layers
    assert (layer.status, layer.extra_weights) == ("padded", 0)


def test_a_layer_whose_format_has_no_tensor_cores_is_not_padded():
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    align(model, "bf16 module:0=fp32", pad=True)
    assert kinds(model) == ["Linear", "PaddedLinear"]


class Own(nn.Linear):
    def forward(self, input):
        return F.linear(input, 2 * self.weight, self.bias)


def test_linears_that_may_be_something_else_are_left_alone():
    model = nn.Sequential(Own(6, 6), parametrizations.weight_norm(nn.Linear(6, 6)), nn.Linear(6, 6))
    del model[2].weight
    model[2].register_buffer("weight", torch.zeros(6, 6))
    report = align(model, pad=True)
    assert [layer.status for layer in report.layers] == ["fixed"] * 3
    assert [layer.reason.split(" ")[:2] for layer in report.layers] == [["a", "subclass"]] * 2 + [["its", "weight"]]
    attention = nn.MultiheadAttention(36, 4)
    align(attention, pad=True)
    assert not any(isinstance(module, PaddedLinear) for module in attention.modules())


@pytest.mark.parametrize("multiple", [0, -8, 8.0, "8", True, torch.tensor(0), torch.tensor(8.0)])
def test_a_bad_multiple_is_refused(multiple):
    with pytest.raises(HalfstepError, match="sizes are multiples of a whole number"):
        align(nn.Linear(6, 6), multiple=multiple)
    assert align(nn.Linear(6, 6), multiple=torch.tensor(8)).layers[0].multiple == 8


def test_mistakes_are_refused():
    model = nn.ModuleDict({"head": nn.Linear(6, 6), "conv": nn.Conv1d(3, 3, 3), "wte": nn.Embedding(13, 8)})
    with pytest.raises(HalfstepError, match=r"'haed'.*no layer.*Layers that can be padded: head\."):
        align(model, pad="haed")
    with pytest.raises(HalfstepError, match="conv is fixed: choose its channels"):
        align(model, pad="conv")
    with pytest.raises(HalfstepError, match="wte is lookup: it matters where a product"):
        align(model, pad="wte")
    with pytest.raises(HalfstepError, match="module rule 'haed'"):
        align(model, "bf16 module:haed=fp32", pad=True)
    with pytest.raises(HalfstepError, match="one pattern of names"):
        align(model, pad=["head"])
    assert type(model["head"]) is nn.Linear
    with pytest.raises(HalfstepError, match="0, a LazyLinear: a lazy layer has no sizes"):
        align(nn.Sequential(nn.LazyLinear(6)))
    with pytest.raises(HalfstepError, match="fp8"):
        align(model, "fp8")


# ---- the padded layer against the plain one


@pytest.mark.parametrize("dtype", [FULL, torch.float64, BF16, torch.float16], ids=str)
@pytest.mark.parametrize("with_bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_outputs_and_gradients_are_the_same_to_the_bit(shape, with_bias, dtype):
    for multiple in (8, 16, 64):
        plain, padded = twins(nn.Linear(*shape, bias=with_bias), multiple, dtype)
        assert type(padded) is PaddedLinear
        for batch in ((5,), (2, 3), (), (0,)):
            x = whole(*batch, shape[0]).to(dtype)
            assert_same(results(padded, x), results(plain, x))


def test_the_product_runs_with_the_padded_sizes(monkeypatch):
    shapes, linear = [], F.linear
    monkeypatch.setattr(F, "linear", lambda *args: shapes.append([tuple(t.shape) for t in args]) or linear(*args))
    _, padded = twins(nn.Linear(12, 13))
    padded(torch.zeros(3, 12))
    assert shapes == [[(3, 16), (16, 16), (16,)]]


@pytest.mark.parametrize("hardware", [CPU, AMX], ids=["cpu16", "own"])
@both_low
def test_under_a_region_the_bits_and_formats_are_the_same(name, hardware):
    plain, padded = twins(nn.Sequential(nn.Linear(12, 13), nn.ReLU(), nn.Linear(13, 6)))
    x = whole(5, 12)
    outs = []
    for model in (padded, plain):
        region = Region(model, name, hardware)
        with region:
            out = model(x)
        with region.backward():
            out.backward(whole(5, 6, seed=9).to(out.dtype))
        with region.inference():
            assert torch.equal(model(x), out)
        outs.append([out.detach(), *(parameter.grad for parameter in model.parameters())])
        assert out.dtype == LOW[name]
    assert_same(*outs)


@both_low
def test_random_numbers_differ_by_the_order_of_sums_alone(name):
    torch.manual_seed(0)
    plain = nn.Linear(190, 101)
    padded = copy.deepcopy(plain)
    align(padded, name, pad=True)
    x, start = torch.randn(64, 190), torch.randn(64, 101)
    with Region(padded, name, CPU):
        ours = padded(x)
    with Region(plain, name, CPU):
        twin = plain(x)
    # One rounding to 16 bits of sums that differ in their last fp32 bits: the neighbour at most.
    eps = torch.finfo(LOW[name]).eps
    torch.testing.assert_close(ours, twin, rtol=eps, atol=1e-5)
    # fp32: n products in any order, eps n |A||B| at most and far less as a rule; |A||B| is below 200 here.
    for a, b in zip(results(padded, x, start), results(plain, x, start), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=200 * 190 * 2**-24)


@pytest.mark.parametrize(("rule", "error"), [("op:linear=fp32", 1e-6), ("op:linear=fp16", 1e-3)])
def test_an_op_rule_decides_the_format_of_a_padded_product_too(rule, error):
    torch.manual_seed(0)
    plain = nn.Linear(30, 13)
    padded = copy.deepcopy(plain)
    align(padded, pad=True)
    x = torch.randn(4, 30)
    outs = []
    for model in (padded, plain):
        with Region(model, f"bf16 {rule}", AMX):
            outs.append(model(x))
    assert outs[0].dtype == outs[1].dtype != BF16
    assert (outs[0].float() - F.linear(x, plain.weight, plain.bias)).abs().max() < error  # bf16 would give 1e-2
    torch.testing.assert_close(*outs, rtol=0, atol=error)
    assert oplist.active is None


def test_what_autocast_leaves_alone_stays_as_it_is():
    plain, padded = twins(nn.Linear(12, 13), dtype=torch.float64)
    x = whole(5, 12).double() + 2**-20  # exact in float64, lost in bf16
    with torch.autocast("cpu", BF16):
        assert_same(results(padded, x), results(plain, x))


def test_a_module_rule_reaches_a_padded_layer():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 13), nn.Linear(13, 6))
    align(model, pad=True)
    x = torch.randn(4, 30)
    with Region(model, "bf16 module:1=fp32", AMX):
        middle = model[0](x)
        out = model[1](middle)
    assert (middle.dtype, out.dtype) == (BF16, FULL)
    torch.testing.assert_close(out, F.linear(middle.float(), model[1].weight, model[1].bias), rtol=0, atol=1e-6)


def test_zeros_let_no_inf_or_nan_in_or_out():
    plain, padded = twins(nn.Linear(12, 13))
    x, start = whole(4, 12), whole(4, 13, seed=9)
    x[0, 0], x[1, 1], start[2, 2], start[3, 3] = float("inf"), float("nan"), float("inf"), float("nan")
    with torch.no_grad():
        plain.weight[5, 5] = padded.weight[5, 5] = float("inf")
    for a, b in zip(results(padded, x, start), results(plain, x, start), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def test_an_input_of_another_width_is_refused_as_before():
    plain, padded = twins(nn.Linear(12, 13))
    for x in (torch.zeros(3, 11), torch.zeros(3, 16), torch.zeros(16), torch.tensor(1.0)):
        with pytest.raises(RuntimeError) as expected:
            plain(x)
        with pytest.raises(RuntimeError) as found:
            padded(x)
        assert str(found.value) == str(expected.value)


def test_the_output_may_be_changed_in_place_and_reshaped():
    plain, padded = twins(nn.Sequential(nn.Linear(12, 13), nn.ReLU(inplace=True)))
    x = whole(2, 3, 12)
    assert_same(results(padded, x), results(plain, x))
    logits = padded[0](x)
    assert logits.view(-1, 13).shape == (6, 13)
    assert logits.reshape(-1).shape == (78,)
    with pytest.raises(RuntimeError, match=r"Use \.reshape"):
        logits.view(-1)
    assert logits.to(torch.float64).is_contiguous()  # a cast, as of logits before a loss, closes the gaps


class Written(TorchDispatchMode):
    """Dtype and shape of the tensors that are joined, and of those that are filled with zeros."""

    def __init__(self):
        super().__init__()
        self.joined, self.filled = [], []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket._qualified_op_name
        if name == "aten::cat":
            self.joined.append((result.dtype, tuple(result.shape)))
        if name in ("aten::zeros", "aten::new_zeros", "aten::zero_", "aten::constant_pad_nd"):
            self.filled.append(result.numel())
        return result


@both_low
def test_padding_copies_what_the_page_counts(name):
    """An output: the 16-bit weight and the gradient, once. An input: the weight and the input. Fills: the padding."""
    for shape, forward, backward in (
        ((16, 13), [(16, 16)], [(100, 16)]),
        ((12, 16), [(100, 16), (16, 16)], []),
        ((12, 13), [(100, 16), (13, 16), (16, 16)], [(100, 16)]),
        ((16, 16), [], []),
    ):
        padded = nn.Linear(*shape, bias=False)
        align(padded, pad=True)
        x = whole(100, shape[0]).requires_grad_()
        region = Region(padded, name, AMX)
        with region, Written() as written:
            out = padded(x)
        assert written.joined == [(LOW[name], size) for size in forward]
        with region.backward(), Written() as written_back:
            out.backward(torch.ones_like(out))
        assert written_back.joined == [(LOW[name], size) for size in backward]
        assert max(written.filled + written_back.filled, default=0) <= 100 * 4


def test_hooks_see_the_true_shapes():
    _, padded = twins(nn.Linear(12, 13))
    shapes = []
    padded.register_forward_hook(lambda module, args, out: shapes.append((args[0].shape, out.shape)))
    padded.register_full_backward_hook(
        lambda module, grad_in, grad_out: shapes.append((grad_in[0].shape, grad_out[0].shape))
    )
    padded(whole(5, 12).requires_grad_()).sum().backward()
    assert shapes == [((5, 12), (5, 13)), ((5, 12), (5, 13))]


def test_copies_are_padded_too():
    plain, padded = twins(nn.Sequential(nn.Linear(12, 13)))
    x = whole(5, 12)
    stream = io.BytesIO()
    torch.save(padded, stream)
    stream.seek(0)
    copies = [copy.deepcopy(padded), pickle.loads(pickle.dumps(padded)), torch.load(stream, weights_only=False)]
    for model in copies:
        assert (type(model[0]), model[0].multiple) == (PaddedLinear, 8)
        assert_same(results(model, x), results(plain, x))
    assert "in_features=12, out_features=13, bias=True, multiple=8" in repr(copies[0])
    moved = padded.double().to("meta")
    assert moved(torch.zeros(5, 12, dtype=torch.float64, device="meta")).shape == (5, 13)


def test_transforms_of_torch_go_through():
    plain, padded = twins(nn.Linear(6, 5), dtype=torch.float64)
    x = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, w: F.softmax(padded(x), -1) * w.sum(), (x, padded.weight))
    assert torch.autograd.gradgradcheck(lambda x: padded(x).sin(), (x,))

    def per_sample(model):
        def loss(parameters, sample):
            return torch.func.functional_call(model, parameters, (sample,)).pow(2).sum()

        return torch.func.vmap(torch.func.grad(loss), (None, 0))(dict(model.named_parameters()), whole(4, 6).double())

    ours, twin = per_sample(padded), per_sample(plain)
    assert_same(ours.values(), twin.values())
    again = checkpoint(padded, x, use_reentrant=False)
    assert torch.equal(again, padded(x))


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16"])
def test_it_compiles_as_one_graph(autocast):
    plain, padded = twins(nn.Sequential(nn.Linear(12, 13), nn.ReLU(), nn.Linear(13, 6)))
    compiled = torch.compile(padded, backend="aot_eager", fullgraph=True)
    x = whole(5, 12)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        assert_same(results(compiled, x), results(plain, x))


def test_sums_over_a_softmax_do_not_see_the_padding():
    net, padded = tied_twins()
    tokens = torch.arange(13)[None]
    p = F.softmax(padded(tokens), -1)
    assert p.shape == (1, 13, 13)
    torch.testing.assert_close(p.sum(-1), torch.ones(1, 13, dtype=torch.float64))
    torch.testing.assert_close(p, F.softmax(net(tokens), -1))


@pytest.mark.gpu
@both_low
def test_on_a_card_the_bits_are_the_same(name):
    plain, padded = twins(nn.Linear(12, 13).to("cuda"))
    x = whole(5, 12).to("cuda")
    start = whole(5, 13, seed=9).to("cuda", LOW[name])
    with torch.autocast("cuda", LOW[name]):
        assert_same(results(padded, x, start), results(plain, x, start))


# ---- training


OPTIMIZERS = {
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
    "fused AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1, fused=True),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=1e-3),
}


def train(net, make, num_steps=50):
    optimizer = make(net.parameters())
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(num_steps):
        tokens = torch.randint(13, (4, 7), generator=generator)
        loss = F.cross_entropy(net(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return optimizer, losses


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fifty_steps_give_the_same_weights_and_states(name):
    net, padded = tied_twins()
    twin_optimizer, twin_losses = train(net, OPTIMIZERS[name])
    optimizer, losses = train(padded, OPTIMIZERS[name])
    assert losses[-1] < losses[0]
    # fp64 rounds at 1e-16; fifty steps of an optimizer that divides by small roots may lose six digits of it.
    close = {"rtol": 1e-9, "atol": 1e-10}
    torch.testing.assert_close(losses, twin_losses, **close)
    assert padded.head.weight is padded.wte.weight
    for key, value in net.state_dict().items():
        torch.testing.assert_close(padded.state_dict()[key], value, **close)
    twin_state = twin_optimizer.state_dict()["state"]
    for number, state in optimizer.state_dict()["state"].items():
        torch.testing.assert_close(state, twin_state[number], **close)
    # Checkpoints go both ways, of the optimizer too.
    fresh = TiedNet().double()
    fresh.load_state_dict(padded.state_dict(), strict=True)
    padded.load_state_dict(net.state_dict(), strict=True)
    twin_optimizer.load_state_dict(optimizer.state_dict())
    assert [*padded.state_dict()] == [*net.state_dict()]
    torch.testing.assert_close(fresh(torch.arange(13)), padded(torch.arange(13)), **close)


def test_padding_in_the_middle_of_a_run_keeps_optimizer_and_parameters():
    net = TiedNet().double()
    optimizer, _ = train(net, OPTIMIZERS["AdamW"], 3)
    before = {name: id(parameter) for name, parameter in net.named_parameters()}
    twin = copy.deepcopy(net)
    align(net, pad=True)
    assert before == {name: id(parameter) for name, parameter in net.named_parameters()}
    tokens = torch.arange(13)
    net(tokens).sum().backward()
    optimizer.step()
    assert not torch.equal(net.up.weight, twin.up.weight)


@pytest.mark.parametrize("policy", ["fp32", "bf16", "fp16"])
def test_a_stepper_trains_both_alike(policy):
    net, padded = tied_twins(FULL)
    reports = []
    for model in (padded, net):
        torch.manual_seed(1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        stepper = Stepper(model, optimizer, policy, accumulate=2, max_norm=1.0, hardware=CPU)
        found = []
        for _ in range(50):
            tokens = torch.randint(13, (4, 7))
            report = stepper.step(
                lambda tokens=tokens, model=model: F.cross_entropy(
                    model(tokens).float().flatten(0, 1), tokens.roll(-1, 1).flatten()
                )
            )
            if report:
                found.append((report.loss, report.grad_norm, report.scale, report.applied))
        reports.append(found)
    for ours, twin in zip(*reports, strict=True):
        # Sums in another order may round a 16-bit value to its neighbour, which training carries on: 1% of the loss.
        assert ours[0] == pytest.approx(twin[0], rel=1e-2 if policy != "fp32" else 1e-4)
        assert ours[2:] == twin[2:]
    assert reports[0][-1][0] < reports[0][0][0]


def test_tokens_beyond_the_vocabulary_are_refused_and_padding_idx_stays():
    _, padded = tied_twins()
    for token in (13, 15, 16, -1):
        with pytest.raises(IndexError):
            padded(torch.tensor([token]))
    embedding = padded.wte(torch.tensor([0, 1]))
    embedding.sum().backward()
    assert padded.wte.padding_idx == 0
    assert padded.wte.weight.grad[0].abs().sum() == 0
    assert padded.wte.weight.grad.shape == (13, 10)


# ---- the figure


def test_the_figure_is_what_its_script_draws(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    script = runpy.run_path(str(ROOT / "benchmarks" / "figure_align.py"))
    assert (ROOT / "docs" / "align.svg").read_text() == script["draw"]()
    card = next(card for card in CARDS if card.name == "A100 SXM4 80GB")
    # 4 N (M + K) bytes at 2039 GB/s beside 6 M K N operations at 312 TFLOPS; N cancels.
    rows, width, vocabulary = 8192, 768, 50257
    copies = 4 * vocabulary * (rows + width) / 2039e9
    products = 6 * rows * width * vocabulary / 312e12
    assert script["copies_pct"](card, width, rows) == pytest.approx(100 * copies / products)
