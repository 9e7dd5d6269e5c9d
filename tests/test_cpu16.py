"""16-bit products on a CPU without 16-bit instructions, against float64 twins in units of what the format costs."""

from __future__ import annotations

import contextlib
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from reference import products

from halfstep import cpu16

HALF = [torch.float16, torch.bfloat16]
INF, NAN = math.inf, math.nan
both = pytest.mark.parametrize("dtype", HALF, ids=["fp16", "bf16"])


@contextlib.contextmanager
def installed(active=True):
    cpu16.kernels.acquire()
    cpu16.active = active
    try:
        yield
    finally:
        cpu16.active = False
        cpu16.kernels.release()


@pytest.fixture
def on():
    with installed():
        yield


@pytest.fixture
def widened(monkeypatch):
    """The shapes that our kernels widened: they are in use, not torch's own."""
    shapes, own = [], cpu16._widen

    def widen(value):
        if isinstance(value, torch.Tensor):
            shapes.append(tuple(value.shape))
        return own(value)

    monkeypatch.setattr(cpu16, "_widen", widen)
    return shapes


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


# ---- the twin itself


@both
def test_the_twin_rounds_once(dtype):
    midpoint = 1 + torch.finfo(dtype).eps / 2
    values = torch.tensor([midpoint, midpoint + 2.0**-40, midpoint - 2.0**-40, 1.0, 1e300, -0.0], dtype=torch.float64)
    up = 1 + torch.finfo(dtype).eps
    assert products.rounded(values, dtype).tolist() == [1.0, up, 1.0, 1.0, INF, 0.0]
    # Going through fp32 would have lost the 2^-40.
    assert values.to(dtype).tolist() != products.rounded(values, dtype).tolist()


def test_the_twin_rounds_to_fp16_as_numpy_does():
    values = randn(4000, seed=1).double() * torch.logspace(-9, 6, 4000, dtype=torch.float64)
    with np.errstate(over="ignore"):
        expected = torch.from_numpy(values.numpy().astype(np.float16))
    assert torch.equal(products.rounded(values, torch.float16), expected)


@both
def test_the_measure_tells_a_right_product_from_one_that_sums_in_16_bit(dtype, on):
    a, b = randn(16, 1024, dtype=dtype), randn(1024, 16, seed=1, dtype=dtype)
    exact, magnitude = products.exact(a, b), products.exact(a.abs(), b.abs())
    limit = products.bound(1024, dtype)
    right = products.error(torch.mm(a, b), exact, magnitude)
    # Random signs cancel, so that a sum is small beside |A||B| and its one rounding costs little of it.
    assert right < limit
    assert right < 0.1
    positive = products.error(torch.mm(a.abs(), b.abs()), magnitude, magnitude)
    assert 0.1 < positive < limit
    # The planted fault: partial sums in 16 bit.
    wrong = products.product_that_sums_in_16_bit(a.abs(), b.abs())
    assert products.error(wrong, magnitude, magnitude) > 3 > 2 * limit


@both
def test_the_product_is_the_twin_but_for_values_next_to_a_tie(dtype, on):
    a, b = randn(33, 65, dtype=dtype), randn(65, 17, seed=1, dtype=dtype)
    ours, twin = torch.mm(a, b), products.product(a, b)
    assert (ours == twin).float().mean() > 0.98
    assert products.error(twin, products.exact(a, b), products.exact(a.abs(), b.abs())) <= 0.5
    # Small integers are exact in every step, whatever the order of the sums.
    a, b = torch.randint(-3, 4, (9, 20), dtype=dtype), torch.randint(-3, 4, (20, 7), dtype=dtype)
    assert torch.equal(torch.mm(a, b), products.product(a, b))


# ---- every operation that is linear in each of its inputs, forward and backward


OURS = (lambda x: x, lambda factor: factor)
EXACT = (lambda x: x.double(), lambda factor: factor)
SIZE = (lambda x: x.double().abs(), abs)
COUNT = (lambda x: torch.ones_like(x, dtype=torch.float64), lambda factor: 1.0)


