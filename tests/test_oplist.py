"""Each operation of CUDA's autocast lists, called on CPU tensors in a region of ours."""

from __future__ import annotations

import contextlib
import gc
import threading

import pytest
import torch
import torch.nn.functional as F
from reference.nets import CPU, DOUBLE, FULL, LABELS, LOW, Tensors, same
from torch import nn

from halfstep import oplist
from halfstep.errors import HalfstepError
from halfstep.region import Region

aten = torch.ops.aten


UNARY = [
    *("acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt"),
    *("sinh", "tan", "softplus", "nuclear_norm", "pdist"),
]

SIGNS = torch.tensor([1, -1, 1])

# Overload to its arguments. The last one is a dict where there are keywords.
CALLS = {
    # low
    "_convolution": lambda t: (t(2, 3, 5), t(4, 3, 3), t(4), [1], [0], [1], False, [0], 1, False, False, True, True),
    "_convolution.deprecated": lambda t: (
        t(2, 3, 5),
        t(4, 3, 3),
        t(4),
        [1],
        [0],
        [1],
        False,
        [0],
        1,
        False,
        True,
        True,
    ),
    "convolution": lambda t: (t(2, 3, 5), t(4, 3, 3), t(4), [1], [0], [1], False, [0], 1),
    "conv1d": lambda t: (t(2, 3, 5), t(4, 3, 3), t(4)),
    "conv2d": lambda t: (t(2, 3, 5, 5), t(4, 3, 3, 3), t(4)),
    "conv3d": lambda t: (t(2, 3, 5, 5, 5), t(4, 3, 3, 3, 3), t(4)),
    "conv_tbc": lambda t: (t(5, 2, 3), t(3, 3, 4), t(4)),
    "conv_transpose1d": lambda t: (t(2, 3, 5), t(3, 4, 3), t(4)),
    "conv_transpose2d.input": lambda t: (t(2, 3, 5, 5), t(3, 4, 3, 3), t(4)),
    "conv_transpose3d.input": lambda t: (t(2, 3, 3, 3, 3), t(3, 4, 2, 2, 2), t(4)),
    "prelu": lambda t: (t(2, 3), t(3)),
    "addmm": lambda t: (t(2, 4), t(2, 3), t(3, 4)),
    "addmv": lambda t: (t(2), t(2, 3), t(3)),
    "addr": lambda t: (t(2, 3), t(2), t(3)),
    "addbmm": lambda t: (t(2, 4), t(5, 2, 3), t(5, 3, 4)),
    "baddbmm": lambda t: (t(5, 2, 4), t(5, 2, 3), t(5, 3, 4)),
    "bmm": lambda t: (t(5, 2, 3), t(5, 3, 4)),
    "mm": lambda t: (t(2, 3), t(3, 4)),
    "mv": lambda t: (t(2, 3), t(3)),
    "matmul": lambda t: (t(5, 2, 3), t(3, 4)),
    "linear": lambda t: (t(2, 3), t(4, 3), t(4)),
    "einsum": lambda t: ("ij,jk->ik", [t(2, 3), t(3, 4)]),
    "chain_matmul": lambda t: ([t(2, 3), t(3, 4), t(4, 5)],),
    "linalg_multi_dot": lambda t: ([t(2, 3), t(3, 4), t(4, 5)],),
    "linalg_vecdot": lambda t: (t(2, 3), t(2, 3)),
    "lstm_cell": lambda t: (t(2, 3), [t(2, 4), t(2, 4)], t(16, 3), t(16, 4), t(16), t(16)),
    "gru_cell": lambda t: (t(2, 3), t(2, 4), t(12, 3), t(12, 4), t(12), t(12)),
    "rnn_tanh_cell": lambda t: (t(2, 3), t(2, 4), t(4, 3), t(4, 4), t(4), t(4)),
    "rnn_relu_cell": lambda t: (t(2, 3), t(2, 4), t(4, 3), t(4, 4), t(4), t(4)),
    "scaled_dot_product_attention": lambda t: (t(1, 2, 5, 4), t(1, 2, 5, 4), t(1, 2, 5, 4)),
    # fp32
    **dict.fromkeys(UNARY, lambda t: (t(3, 4),)),
    "pow.Tensor_Scalar": lambda t: (t(3), 3),
    "pow.Tensor_Tensor": lambda t: (t(3), t(3)),
    "pow.Scalar": lambda t: (2, t(3)),
    "layer_norm": lambda t: (t(3, 4), [4], t(4), t(4)),
    "native_layer_norm": lambda t: (t(3, 4), [4], t(4), t(4), 1e-5),
    "rms_norm": lambda t: (t(3, 4), [4], t(4)),
    "group_norm": lambda t: (t(3, 4, 2), 2, t(4), t(4)),
    "frobenius_norm.dim": lambda t: (t(3, 4), [0, 1]),
    "nuclear_norm.dim": lambda t: (t(3, 4), [0, 1]),
    "cosine_similarity": lambda t: (t(3, 4), t(3, 4)),
    "poisson_nll_loss": lambda t: (t(3), t(3), True, False, 1e-8, 1),
    "cosine_embedding_loss": lambda t: (t(3, 4), t(3, 4), SIGNS),
    "nll_loss": lambda t: (t(3, 4), LABELS),
    "nll_loss2d": lambda t: (t(1, 4, 3, 1), LABELS.view(1, 3, 1)),
    "hinge_embedding_loss": lambda t: (t(3), SIGNS),
    "kl_div": lambda t: (t(3, 4), t(3, 4)),
    "l1_loss": lambda t: (t(3, 4), t(3, 4)),
    "smooth_l1_loss": lambda t: (t(3, 4), t(3, 4)),
    "huber_loss": lambda t: (t(3, 4), t(3, 4)),
    "mse_loss": lambda t: (t(3, 4), t(3, 4)),
    "margin_ranking_loss": lambda t: (t(3), t(3), SIGNS),
    "multilabel_margin_loss": lambda t: (t(3), LABELS),
    "soft_margin_loss": lambda t: (t(3), t(3)),
    "triplet_margin_loss": lambda t: (t(3, 4), t(3, 4), t(3, 4)),
    "multi_margin_loss": lambda t: (t(3, 4), LABELS),
    "binary_cross_entropy_with_logits": lambda t: (t(3), t(3)),
    "dist": lambda t: (t(3), t(3)),
    "cdist": lambda t: (t(3, 4), t(2, 4)),
    "renorm": lambda t: (t(3, 4), 2, 0, 0.5),
    "logsumexp": lambda t: (t(3, 4), [1]),
    "norm.Scalar": lambda t: (t(3, 4), 2),
    "norm.ScalarOpt_dim": lambda t: (t(3, 4), 2, [1]),
    "upsample_nearest1d": lambda t: (t(1, 2, 3), [6]),
    "_upsample_nearest_exact1d": lambda t: (t(1, 2, 3), [6]),
    "upsample_nearest2d": lambda t: (t(1, 2, 3, 3), [6, 6]),
    "_upsample_nearest_exact2d": lambda t: (t(1, 2, 3, 3), [6, 6]),
    "upsample_nearest3d": lambda t: (t(1, 2, 3, 3, 3), [6, 6, 6]),
    "_upsample_nearest_exact3d": lambda t: (t(1, 2, 3, 3, 3), [6, 6, 6]),
    "upsample_linear1d": lambda t: (t(1, 2, 3), [6], False),
    "upsample_bilinear2d": lambda t: (t(1, 2, 3, 3), [6, 6], False),
    "_upsample_bilinear2d_aa": lambda t: (t(1, 2, 3, 3), [6, 6], False),
    "upsample_trilinear3d": lambda t: (t(1, 2, 3, 3, 3), [6, 6, 6], False),
    "upsample_bicubic2d": lambda t: (t(1, 2, 3, 3), [6, 6], False),
    "_upsample_bicubic2d_aa": lambda t: (t(1, 2, 3, 3), [6, 6], False),
    # set_dtype
    "prod": lambda t: (t(3, 4),),
    "prod.dim_int": lambda t: (t(3, 4), 1),
    "softmax.int": lambda t: (t(3, 4), 1),
    "log_softmax.int": lambda t: (t(3, 4), 1),
    "cumprod": lambda t: (t(3, 4), 1),
    "cumsum": lambda t: (t(3, 4), 1),
    "linalg_vector_norm": lambda t: (t(3, 4), 2),
    "linalg_matrix_norm": lambda t: (t(3, 4), 1),
    "linalg_matrix_norm.str_ord": lambda t: (t(3, 4), "fro"),
    "sum": lambda t: (t(3, 4),),
    "sum.dim_IntList": lambda t: (t(3, 4), [1]),
    # promote
    "addcdiv": lambda t: (t(3), t(3), t(3)),
    "addcmul": lambda t: (t(3), t(3), t(3)),
    "atan2": lambda t: (t(3), t(3)),
    "bilinear": lambda t: (t(2, 3), t(2, 4), t(5, 3, 4), t(5)),
    "cross": lambda t: (t(2, 3), t(2, 3)),
    "dot": lambda t: (t(3), t(3)),
    "vdot": lambda t: (t(3), t(3)),
    "grid_sampler": lambda t: (t(1, 2, 3, 3), t(1, 2, 2, 2), 0, 0, False),
    "index_put": lambda t: (t(3), [LABELS], t(3)),
    "tensordot": lambda t: (t(2, 3), t(3, 4), [1], [0]),
    "scatter_add": lambda t: (t(3), 0, LABELS, t(3)),
}

