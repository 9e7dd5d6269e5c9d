"""Op rules: one operation in a format of its own, whatever torch's lists say."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from reference.nets import AMX, CPU, DOUBLE, FULL, LABELS, LOW, Tensors, same
from torch import nn

from halfstep.errors import HalfstepError
from halfstep.region import Region

pytestmark = pytest.mark.usefixtures("kernels_stay")


def in_region(policy, function, *arguments, hardware=CPU):
    region = Region(nn.Linear(2, 2), policy, hardware)
    with region:
        return function(*arguments)


RULES = [
    ("bf16 op:softmax=fp16", lambda x: F.softmax(x, -1), torch.float16),
    ("bf16 op:softmax=bf16", lambda x: F.softmax(x, -1), torch.bfloat16),
    ("fp16 op:linear=fp32", lambda x: F.linear(x, x), FULL),
    ("fp16 op:gelu=fp32", F.gelu, FULL),
    ("fp16 op:exp=fp16", torch.exp, torch.float16),
    ("bf16 op:conv2d=fp16", lambda x: F.conv2d(x[None, None], x[None, None]), torch.float16),
    ("bf16 op:embedding=bf16", lambda x: F.embedding(LABELS, x.float()), torch.bfloat16),
    ("bf16 op:sum=bf16", lambda x: x.sum(), torch.bfloat16),
    ("bf16 op:sum=bf16", lambda x: x.sum(-1), torch.bfloat16),
    ("bf16 op:cross_entropy_loss=fp32", lambda x: F.cross_entropy(x, LABELS), FULL),
    ("bf16 op:cat=fp16", lambda x: torch.cat([x, x.float()]), torch.float16),
    ("bf16 op:einsum=fp32", lambda x: torch.einsum("ij,jk", x, x), FULL),
    ("bf16 op:mul=fp32", lambda x: x * 2.0, FULL),
    ("bf16 op:mul=fp32", lambda x: 2.0 * x, FULL),
    ("bf16 op:binary_cross_entropy=fp32", lambda x: F.binary_cross_entropy(x, x.float()), FULL),
    ("bf16 op:scaled_dot_product_attention=fp32", lambda x: F.scaled_dot_product_attention(x, x, x), FULL),
    ("bf16 op:layer_norm=bf16", lambda x: F.layer_norm(x, (3,)), torch.bfloat16),
    ("bf16 op:lstm=fp32", lambda x: nn.LSTM(3, 2)(x)[0], FULL),
]


@pytest.mark.parametrize("hardware", [CPU, AMX], ids=["emulated", "native"])
@pytest.mark.parametrize(("policy", "function", "dtype"), RULES, ids=[rule[0] for rule in RULES])
def test_an_op_rule_decides(policy, function, dtype, hardware):
    low = LOW[policy[:4]]
    x = Tensors(low)(3, 3)
    assert in_region(policy, function, x, hardware=hardware).dtype == dtype
    assert in_region(policy, function, x.float(), hardware=hardware).dtype == dtype


def test_a_rule_computes_in_its_format_and_not_only_its_result():
    x = Tensors(FULL)(64, 64)
    got = in_region("bf16 op:linear=fp32", F.linear, x, x)
    assert torch.equal(got, F.linear(x, x))
    got = in_region("bf16 op:gelu=fp16", F.gelu, x)
    assert torch.equal(got, F.gelu(x.half()))


def test_an_op_rule_leaves_double_and_other_operations_alone():
    x = Tensors(DOUBLE)(3, 3)
    assert in_region("bf16 op:gelu=fp32", F.gelu, x).dtype == DOUBLE
    assert in_region("bf16 op:gelu=fp32", F.silu, x.bfloat16()).dtype == torch.bfloat16


NUMBERS = {
    "add": lambda x: x + 1,
    "sub": lambda x: 1 - x,
    "mul": lambda x: 0.1 * x,
    "div": lambda x: x / 3,
    "floor_divide": lambda x: x // 2,
    "remainder": lambda x: x % 2,
    "fmod": lambda x: torch.fmod(x, 2),
    "copysign": lambda x: torch.copysign(x, 1.0),
    "xlogy": lambda x: torch.xlogy(x, 2.0),
    "pow": lambda x: x**0.5,
    "where": lambda x: torch.where(x > 0.5, x, 0.0),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_as_operand(name):
    # torch wraps it in a tensor, which Python kernels see as a number again.
    function, low = NUMBERS[name], torch.bfloat16
    ruled, other = Region(nn.Linear(2, 2), f"bf16 op:{name}=fp32", CPU), Region(nn.Linear(2, 2), "bf16", CPU)
    for x in (Tensors(low)(3, 3), Tensors(low)(1)[0]):
        with ruled:
            assert torch.equal(function(x), function(x.float()))
        expected = function(x.float() if name == "pow" else x)
        with other:
            assert same(function(x), expected)
        with torch.autocast("cpu", low):
            assert same(function(x), function(x))
        assert same(function(x), function(x))


def test_the_later_of_two_rules_for_one_operation_decides():
    x = Tensors(torch.bfloat16)(3, 3)
    assert in_region("bf16 op:gelu=fp32 op:gelu=fp16", F.gelu, x).dtype == torch.float16


def test_a_rule_acts_in_its_own_region_alone():
    x = Tensors(torch.bfloat16)(3, 3)
    ruled, plain = Region(nn.Linear(2, 2), "bf16 op:gelu=fp32", CPU), Region(nn.Linear(2, 2), "bf16", CPU)
    with plain:
        assert F.gelu(x).dtype == torch.bfloat16
        with ruled:
            assert F.gelu(x).dtype == FULL
            with plain:
                assert F.gelu(x).dtype == torch.bfloat16
            assert F.gelu(x).dtype == FULL
        assert F.gelu(x).dtype == torch.bfloat16
    assert F.gelu(x).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("softmux", "softmax"),
        ("layernorm", "layer_norm"),
        ("relu_", "relu"),  # an operation in place cannot change the format of what it writes to
        ("softmax.int", "softmax"),
        ("name", None),
        ("__class__", None),
        ("qqqqqqqq", None),
        ("append", None),  # TorchScript's, on lists
        ("to", None),  # returns its own input where it can
    ],
)
def test_an_unknown_operation_is_refused_with_the_names_that_come_near(name, near):
    message = f"op rule '{name}': torch has no aten operation of this name that returns a new tensor"
    with pytest.raises(HalfstepError, match=message) as caught:
        Region(nn.Linear(2, 2), f"bf16 op:{name}=fp32", CPU)
    offered = caught.value.fix.removeprefix("Did you mean ").removesuffix("?").split(", ")
    if near:
        assert near in offered
        for other in offered:
            Region(nn.Linear(2, 2), f"bf16 op:{other}=fp32", CPU)


class Net(nn.Module):
    """A bit of everything that training code does."""

    def __init__(self):
        super().__init__()
        self.embedding, self.conv, self.norm = nn.Embedding(10, 8), nn.Conv1d(8, 8, 3, padding=1), nn.LayerNorm(8)
        self.batch_norm, self.qkv, self.head = nn.BatchNorm1d(8), nn.Linear(8, 24), nn.Linear(8, 10)
        self.attention, self.lstm = nn.MultiheadAttention(8, 2, batch_first=True), nn.LSTM(8, 8, batch_first=True)
        self.gru, self.dropout = nn.GRU(8, 8, batch_first=True), nn.Dropout(0.1)

    def forward(self, ids, labels):
        x = self.embedding(ids)
        x = self.batch_norm((x + self.conv(x.mT).mT).mT).mT
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        scores = (q / 2.0 @ k.mT * 0.5).masked_fill(torch.ones(5, 5).triu(1).bool(), -1e4)
        x = x + F.softmax(scores, -1) @ v + F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention(x, x, x, need_weights=False)[0] + self.lstm(x)[0] + self.gru(x)[0]
        x = F.gelu(x) * 2 + 1 - 0.5
        x = torch.where(x > 0, x, 0.1 * x)
        x = torch.cat([torch.maximum(x, torch.tensor(0.01)) ** 2, x.float()], -1)[..., :8]
        x += 1
        logits = self.head(self.dropout(x.abs().pow(0.5)))
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return loss + F.binary_cross_entropy_with_logits(logits, torch.ones_like(logits)) + logits.logsumexp(-1).mean()


OFTEN_RULED = [
    *(
        "add",
        "addmm",
        "baddbmm",
        "bmm",
        "cat",
        "clamp",
        "conv1d",
        "convolution",
        "cross_entropy_loss",
        "div",
        "dropout",
    ),
    *("embedding", "exp", "gelu", "gru", "index", "layer_norm", "linear", "log_softmax", "logsumexp", "lstm", "mul"),
    *("masked_fill", "matmul", "maximum", "mm", "native_layer_norm", "neg", "nll_loss", "pow", "rsqrt", "sub", "sum"),
    *("dropout",),
    *("scaled_dot_product_attention", "sigmoid", "silu", "softmax", "split", "tanh", "to", "transpose", "where"),
]


@pytest.mark.parametrize("format", ["fp32", "fp16"])
def test_any_rule_leaves_a_model_that_trains(format):
    torch.manual_seed(0)
    model, ids, labels = Net(), torch.randint(10, (2, 5)), torch.randint(10, (2, 5))
    ruled = []
    for name in OFTEN_RULED:
        region = None
        try:
            region = Region(model, f"bf16 op:{name}={format}", CPU)
        except HalfstepError:
            continue
        ruled.append(name)
        model.zero_grad()
        with region:
            loss = model(ids, labels)
        with region.backward():
            loss.backward()
        assert torch.isfinite(loss)
        assert all(torch.isfinite(p.grad).all() for p in model.parameters())
    # Views such as split and transpose return what they were given and are no operations to rule.
    assert len(ruled) >= len(OFTEN_RULED) - 6


@pytest.mark.parametrize("policy", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("hardware", [CPU, AMX], ids=["emulated", "native"])
def test_recurrent_and_attention_modules_train_and_evaluate(policy, hardware):
    torch.manual_seed(0)
    model, ids, labels = Net(), torch.randint(10, (2, 5)), torch.randint(10, (2, 5))
    region = Region(model, policy, hardware)
    with region:
        loss = model(ids, labels)
    with region.backward():
        loss.backward()
    assert all(p.grad.dtype == FULL and torch.isfinite(p.grad).all() for p in model.parameters())
    model.eval()
    with region.inference():
        low = model(ids, labels)
    with torch.no_grad():
        full = model(ids, labels)
    # Some forty roundings, in a loss of a few units.
    assert abs(low - full) <= 40 * torch.finfo(LOW.get(policy, FULL)).eps