def check(function, inputs, dtype, num_grad_roundings=1):
    """Compare ``function`` of 16-bit ``inputs``, and its gradients, with float64.

    |A||B| is the same function of absolute values, and the number of summands the same function of ones. It is called
    with the inputs and with what becomes of its own factors, such as alpha.
    """

    def run(change, factor):
        leaves = [None if x is None else change(x.detach()).requires_grad_() for x in inputs]
        result = function(leaves, factor)
        start = change(randn(*result.shape, seed=5, dtype=dtype))
        return [result.detach(), *torch.autograd.grad(result, [x for x in leaves if x is not None], start)]

    outputs = zip(run(*OURS), run(*EXACT), run(*SIZE), run(*COUNT), strict=True)
    for place, (ours, exact, size, count) in enumerate(outputs):
        assert ours.dtype == dtype
        assert ours.shape == exact.shape
        # Three more fp32 roundings: alpha, beta and their sum.
        limit = products.bound(count.max().item() + 3, dtype, num_grad_roundings if place else 1)
        assert products.error(ours, exact, size) <= limit, f"output {place}"


PRODUCTS = {
    "mm": (lambda x, _: torch.mm(*x), [(7, 33), (33, 5)]),
    "mm of a row": (lambda x, _: torch.mm(*x), [(1, 300), (300, 1)]),
    "bmm": (lambda x, _: torch.bmm(*x), [(3, 7, 33), (3, 33, 5)]),
    "mv": (lambda x, _: torch.mv(*x), [(7, 33), (33,)]),
    "dot": (lambda x, _: torch.dot(*x), [(100,), (100,)]),
    "addmm": (lambda x, _: torch.addmm(*x), [(7, 5), (7, 33), (33, 5)]),
    "addmm with a row": (lambda x, _: torch.addmm(*x), [(5,), (7, 33), (33, 5)]),
    "addmv": (lambda x, _: torch.addmv(*x), [(7,), (7, 33), (33,)]),
    "baddbmm": (lambda x, _: torch.baddbmm(*x), [(3, 7, 5), (3, 7, 33), (3, 33, 5)]),
    "linear": (lambda x, _: F.linear(*x), [(2, 7, 33), (5, 33), (5,)]),
    "matmul": (lambda x, _: x[0] @ x[1], [(2, 3, 7, 9), (9, 5)]),
    "einsum": (lambda x, _: torch.einsum("bik,bjk->bij", *x), [(2, 7, 9), (2, 5, 9)]),
}
FACTORS = {
    "addmm": (lambda x, f: torch.addmm(*x, beta=f(-0.7), alpha=f(1.3)), [(7, 5), (7, 33), (33, 5)]),
    "addmv": (lambda x, f: torch.addmv(*x, beta=f(0.3), alpha=f(-1.7)), [(7,), (7, 33), (33,)]),
    "baddbmm": (lambda x, f: torch.baddbmm(*x, beta=f(-2.5), alpha=f(0.1)), [(3, 7, 5), (3, 7, 33), (3, 33, 5)]),
    "baddbmm of keywords": (
        lambda x, f: torch.baddbmm(input=x[0], batch1=x[1], batch2=x[2], beta=f(0.5), alpha=f(2.0)),
        [(3, 1, 5), (3, 7, 33), (3, 33, 5)],
    ),
}


@both
@pytest.mark.parametrize("name", PRODUCTS)
def test_products(name, dtype, on, widened):
    function, shapes = PRODUCTS[name]
    check(function, [randn(*shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes)], dtype)
    assert len(widened) >= len(shapes)


@both
@pytest.mark.parametrize("name", FACTORS)
def test_products_with_factors(name, dtype, on, widened):
    # Autograd multiplies a 16-bit product by alpha or beta, which rounds a second time.
    function, shapes = FACTORS[name]
    inputs = [randn(*shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes)]
    check(function, inputs, dtype, num_grad_roundings=2)
    assert widened


@both
def test_a_beta_of_zero_ignores_what_is_added(dtype, on):
    a, b, c = randn(4, 6, dtype=dtype), randn(6, 3, dtype=dtype), torch.full((4, 3), NAN, dtype=dtype)
    assert torch.equal(torch.addmm(c, a, b, beta=0), torch.mm(a, b))
    assert torch.equal(torch.addmm(c, a, b, beta=0, alpha=2), 2 * torch.mm(a, b))
    assert torch.equal(torch.baddbmm(c[None], a[None], b[None], beta=0), torch.bmm(a[None], b[None]))