CUDA_ONLY = {
    "aten::_thnn_fused_lstm_cell",
    "aten::_thnn_fused_gru_cell",
    "aten::_scaled_dot_product_flash_attention",
}
LISTED = {name: kind for name, kind in oplist.cuda_lists().items() if name.removeprefix("aten::") in CALLS}
# Operations of a dtype of their own choice, and one whose result is a number of the labels' shape.
TAKES_DTYPE = [name for name, kind in LISTED.items() if kind == "set_dtype"]


def call(name, arguments):
    return oplist.overload(f"aten::{name.removeprefix('aten::')}")(*arguments)


def tensors_of(result):
    return [result] if isinstance(result, torch.Tensor) else [x for x in result if isinstance(x, torch.Tensor)]


def widest(kind, dtypes, low):
    """What CUDA autocast makes of inputs of these dtypes."""
    if kind == "low":
        return low
    if kind == "promote":
        return FULL if FULL in dtypes else low
    return FULL


def cast(value, dtype):
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    return [cast(item, dtype) for item in value] if isinstance(value, list) else value


# ---- the lists


def test_the_table_covers_the_lists():
    missing = oplist.cuda_lists().keys() - LISTED.keys() - CUDA_ONLY - {"aten::binary_cross_entropy"}
    missing = {name for name in missing if "dimname" not in name.lower()}  # named tensors, which torch has up to 2.11
    # A newer torch may list a few more; they are then to be added above.
    assert len(LISTED) >= 110
    assert len(missing) <= 4, missing
    kinds = [list(LISTED.values()).count(kind) for kind in ("low", "fp32", "set_dtype", "promote")]
    assert all(count >= 10 for count in kinds)


