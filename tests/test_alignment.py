"""What align reports, against layers that are really built larger; which layers it pads; the figure of its costs."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

from halfstep.alignment import PaddedLinear, align
from halfstep.errors import HalfstepError
from halfstep.hardware import CARDS

ROOT = Path(__file__).parent.parent

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