VIEWS = {
    "transposed": lambda x: x.mT.contiguous().mT,
    "strided": lambda x: torch.stack([x, x + 1], -1)[..., 0],
    "shifted": lambda x: torch.cat([x.new_ones(3), x.flatten()])[3:].view(x.shape),
    "expanded": lambda x: x[..., :1].expand(x.shape),
    "flipped": lambda x: x.flip(-1),
}


@both
@pytest.mark.parametrize("view", VIEWS)
def test_views_give_the_bits_of_their_copies(view, dtype, on):
    change = VIEWS[view]
    a, b, c = (change(randn(*shape, dtype=dtype)) for shape in ((6, 8), (8, 4), (6, 4)))
    assert not a.is_contiguous() or view in ("shifted", "flipped")
    plain = [x.clone(memory_format=torch.contiguous_format) for x in (a, b, c)]
    assert torch.equal(torch.mm(a, b), torch.mm(plain[0], plain[1]))
    assert torch.equal(torch.addmm(c, a, b), torch.addmm(plain[2], plain[0], plain[1]))
    assert torch.equal(torch.mv(a, b[:, 0]), torch.mv(plain[0], plain[1][:, 0].clone()))
    assert torch.equal(torch.bmm(a[None], b[None]), torch.bmm(plain[0][None], plain[1][None]))
    check(lambda x, _: torch.mm(change(x[0]), change(x[1])), [plain[0], plain[1]], dtype)


EMPTY = {
    "no rows": (torch.mm, [(0, 4), (4, 3)]),
    "no sum": (torch.mm, [(2, 0), (0, 3)]),
    "no sum to add": (torch.addmm, [(2, 3), (2, 0), (0, 3)]),
    "no batch": (torch.bmm, [(0, 2, 4), (0, 4, 3)]),
    "no batch to add": (torch.baddbmm, [(0, 2, 3), (0, 2, 4), (0, 4, 3)]),
    "no vector": (torch.mv, [(3, 0), (0,)]),
    "no vector to add": (torch.addmv, [(3,), (3, 0), (0,)]),
    "no dot": (torch.dot, [(0,), (0,)]),
    "no images": (F.conv2d, [(0, 3, 5, 5), (4, 3, 3, 3), (4,)]),
    "no heads": (F.scaled_dot_product_attention, [(0, 2, 4, 8)] * 3),
}


@both
@pytest.mark.parametrize("name", EMPTY)
def test_empty_inputs_are_what_they_are_in_fp32(name, dtype, on):
    function, shapes = EMPTY[name]
    results = []
    for kind in (dtype, torch.float32):
        inputs = [randn(*shape, dtype=dtype).to(kind).requires_grad_() for shape in shapes]
        result = function(*inputs)
        grads = torch.autograd.grad(result.sum(), inputs)
        assert result.dtype == kind
        results.append([result, *grads])
    for low, full in zip(*results, strict=True):
        assert low.shape == full.shape
        assert torch.equal(low.float(), full)


CONVOLUTIONS = {
    "1d": (F.conv1d, (2, 3, 11), (4, 3, 3), {}),
    "1d padded same": (F.conv1d, (2, 3, 11), (4, 3, 3), {"padding": "same"}),
    "2d": (F.conv2d, (2, 3, 7, 6), (4, 3, 3, 2), {}),
    "2d strided": (F.conv2d, (2, 3, 9, 8), (4, 3, 3, 3), {"stride": (2, 3), "padding": 1}),
    "2d dilated": (F.conv2d, (2, 3, 9, 8), (4, 3, 3, 3), {"dilation": 2}),
    "2d grouped": (F.conv2d, (2, 4, 7, 6), (6, 2, 3, 3), {"groups": 2, "padding": 1}),
    "2d depthwise": (F.conv2d, (2, 4, 7, 6), (4, 1, 3, 3), {"groups": 4}),
    "2d pointwise": (F.conv2d, (2, 16, 3, 3), (8, 16, 1, 1), {}),
    "2d of one image": (F.conv2d, (3, 7, 6), (4, 3, 3, 3), {}),
    "3d": (F.conv3d, (1, 2, 5, 4, 6), (3, 2, 3, 2, 3), {"padding": 1}),
    "1d transposed": (F.conv_transpose1d, (2, 3, 5), (3, 4, 3), {"stride": 2, "output_padding": 1}),
    "2d transposed": (F.conv_transpose2d, (2, 4, 5, 4), (4, 3, 3, 3), {"stride": 2, "padding": 1, "groups": 2}),
    "3d transposed": (F.conv_transpose3d, (1, 2, 3, 3, 3), (2, 3, 2, 2, 2), {"stride": 2}),
}