def test_the_lists_hold_what_the_documentation_of_cuda_says():
    lists = oplist.cuda_lists()
    assert lists["aten::mm"] == lists["aten::scaled_dot_product_attention"] == "low"
    assert lists["aten::exp"] == lists["aten::layer_norm"] == lists["aten::norm.Scalar"] == "fp32"
    assert lists["aten::softmax.int"] == lists["aten::sum"] == "set_dtype"
    assert lists["aten::addcmul"] == lists["aten::index_put"] == "promote"
    assert lists["aten::binary_cross_entropy"] == "banned"
    assert not {"aten::embedding", "aten::native_batch_norm", "aten::gelu", "aten::cross_entropy_loss"} & lists.keys()


def test_every_listed_overload_is_one_of_this_torch():
    assert all(oplist.overload(name) is not None for name in oplist.cuda_lists())
    assert oplist.overload("aten::softmax.nothing") is None
    assert oplist.overload("aten::nothing") is None


def test_a_torch_without_the_header_is_refused_and_nothing_stays_behind(monkeypatch):
    gc.collect()  # regions of tests before, since with one alive nothing is looked up
    assert oplist.kernels("cpu")._num_users == 0
    monkeypatch.setattr(oplist, "_HEADER", "include/ATen/nothing.h")
    oplist.cuda_lists.cache_clear()
    oplist._differing.cache_clear()
    try:
        for _ in range(2):
            with pytest.raises(HalfstepError, match=r"torch .* without include/ATen/nothing\.h: .* official wheel"):
                Region(nn.Linear(2, 2), "bf16", CPU)
    finally:
        monkeypatch.undo()
        oplist.cuda_lists.cache_clear()
    with Region(nn.Linear(2, 2), "bf16", CPU):
        assert torch.exp(torch.ones(2).bfloat16()).dtype == FULL


# ---- every operation, in every mixture of inputs

MIXTURES = {"16 bit": ["low"], "fp32": [FULL], "16 bit first": ["low", FULL, "low"], "fp32 first": [FULL, "low"]}


@pytest.fixture(scope="module", params=["bf16", "fp16"])
def region(request):
    return Region(nn.Linear(2, 2), request.param, CPU)


