"""A padded layer against the plain one.

Twins of small whole numbers are compared to the bit: every sum is exact, whatever order a kernel adds in.
"""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from reference.nets import AMX, BF16, CPU, FULL, LOW
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from halfstep import oplist
from halfstep.alignment import PaddedLinear, align
from halfstep.region import Region

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


@pytest.mark.gpu
@both_low
def test_on_a_card_the_bits_are_the_same(name):
    plain, padded = twins(nn.Linear(12, 13).to("cuda"))
    x = whole(5, 12).to("cuda")
    start = whole(5, 13, seed=9).to("cuda", LOW[name])
    with torch.autocast("cuda", LOW[name]):
        assert_same(results(padded, x, start), results(plain, x, start))
