"""What lint says of the format of a value is what torch makes of it; where it does not know, it says nothing."""

import pytest
import torch
import torch.nn.functional as F

import halfstep
from halfstep.lint.operation import operations
from halfstep.lint.script import Script

NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.bool: "bool", torch.int64: "int"}
REGIONS = {
    "none": "with torch.no_grad():",
    "cpu": 'with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):',
    "cuda": 'with torch.no_grad(), torch.autocast("cuda", dtype=torch.float16):',
}
CODE = """
def follow(x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor, index: torch.Tensor, n: int):
    x = x.bfloat16()
    y = y.float()
    mask = mask.bool()
    index = index.long()
    {region}
        return ({expression}).flip(0)
"""
EXPRESSIONS = """
x + y
x + 1
x * 0.5
mask * -1e9
mask * 2
index + 1.5
index / 2
index + index
x + mask * -1e9
x / x.size(-1)
x / x.shape[-1] ** 0.5
x / len(x)
x * n
x - x.mean(0)
1 / x
2 ** x
x ** 2
x * x
x.square()
x @ x.T
x @ y.T.bfloat16()
torch.matmul(x, x.T) / 8
x.view(-1, x.shape[0])
x.view_as(y)
x.reshape(n, -1)
x.expand(2, *x.shape)
x.masked_fill(mask, -1e4)
torch.where(mask, x, 0.0)
x.where(mask, y)
torch.where(mask, x, y)
torch.cat([x, y])
torch.maximum(x, y)
x.softmax(-1)
x.log_softmax(-1)
F.normalize(x, dim=-1)
F.cosine_similarity(x, x)
F.mse_loss(x, x, reduction="none")
F.cross_entropy(x, index, reduction="none")
F.relu(x)
torch.sigmoid(x)
torch.exp(x)
x.sum(0)
x.sum(0, dtype=torch.float32)
x.cumsum(0)
x.norm(dim=-1)
x.prod(0)
x.rsqrt()
x.clamp(min=1e-8)
x.new_zeros(3)
torch.zeros_like(x)
torch.full_like(x, 1.0)
x.isfinite()
x > 0
x.to(y.dtype)
x.type_as(y)
torch.zeros(3)
torch.zeros(3, dtype=x.dtype)
torch.arange(3)
torch.arange(3.0)
x * torch.finfo(x.dtype).min
mask * torch.finfo(x.dtype).min
F.pad(x, (1, 1))
F.layer_norm(x, x.shape[-1:])
x.index_select(0, index)
x[index]
x[:, None]
""".strip().splitlines()


def followed(expression, region):
    code = "import torch\nimport torch.nn.functional as F\n" + CODE.format(
        expression=expression, region=REGIONS[region]
    )
    (operation,) = operations(Script(code, "x.py"), frozenset({"flip"}))
    return operation.tensor().formats


def computed(expression, region):
    # Our own autocast runs CUDA's op lists on a CPU.
    opened = REGIONS[region].replace('torch.autocast("cuda"', 'halfstep.autocast("cpu"')
    scope = {"torch": torch, "F": F, "halfstep": halfstep}
    exec(CODE.format(expression=expression, region=opened), scope)
    torch.manual_seed(0)
    index = torch.tensor([0, 1, 2])
    return scope["follow"](torch.rand(3, 3), torch.rand(3, 3), torch.tensor([[True, False, True]]), index, 3).dtype


@pytest.mark.parametrize("expression", EXPRESSIONS)
@pytest.mark.parametrize("region", REGIONS)
def test_a_format_that_lint_knows_is_the_one_that_torch_gives(expression, region):
    known = followed(expression, region)
    assert known <= {NAMES[computed(expression, region)]}


MUST_KNOW = set(EXPRESSIONS) - {"x.norm(dim=-1)"}


@pytest.mark.parametrize("expression", sorted(MUST_KNOW))
def test_these_are_known(expression):
    assert followed(expression, "none")


@pytest.mark.parametrize(
    "expression",
    ["x ** 2", "x.square()", "2 ** x", "1 / x", "x.softmax(-1)", "x.sum(0)", "F.normalize(x, dim=-1)", "x.rsqrt()"],
)
def test_a_cuda_region_takes_these_to_fp32(expression):
    assert followed(expression, "cuda") == {"fp32"}


@pytest.mark.parametrize("expression", ["x * x", "x + 1e-8", "x.clamp(min=1e-8)", "torch.sigmoid(x)"])
def test_a_cuda_region_leaves_these_alone(expression):
    assert followed(expression, "cuda") == {"bf16"}