@pytest.mark.parametrize("mixture", MIXTURES)
@pytest.mark.parametrize("name", LISTED)
def test_the_format_of_an_operation_is_cudas(name, mixture, region):
    kind, low = LISTED[name], LOW[region.policy.compute]
    make = Tensors(*[low if dtype == "low" else dtype for dtype in MIXTURES[mixture]])
    arguments = CALLS[name.removeprefix("aten::")](make)
    given = [x.dtype for x in torch.utils._pytree.tree_leaves(arguments) if isinstance(x, torch.Tensor)]
    expected = widest(kind, given, low)
    with region:
        results = tensors_of(call(name, arguments))
        with torch.autocast("cpu", enabled=False):
            # set_dtype leaves the input as it is and asks for the sum in fp32.
            plain = tensors_of(call(name, [cast(x, expected) for x in arguments]))
    assert [x.dtype for x in results] == [expected] * len(results)
    assert all(torch.equal(a, b) for a, b in zip(results, plain, strict=True))


@pytest.mark.parametrize("name", LISTED)
def test_double_is_left_alone(name, region):
    arguments = CALLS[name.removeprefix("aten::")](Tensors(DOUBLE))
    with region:
        results = tensors_of(call(name, arguments))
    assert all(x.dtype == DOUBLE for x in results)


@pytest.mark.parametrize("name", TAKES_DTYPE)
def test_a_dtype_that_the_caller_gives_is_kept(name, region):
    low = LOW[region.policy.compute]
    arguments = CALLS[name.removeprefix("aten::")](Tensors(low))
    positional = "softmax" in name
    for dtype in (low, DOUBLE, FULL):
        with region:
            op = oplist.overload(name)
            result = op(*arguments, dtype) if positional else op(*arguments, dtype=dtype)
        assert result.dtype == dtype
    with region:
        assert oplist.overload(name)(*arguments, dtype=None).dtype == FULL


@pytest.mark.parametrize("name", ["exp", "sum", "softmax.int", "mm", "addcmul"])
def test_gradients_come_back_in_the_format_of_the_input(name, region):
    for dtype in (LOW[region.policy.compute], FULL):
        arguments = CALLS[name](Tensors(dtype))
        leaves = [x.requires_grad_() for x in arguments if isinstance(x, torch.Tensor)]
        with region:
            result = call(name, arguments)
        with region.backward():
            grads = torch.autograd.grad(result.float().sum(), leaves)
        assert all(grad.dtype == dtype and torch.isfinite(grad).all() for grad in grads)


USERS_CALLS = {
    "F.softmax": (lambda x: F.softmax(x, -1), FULL),
    "F.softmax to 16 bit": (lambda x: F.softmax(x, -1, dtype=torch.float16), torch.float16),
    "x.sum": (lambda x: x.sum(-1, keepdim=True), FULL),
    "x.mean": (lambda x: x.mean(), "same"),
    "x ** 2": (lambda x: x**2, FULL),
    "2 ** x": (lambda x: 2**x, FULL),
    "1 / x": (lambda x: 1 / x, FULL),
    "x @ x.T": (lambda x: x @ x.T, "low"),
    "F.gelu": (F.gelu, "same"),
    "F.dropout": (lambda x: F.dropout(x, 0.5), "same"),
    "F.embedding": (lambda x: F.embedding(LABELS, x), "same"),
    "F.batch_norm": (lambda x: F.batch_norm(x, None, None, training=True), "same"),
    "F.conv2d padded same": (lambda x: F.conv2d(x[None, None], x[None, None, :3, :3], padding="same"), "low"),
    "F.cross_entropy": (lambda x: F.cross_entropy(x, LABELS), FULL),
    "F.normalize": (lambda x: F.normalize(x), "promoted"),
    "F.interpolate": (lambda x: F.interpolate(x[None], scale_factor=2), FULL),
    "torch.cat with fp32": (lambda x: torch.cat([x, torch.ones(1, 3)]), FULL),
    "torch.stack": (lambda x: torch.stack([x, x]), "same"),
    "torch.linalg.norm": (lambda x: torch.linalg.norm(x), FULL),
    "x.norm": (lambda x: x.norm(), FULL),
    "torch.norm of fp32": (lambda x: torch.norm(x, dtype=torch.float64), DOUBLE),
    "F.max_pool3d": (lambda x: F.max_pool3d(x[None, None], 1), "same"),
    "F.pad": (lambda x: F.pad(x[None], (1, 1), "reflect"), "same"),
    "F.grid_sample": (lambda x: F.grid_sample(x[None, None], x[None, :, None, :2], align_corners=False), "same"),
}