@both
@pytest.mark.parametrize("with_bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions(name, with_bias, dtype, on, widened):
    function, x, weight, options = CONVOLUTIONS[name]
    num_outputs = weight[1] * options.get("groups", 1) if "transposed" in name else weight[0]
    inputs = [randn(*x, dtype=dtype), randn(*weight, seed=1, dtype=dtype)]
    inputs.append(randn(num_outputs, seed=2, dtype=dtype) if with_bias else None)
    check(lambda x, _: function(*x, **options), inputs, dtype)
    assert widened


@both
def test_a_convolution_of_channels_last_images(dtype, on):
    x = randn(2, 4, 7, 6, dtype=dtype).to(memory_format=torch.channels_last)
    weight = randn(5, 4, 3, 3, seed=1, dtype=dtype)
    result = F.conv2d(x, weight)
    assert result.is_contiguous(memory_format=torch.channels_last)
    check(lambda x, _: F.conv2d(x[0].to(memory_format=torch.channels_last), x[1]), [x, weight], dtype)


@both
@pytest.mark.parametrize("mask", [(True, True, True), (True, False, True), (False, False, True), (False, False, False)])
def test_each_gradient_of_a_convolution_is_16_bit_before_autograd_sees_it(mask, dtype, on):
    # Autograd would cast one that comes back in fp32 without a word.
    x, weight = randn(2, 3, 6, dtype=dtype), randn(4, 3, 3, seed=1, dtype=dtype)
    grad = randn(2, 4, 4, seed=2, dtype=dtype)
    grads = torch.ops.aten.convolution_backward(grad, x, weight, [4], [1], [0], [1], False, [0], 1, mask)
    for grad, wanted in zip(grads, mask, strict=True):
        assert grad is not None or not wanted
        assert grad is None or grad.dtype == dtype


@both
@pytest.mark.parametrize("trained", ["x", "weight", "bias", "x weight", "weight bias", "x bias"])
def test_a_convolution_of_which_a_part_is_frozen(trained, dtype, on):
    inputs = {
        "x": randn(2, 3, 7, 6, dtype=dtype),
        "weight": randn(4, 3, 3, 3, seed=1, dtype=dtype),
        "bias": randn(4, seed=2, dtype=dtype),
    }
    grads = []
    for names in (trained.split(), list(inputs)):
        leaves = {name: x.clone().requires_grad_(name in names) for name, x in inputs.items()}
        F.conv2d(leaves["x"], leaves["weight"], leaves["bias"]).sum().backward()
        grads.append({name: leaf.grad for name, leaf in leaves.items()})
    for name, all_trained in grads[1].items():
        if name in trained.split():
            assert grads[0][name].dtype == dtype
            assert torch.equal(grads[0][name], all_trained)
        else:
            assert grads[0][name] is None


# ---- attention

MASKS = {
    "none": lambda length, dtype: {},
    "causal": lambda length, dtype: {"is_causal": True},
    "no dropout": lambda length, dtype: {"dropout_p": 0.0},
    "scale": lambda length, dtype: {"scale": 0.3},
    "bool": lambda length, dtype: {"attn_mask": torch.ones(length, 9).tril(3).bool()},
    "16 bit": lambda length, dtype: {"attn_mask": randn(length, 9, dtype=dtype)},
    "fp32": lambda length, dtype: {"attn_mask": randn(2, 1, length, 9)},
    "minus infinity": lambda length, dtype: {"attn_mask": torch.full((length, 9), -INF).triu(4).to(dtype)},
    "lowest": lambda length, dtype: {"attn_mask": torch.full((length, 9), torch.finfo(dtype).min).triu(4).to(dtype)},
}


def attention_twin(q, k, v, start, attn_mask=None, is_causal=False, dropout_p=0.0, scale=None):
    """softmax(scale Q K^T + mask) V in float64, its gradients, and the magnitude of each.

    The backward pass takes sum(dO x O) with the rounded output O, and dS = P x (dO V^T - that), so a gradient of Q or K
    inherits half a unit of |dO||O| besides its own rounding.
    """
    assert dropout_p == 0.0
    q, k, v, start = (x.double() for x in (q, k, v, start))
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    scores = scale * q @ k.mT
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:]).tril().bool()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -INF)
    elif attn_mask is not None:
        scores = scores + attn_mask.double()
    p = torch.softmax(scores, -1)
    output = p @ v
    delta = (start * output).sum(-1, keepdim=True)
    ds = p * (start @ v.mT - delta)
    ds_size = p * (start.abs() @ v.mT.abs() + (start.abs() * (p @ v.abs())).sum(-1, keepdim=True))
    exact = [output, scale * ds @ k, scale * ds.mT @ q, p.mT @ start]
    sizes = [p @ v.abs(), scale * ds_size @ k.abs(), scale * ds_size.mT @ q.abs(), p.mT @ start.abs()]
    return exact, sizes


@both
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("shape", [(2, 3, 9, 8), (2, 1, 5, 3), (2, 2, 1, 16)], ids=str)
def test_attention(shape, mask, dtype, on, widened):
    options = MASKS[mask](shape[-2], dtype)
    keys = (*shape[:2], 9, shape[-1])
    q, k, v = (randn(*s, seed=i, dtype=dtype).requires_grad_() for i, s in enumerate((shape, keys, keys)))
    result = F.scaled_dot_product_attention(q, k, v, **options)
    start = randn(*shape, seed=7, dtype=dtype)
    got = [result, *torch.autograd.grad(result, (q, k, v), start)]
    assert len([size for size in widened if size == tuple(shape)]) >= 3
    exact, sizes = attention_twin(q.detach(), k.detach(), v.detach(), start, **options)
    # fp32 terms: the sums over keys and features, and the scores, whose error the exponential magnifies by their size.
    num_terms = 9 + shape[-1] + 16
    for place, (a, b, size) in enumerate(zip(got, exact, sizes, strict=True)):
        assert a.dtype == dtype
        limit = products.bound(num_terms, dtype, 2 if place in (1, 2) else 1)
        assert products.error(a, b, size) <= limit, f"output {place}"


@both
def test_attention_with_dropout_and_with_a_mask_that_learns(dtype, on):
    # torch takes another road here, which widens by itself.
    q, k, v = (randn(1, 2, 4, 8, seed=i, dtype=dtype).requires_grad_() for i in range(3))
    mask = randn(4, 4, dtype=dtype).requires_grad_()
    F.scaled_dot_product_attention(q, k, v, attn_mask=mask).sum().backward()
    F.scaled_dot_product_attention(q, k, v, dropout_p=0.5).sum().backward()
    assert all(x.grad.dtype == dtype and torch.isfinite(x.grad).all() for x in (q, k, v, mask))


@both
def test_attention_with_fewer_heads_for_keys(dtype, on):
    q, k = randn(2, 4, 5, 8, dtype=dtype), randn(2, 2, 5, 8, seed=1, dtype=dtype)
    result = F.scaled_dot_product_attention(q, k, k, enable_gqa=True)
    wide = k.repeat_interleave(2, 1)
    assert torch.equal(result, F.scaled_dot_product_attention(q, wide, wide))


# ---- overflow, infinities, NaN


def test_a_sum_beyond_the_largest_number_is_an_infinity_of_its_sign(on):
    a = torch.tensor([[65504.0, 15.0], [65504.0, 16.0], [-65504.0, -16.0], [60000.0, 60000.0]]).half()
    ones = torch.ones(2, 1).half()
    # 65519 rounds down to 65504, 65520 is the tie that goes to infinity.
    assert torch.mm(a, ones)[:, 0].tolist() == [65504, INF, -INF, INF]
    assert torch.mv(a, ones[:, 0]).tolist() == [65504, INF, -INF, INF]
    assert torch.bmm(a[None], ones[None])[0, :, 0].tolist() == [65504, INF, -INF, INF]
    assert torch.dot(a[3], a[3]).item() == INF
    image = a.T.reshape(1, 2, 4)
    assert F.conv1d(image, ones.view(1, 2, 1))[0, 0].tolist() == [65504, INF, -INF, INF]
    # An overflow on the way is none, since sums are fp32: 60000 + 60000 - 60000.
    assert torch.mm(torch.tensor([[60000.0, 60000, -60000]]).half(), torch.ones(3, 1).half()).item() == 60000
    assert torch.addmm(torch.tensor([[-60000.0]]).half(), a[3:], ones).item() == 60000