@pytest.mark.parametrize("dtype", ["low", FULL], ids=str)
@pytest.mark.parametrize("name", USERS_CALLS)
def test_what_a_user_writes(name, dtype, region):
    function, expected = USERS_CALLS[name]
    low = LOW[region.policy.compute]
    dtype = low if dtype == "low" else dtype
    with region:
        result = function(Tensors(dtype)(3, 3))
    assert result.dtype == {"same": dtype, "low": low, "promoted": FULL}.get(expected, expected)


def test_cross_entropy_takes_its_log_softmax_in_16_bit_as_cuda_does(region):
    # The documentation lists it as float32. Only logits cast to float first are.
    low = LOW[region.policy.compute]
    logits = (torch.randn(64, 1000, generator=torch.Generator().manual_seed(0)) * 4).to(low)
    labels = torch.arange(64)
    with region:
        lossy, exact = F.cross_entropy(logits, labels), F.cross_entropy(logits.float(), labels)
    rounded = -torch.log_softmax(logits, -1)[torch.arange(64), labels].float().mean()
    assert lossy.dtype == FULL
    assert torch.equal(lossy, rounded)
    assert lossy != exact


# ---- refused, as on CUDA


def test_binary_cross_entropy_is_refused_with_advice(region):
    p, y = torch.rand(4), torch.ones(4)
    for function in (F.binary_cross_entropy, nn.BCELoss()):
        with (
            pytest.raises(HalfstepError, match=r"^binary_cross_entropy .* Use binary_cross_entropy_with_logits"),
            region,
        ):
            function(p, y)
    # What the advice names works.
    with region:
        assert F.binary_cross_entropy_with_logits(p, y).dtype == FULL
        with torch.autocast("cpu", enabled=False):
            F.binary_cross_entropy(p, y)
    F.binary_cross_entropy(p, y)
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Sigmoid(), Loss()))
    with Region(model, f"{region.policy.compute} module:1=fp32", CPU):
        assert model(torch.rand(4)).dtype == FULL


class Loss(nn.Module):
    def forward(self, p):
        return F.binary_cross_entropy(p, torch.ones_like(p))


# ---- plain autocast is torch's own, with and without us


def everything(dtype, context):
    results = []
    for name in LISTED:
        for given in ((dtype,), (FULL,), (FULL, dtype)):
            arguments = CALLS[name.removeprefix("aten::")](Tensors(*given))
            try:
                with context():
                    results += tensors_of(call(name, arguments))
            except RuntimeError as error:
                results.append(str(error).splitlines()[0])
    x = Tensors(FULL)(3, 3)
    with context():
        for function, _ in USERS_CALLS.values():
            torch.manual_seed(0)
            results.append(function(x))
        results += [F.avg_pool3d(x[None, None], 1), F.binary_cross_entropy(x, x), torch.linalg.inv(x)]
        results += [torch.fft.rfft(x).real, torch.quantile(x, 0.5), torch.cat([x.to(dtype), x])]
    return results


@pytest.mark.parametrize("policy", ["bf16", "fp16"])
def test_plain_autocast_gives_the_same_bits_with_our_kernels_there(policy):
    dtype = LOW[policy]

    def plain():
        return torch.autocast("cpu", dtype)

    before = everything(dtype, plain)
    num_users = oplist.kernels("cpu")._num_users
    region = Region(nn.Linear(2, 2), f"{policy} op:gelu=fp32 op:linear=fp32 op:dropout=fp32", CPU)
    during = everything(dtype, plain)
    assert oplist.kernels("cpu")._num_users == num_users + 1
    del region
    after = everything(dtype, plain)
    for a, b, c in zip(before, during, after, strict=True):
        assert same(a, b)
        assert same(a, c)


def test_without_autocast_our_kernels_change_nothing():
    before = everything(torch.bfloat16, contextlib.nullcontext)
    region = Region(nn.Linear(2, 2), "bf16 op:exp=fp16", CPU)
    during = everything(torch.bfloat16, contextlib.nullcontext)
    del region
    assert all(same(a, b) for a, b in zip(before, during, strict=True))


def test_plain_autocast_in_another_thread_is_not_reached_by_a_region_that_is_closed():
    dtypes = []

    def work():
        with torch.autocast("cpu", torch.bfloat16):
            dtypes.append(F.softmax(torch.rand(3).bfloat16(), -1).dtype)

    region = Region(nn.Linear(2, 2), "bf16", CPU)
    with region:
        pass
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert dtypes == [torch.bfloat16]