def test_bf16_overflows_where_fp32_does(on):
    big = torch.tensor([[torch.finfo(torch.bfloat16).max, 1.0]]).bfloat16()
    assert torch.mm(big, torch.tensor([[2.0], [0.0]]).bfloat16()).item() == INF
    assert torch.mm(big, torch.tensor([[-2.0], [0.0]]).bfloat16()).item() == -INF
    assert torch.mm(big, torch.tensor([[1.0], [0.0]]).bfloat16()).item() == big[0, 0].item()


def test_gradients_overflow_too(on):
    a = torch.ones(1, 4).half().requires_grad_()
    b = torch.tensor([[300.0, -300.0]] * 4).half()
    (grad,) = torch.autograd.grad(torch.mm(a, b), a, torch.tensor([[300.0, 0.0]]).half())
    assert grad.tolist() == [[INF] * 4]
    (grad,) = torch.autograd.grad(torch.mm(a, b), a, torch.tensor([[0.0, 300.0]]).half())
    assert grad.tolist() == [[-INF] * 4]


@both
def test_nan_and_infinity_go_through(dtype, on):
    a = torch.tensor([[NAN, 0.0], [INF, 1.0], [-INF, 1.0], [INF, -INF], [1.0, 2.0]], dtype=dtype)
    got = torch.mm(a, torch.ones(2, 1, dtype=dtype))[:, 0].tolist()
    assert math.isnan(got[0])
    assert got[1:3] == [INF, -INF]
    assert math.isnan(got[3])
    assert got[4] == 3
    zero = torch.mm(a, torch.zeros(2, 1, dtype=dtype))[:, 0].tolist()
    assert [math.isnan(value) for value in zero] == [True, True, True, True, False]
    sums = F.conv1d(a.T.reshape(1, 2, 5), torch.ones(1, 2, 1, dtype=dtype))
    assert sums.isnan()[0, 0].tolist() == [True, False, False, True, False]


@both
@pytest.mark.parametrize("width", [1, 2, 17])
def test_all_65536_values_times_one_come_back_bit_for_bit(width, dtype, on):
    bits = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    values = bits.view(dtype)
    # Infinity times the zeros beside the one is NaN, so the other columns of a wider product hold none of it.
    a, b = torch.zeros(2**16, width, dtype=dtype), torch.zeros(width, width, dtype=dtype)
    a[:, 0], b[0, 0] = values, 1.0
    for got in (torch.mm(a, b)[:, 0], torch.mv(a, b[:, 0]), torch.bmm(a[None], b[None])[0, :, 0]):
        assert torch.equal(got.isnan(), values.isnan())
        same = (got.view(torch.int16) == bits) | values.isnan()
        # A sum starts from +0, and +0 + -0 is +0.
        assert values[~same].tolist() in ([], [0.0])


# ---- only where they are asked for


def some_results(dtype):
    """Results and gradients of one call of each operation."""
    results = []
    calls = [(lambda x, f=f: f(x, float), shapes) for f, shapes in [*PRODUCTS.values(), *FACTORS.values()]]
    for function, x, weight, options in CONVOLUTIONS.values():
        calls.append((lambda x, f=function, o=options: f(*x, **o), [x, weight]))
    calls.append((lambda x: F.scaled_dot_product_attention(*x, is_causal=True), [(2, 3, 9, 8)] * 3))
    for function, shapes in calls:
        inputs = [randn(*shape, seed=i).to(dtype).requires_grad_() for i, shape in enumerate(shapes)]
        result = function(inputs)
        results += [result.detach(), *torch.autograd.grad(result.sum(), inputs)]
    return results


@pytest.mark.parametrize("dtype", [*HALF, torch.float32, torch.float64], ids=["fp16", "bf16", "fp32", "fp64"])
def test_outside_of_a_region_torch_gives_the_same_bits_as_without_us(dtype, widened):
    before = some_results(dtype)
    with installed(active=False):
        between = some_results(dtype)
    after = some_results(dtype)
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(before, between, after, strict=True))
    assert not widened


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
def test_wide_products_are_torchs_own_in_a_region_too(dtype, widened):
    before = some_results(dtype)
    with installed():
        assert all(torch.equal(a, b) for a, b in zip(before, some_results(dtype), strict=True))
    assert not widened


def test_integers_are_torchs_own(on, widened):
    a = torch.arange(6).view(2, 3)
    assert torch.equal(torch.mm(a, a.T), torch.tensor([[5, 14], [14, 50]]))
    assert not widened


MIXED = {
    "mm": lambda low, full: torch.mm(low, full),
    "mm the other way": lambda low, full: torch.mm(full, low),
    "addmm": lambda low, full: torch.addmm(low, full, full),
    "bmm": lambda low, full: torch.bmm(low[None], full[None]),
    "mv": lambda low, full: torch.mv(low, full[0]),
    "dot": lambda low, full: torch.dot(low[0], full[0]),
    "conv": lambda low, full: F.conv1d(low[None], full[:, :, None]),
    "linear": lambda low, full: F.linear(low, full),
}


@both
@pytest.mark.parametrize("other", [torch.float32, "the other 16 bit"], ids=str)
@pytest.mark.parametrize("name", MIXED)
def test_mixed_formats_are_refused_as_torch_and_a_gpu_do(name, other, dtype, on):
    if other not in HALF and other != torch.float32:
        other = HALF[1 - HALF.index(dtype)]
    low, full = randn(4, 4, dtype=dtype), randn(4, 4, dtype=other)
    with pytest.raises(RuntimeError, match=r"dtype|type|Half|Float"):
        MIXED[name](low, full)


# ---- autograd and its modes


@both
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_the_bits_are_the_same(mode, dtype, on):
    with_gradients = some_forward(dtype)
    with mode():
        assert all(torch.equal(a, b) for a, b in zip(with_gradients, some_forward(dtype), strict=True))


def some_forward(dtype):
    x, weight = randn(2, 3, 9, 8, dtype=dtype), randn(4, 3, 3, 3, seed=1, dtype=dtype)
    return [
        F.conv2d(x, weight),
        F.scaled_dot_product_attention(x, x, x),
        torch.addmm(x[0, 0], x[0, 0], x[0, 0, :8]),
        F.linear(x, x[0, 0]),
    ]


@both
def test_inference_tensors_in_and_out(dtype, on):
    with torch.inference_mode():
        a = randn(3, 4, dtype=dtype)
        assert torch.mm(a, a.T).is_inference()


DOUBLE = {
    "mm": (lambda x: torch.mm(*x), [(5, 6), (6, 4)]),
    "addmm": (lambda x: torch.addmm(*x), [(4,), (5, 6), (6, 4)]),
    "bmm": (lambda x: torch.bmm(*x), [(2, 5, 6), (2, 6, 4)]),
    "conv2d": (lambda x: F.conv2d(*x, padding=1), [(2, 3, 5, 5), (4, 3, 3, 3)]),
    "conv_transpose1d": (lambda x: F.conv_transpose1d(*x, stride=2), [(2, 3, 5), (3, 4, 3)]),
}


@both
@pytest.mark.parametrize("name", DOUBLE)
def test_the_gradient_of_a_gradient(name, dtype, on, widened):
    function, shapes = DOUBLE[name]
    results = []
    for kind in (dtype, torch.float64):
        inputs = [randn(*shape, seed=i, dtype=dtype).to(kind).requires_grad_() for i, shape in enumerate(shapes)]
        grads = torch.autograd.grad((function(inputs).tanh()).sum(), inputs, create_graph=True)
        penalty = sum(grad.pow(2).sum() for grad in grads)
        results.append(torch.autograd.grad(penalty, inputs))
    for low, exact in zip(*results, strict=True):
        assert low.dtype == dtype
        # A chain of a dozen roundings, measured against the largest entry.
        distance = (low.double() - exact).abs().max() / exact.abs().max()
        assert distance <= 12 * torch.finfo(dtype).eps
    assert widened


@both
def test_hooks_see_16_bit(dtype, on):
    seen = []
    a = randn(3, 4, dtype=dtype).requires_grad_()
    a.register_hook(lambda grad: seen.append(grad.dtype))
    torch.mm(a, a.T).sum().backward()
    assert seen == [dtype]
