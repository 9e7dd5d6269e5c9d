"""Log-probabilities in tiles: numbers against the plain twin in fp64, gradients, formats, memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from reference.log_probs import plain
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import halfstep
from halfstep.compare.memory import LiveBytes
from halfstep.errors import HalfstepError
from halfstep.train import log_probs
from halfstep.train.log_probs import STATISTICS, token_log_probs, token_statistics

WORDS, WIDTH, TOKENS = 9000, 32, 23
"""Three tiles of the vocabulary, the last one short."""
LOW = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Half an ulp of each format, relative."""
FP32 = 2.0**-24
VALUES = 1e-5
"""Log-probabilities near 10 have an ulp of 1e-6, and 9000 terms are summed in fp32; ten ulps are left as room."""


def inputs(dtype: torch.dtype = torch.float32, bias: bool = True) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH).to(dtype).requires_grad_()
    weight = (torch.randn(WORDS, WIDTH) * 0.3).to(dtype).requires_grad_()
    offset = torch.randn(WORDS).to(dtype).requires_grad_() if bias else None
    labels = torch.randint(WORDS, (TOKENS,))
    labels[::3] = -100
    labels[1:3] = torch.tensor([0, WORDS - 1])
    return hidden, weight, labels, offset


def twin_inputs(values: tuple[Any, ...], compute: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The same, rounded to the format of the products, in fp64."""
    hidden, weight, labels, bias = values

    def wide(value: Tensor | None) -> Any:
        return None if value is None else value.detach().to(compute).double().requires_grad_()

    return wide(hidden), wide(weight), labels, wide(bias)


def distance(mine: Tensor | None, theirs: Tensor | None) -> float:
    """In the norm, relative."""
    assert mine is not None
    assert theirs is not None
    return float((mine.double() - theirs.double()).norm() / theirs.double().norm())


@pytest.mark.parametrize("low", [None, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("transform", [{}, {"scale": 0.5, "soft_cap": 3.0}], ids=["plain", "capped"])
def test_values_statistics_and_gradients_are_those_of_the_twin(
    low: torch.dtype | None, dtype: torch.dtype, transform: dict[str, float]
) -> None:
    values = inputs(dtype)
    hidden, weight, labels, bias = values
    with torch.autocast("cpu", dtype=low or torch.bfloat16, enabled=low is not None):
        found = token_statistics(*values, also=STATISTICS, **transform)
    compute = low or dtype
    twin_values = twin_inputs(values, compute)
    twin = plain(*twin_values, **transform)
    assert found.log_probs.dtype == torch.float32
    for name in ("log_probs", *STATISTICS):
        mine, theirs = getattr(found, name).double(), getattr(twin, name).double()
        assert float((mine - theirs).detach().abs().max()) < VALUES, name
        assert not (mine[labels == -100]).any(), name

    upstream = torch.randn(TOKENS)
    (found.log_probs * upstream).sum().backward()
    (twin.log_probs * upstream).sum().backward()
    for mine, theirs in zip((hidden, weight, bias), (twin_values[0], twin_values[1], twin_values[3]), strict=True):
        assert mine is not None
        assert mine.grad is not None
        assert mine.grad.dtype == dtype
        # Two roundings at most: of the logits' gradient to the products' format, and of the sum to the input's. In
        # fp32, some 30 fp32 roundings of terms that partly cancel.
        room = sum(LOW.get(format, 30 * FP32) for format in {compute, dtype})
        assert distance(mine.grad, theirs.grad if theirs is not None else None) < room


def test_gradients_in_fp64_against_finite_differences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_probs, "_WORDS", 4)
    torch.manual_seed(0)
    hidden = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(10, 3, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(10, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([0, 9, -100, 4, 7])

    def values(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return token_log_probs(hidden, weight, labels, bias, scale=1.5, soft_cap=2.0, chunk_bytes=32)

    assert torch.autograd.gradcheck(values, (hidden, weight, bias))


def test_losses_of_the_full_fp32_logits_agree_to_1e_5() -> None:
    """The path that this replaces: a head, logits in fp32, cross entropy."""
    hidden, weight, labels, bias = inputs()
    full = F.cross_entropy(F.linear(hidden, weight, bias), labels, reduction="none")
    mine = -token_log_probs(hidden, weight, labels, bias)
    assert float((mine - full).detach().abs().max()) < 1e-5
    num = int((labels != -100).sum())
    expected = torch.autograd.grad(full.sum() / num, (hidden, weight))
    got = torch.autograd.grad(mine.sum() / num, (hidden, weight))
    for a, b in zip(got, expected, strict=True):
        assert distance(a, b) < 1e-5


def test_logits_are_not_rounded_to_16_bits() -> None:
    """A head under autocast rounds them: by up to half an ulp, 1/32 for a logit just below 16 in bf16."""
    hidden, weight, labels, _ = inputs(bias=False)
    hidden = (hidden * 8).detach()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mine = token_log_probs(hidden, weight.detach(), labels)
        rounded = -F.cross_entropy(F.linear(hidden, weight.detach()).float(), labels, reduction="none")
    exact = plain(*twin_inputs((hidden, weight, labels, None), torch.bfloat16)).log_probs.detach()
    assert float((mine - exact).abs().max()) < 4 * VALUES
    assert float((rounded - exact).abs().max()) > 1e-3


@pytest.mark.parametrize("exponent", [0, 16, 40, -40])
def test_fp16_gradients_neither_overflow_nor_vanish_on_the_way(exponent: int) -> None:
    """The loss scale reaches the tokens as their upstream gradient; only the result has to fit its format."""
    hidden, weight, labels, _ = inputs(bias=False)
    values = (hidden, weight, labels, None)
    twin_values = twin_inputs(values, torch.float16)
    with torch.autocast("cpu", dtype=torch.float16):
        mine = token_log_probs(hidden, weight, labels)
    (mine.sum() * 2.0**exponent).backward()
    plain(*twin_values).log_probs.sum().backward()
    for got, expected in ((hidden, twin_values[0]), (weight, twin_values[1])):
        assert got.grad is not None
        assert got.grad.isfinite().all()
        assert distance(got.grad * 2.0**-exponent, expected.grad) < LOW[torch.float16]


def test_a_result_that_fp16_cannot_hold_is_inf_for_the_loss_scale_to_see() -> None:
    hidden, weight, labels, _ = inputs(torch.float16, bias=False)
    (token_log_probs(hidden, weight, labels).sum() * 2.0**20).backward()
    assert hidden.grad is not None
    assert hidden.grad.isinf().any()
    hidden, weight, labels, _ = inputs(bias=False)
    (token_log_probs(hidden, weight, labels) * torch.full((TOKENS,), torch.inf)).sum().backward()
    assert hidden.grad is not None
    assert not hidden.grad[labels != -100].isfinite().all()


def test_a_flat_softmax_over_128000_words_has_its_gradient_in_fp16() -> None:
    """1/128000 times 1/4096 tokens is 2e-9, which fp16 rounds to 0: a head would lose all but the labels' part."""
    num, tokens = 128_000, 4
    hidden = torch.ones(tokens, 8)
    weight = torch.zeros(num, 8, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.float16):
        mine = token_log_probs(hidden, weight, torch.zeros(tokens, dtype=torch.long)).sum() / 4096
    mine.backward()
    assert weight.grad is not None
    expected = -tokens / num / 4096
    assert float(weight.grad[1:].sub(expected).abs().max()) < abs(expected) * LOW[torch.float16]


def test_the_result_does_not_depend_on_the_budget() -> None:
    values = inputs()
    whole = token_log_probs(*values)
    gradients = torch.autograd.grad(whole.sum(), values[:2])
    for rows in (1, 5, 16):
        mine = token_log_probs(*values, chunk_bytes=rows * 4 * 4096)
        # The BLAS may pick another kernel for another number of rows: an ulp or two of values near 10.
        assert float((mine - whole).detach().abs().max()) <= 4e-6
        for a, b in zip(torch.autograd.grad(mine.sum(), values[:2]), gradients, strict=True):
            assert distance(a, b) < 30 * FP32


def test_a_call_twice_is_equal_to_the_bit() -> None:
    values = inputs(torch.bfloat16)
    first, second = token_log_probs(*values), token_log_probs(*values)
    assert torch.equal(first, second)
    for a, b in zip(
        torch.autograd.grad(first.sum(), values[:2]), torch.autograd.grad(second.sum(), values[:2]), strict=True
    ):
        assert torch.equal(a, b)


def test_ignored_tokens_never_meet_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, labels, bias = inputs()
    with torch.no_grad():
        hidden[labels == -100] = torch.nan
    seen: list[int] = []

    def product(a: Tensor, b: Tensor) -> Tensor:
        seen.append(a.shape[0])
        return a @ b

    monkeypatch.setattr(log_probs, "_product", product)
    found = token_log_probs(hidden, weight, labels, bias)
    num = int((labels != -100).sum())
    assert set(seen) == {num}
    assert found.isfinite().all()
    found.sum().backward()
    assert hidden.grad is not None
    assert not hidden.grad[labels == -100].any()
    assert weight.grad is not None
    assert weight.grad.isfinite().all()


def test_no_label_counts() -> None:
    hidden, weight, labels, bias = inputs()
    found = token_statistics(hidden, weight, torch.full_like(labels, -100), bias, also=STATISTICS)
    assert found.is_top1 is not None
    assert not found.is_top1.any()
    found.log_probs.sum().backward()
    for tensor in (hidden, weight, bias):
        assert tensor is not None
        assert tensor.grad is not None
        assert not tensor.grad.any()


def test_a_frozen_head_gets_no_gradient_and_costs_none() -> None:
    hidden, weight, labels, bias = inputs()
    for trained in (True, False):
        weight.requires_grad_(trained).grad = None
        made = peak_of(lambda: token_log_probs(hidden, weight, labels, bias), hidden, weight)
        assert (weight.grad is not None) == trained
        assert (made > weight.numel() * 4) == trained
    assert bias is not None
    assert bias.grad is not None


def peak_of(run: Callable[[], Tensor], *inputs: Tensor) -> int:
    """Bytes at the most beside the inputs, forward and backward."""
    with LiveBytes() as live:
        live.count(inputs)
        before = live.now
        run().sum().backward()
    return live.peak - before


def test_a_tied_weight_sums_both_of_its_gradients() -> None:
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(50, 8))
    tokens = torch.randint(50, (2, 7))
    mine = -token_log_probs(F.embedding(tokens, weight)[:, :-1], weight, tokens[:, 1:]).sum()
    logits = F.linear(F.embedding(tokens, weight)[:, :-1], weight)
    full = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
    (a,), (b,) = torch.autograd.grad(mine, weight), torch.autograd.grad(full, weight)
    assert distance(a, b) < 30 * FP32


def test_shapes_strides_and_another_ignore_index() -> None:
    hidden, weight, labels, bias = inputs()
    flat = token_log_probs(hidden, weight, labels, bias)
    columns = hidden.detach().t().contiguous().t()
    strided = token_log_probs(columns, weight.detach().t().contiguous().t(), labels, bias)
    assert float((strided - flat).detach().abs().max()) < 4e-6
    shaped = token_log_probs(hidden[:20].view(4, 5, WIDTH), weight, labels[:20].view(4, 5), bias)
    assert shaped.shape == (4, 5)
    assert float((shaped.flatten() - flat[:20]).detach().abs().max()) < 4e-6
    other = token_log_probs(hidden, weight, labels.where(labels != -100, -1), bias, ignore_index=-1)
    assert torch.equal(other, flat)


def test_under_checkpoint_in_backward_and_in_no_grad() -> None:
    hidden, weight, labels, bias = inputs()
    plainly = token_log_probs(hidden, weight, labels, bias)
    for reentrant in (False, True):
        again = checkpoint(token_log_probs, hidden, weight, labels, bias, use_reentrant=reentrant)
        assert torch.equal(again, plainly)
        again.sum().backward()
        assert hidden.grad is not None
        assert torch.equal(hidden.grad, *torch.autograd.grad(plainly.sum(), hidden, retain_graph=True))
        hidden.grad = None
    with torch.no_grad():
        alone = token_log_probs(hidden, weight, labels, bias)
    assert alone.grad_fn is None
    assert torch.equal(alone, plainly)


def test_the_gradient_of_a_gradient_is_refused() -> None:
    hidden, weight, labels, bias = inputs()
    with pytest.raises(HalfstepError, match="create_graph"):
        torch.autograd.grad(token_log_probs(hidden, weight, labels, bias).sum(), hidden, create_graph=True)


def test_words_at_minus_infinity() -> None:
    """A bias of -inf masks words out: more than a whole tile of them, among them a label."""
    hidden, weight, labels, _ = inputs(bias=False)
    bias = torch.zeros(WORDS)
    bias[:4500] = -torch.inf
    found = token_statistics(hidden, weight, labels, bias, also=("entropy", "log_sum_squares", "is_top1"))
    twin = plain(*twin_inputs((hidden, weight, labels, bias), torch.float32))
    masked = (labels >= 0) & (labels < 4500)
    assert masked.any()
    assert (found.log_probs[masked] == -torch.inf).all()
    allowed = labels >= 4500
    for name in ("log_probs", "entropy", "log_sum_squares"):
        mine, theirs = getattr(found, name)[allowed], getattr(twin, name)[allowed]
        assert float((mine - theirs).detach().abs().max()) < VALUES, name
    # A sum over tokens takes the masked ones out with where: 0 times -inf is NaN.
    found.log_probs.where(allowed, 0).sum().backward()
    assert hidden.grad is not None
    assert hidden.grad.isfinite().all()
    assert weight.grad is not None
    assert weight.grad.isfinite().all()


def test_of_equal_logits_the_first_word_is_the_top_one() -> None:
    hidden, weight = torch.ones(3, 4), torch.zeros(9000, 4)
    found = token_statistics(hidden, weight, torch.tensor([0, 1, 5000]), also=("is_top1",))
    assert found.is_top1 is not None
    assert found.is_top1.tolist() == [True, False, False]


def test_a_sequence_of_300_tokens_in_fp16_keeps_its_reward() -> None:
    """Sums of log-probabilities in 16 bits have a spacing of 4 near -3000; a reward is a difference of two sums."""
    torch.manual_seed(0)
    weight = torch.randn(5000, 16)
    policy, reference = torch.randn(2, 300, 16), torch.randn(2, 300, 16)
    reference = policy + 0.003 * reference
    labels = torch.randint(5000, (2, 300))

    def reward(values: Any) -> Tensor:
        return (values(policy).sum(1) - values(reference).sum(1)).diff()

    with torch.autocast("cpu", dtype=torch.float16):
        mine = reward(lambda hidden: token_log_probs(hidden, weight, labels))
    half = reward(
        lambda h: torch.log_softmax(h.half() @ weight.half().t(), -1).gather(-1, labels[..., None]).squeeze(-1)
    )
    exact = reward(lambda h: plain(h.half(), weight.half(), labels).log_probs)
    # Sums of 300 fp32 values near 10, four of them.
    assert float((mine - exact).abs()) < 5e-3
    assert float((half - exact).abs()) > 0.1


@pytest.mark.parametrize("policy", ["bf16", "fp16"])
def test_a_step_of_the_stepper_with_tiles(policy: str) -> None:
    """Under a region and a loss scale, with a head that is never called; replayed micro-batches included."""
    torch.manual_seed(0)
    body, head = nn.Embedding(60, 16), nn.Linear(16, 60)
    model = nn.ModuleDict({"body": body, "head": head})
    tokens = torch.randint(60, (4, 9))

    def loss() -> tuple[Tensor, int]:
        values = token_log_probs(body(tokens)[:, :-1], head.weight, tokens[:, 1:], head.bias)
        return -values.sum(), values.numel()

    stepper = halfstep.Stepper(model, torch.optim.AdamW(model.parameters(), lr=0.05), policy=policy)
    reports = [stepper.step(loss) for _ in range(12)]
    assert all(report is not None and report.applied for report in reports)
    assert reports[0] is not None
    assert reports[-1] is not None
    assert float(reports[-1].loss) < 0.5 * float(reports[0].loss)


def test_the_peak_is_a_few_tiles() -> None:
    """Both passes, fp32, of 256 tokens and 40,000 words: the logits would be 41 MB, and their gradient as much."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(256, 8, requires_grad=True), torch.randn(40_000, 8, requires_grad=True)
    labels = torch.randint(40_000, (256,))
    tile = 64 * 4096 * 4

    mine = peak_of(lambda: token_log_probs(hidden, weight, labels, chunk_bytes=tile), hidden, weight)
    hidden.grad = weight.grad = None
    full = peak_of(lambda: F.cross_entropy(F.linear(hidden, weight), labels, reduction="none"), hidden, weight)
    gradients = (hidden.numel() + weight.numel()) * 4
    assert full >= 2 * 256 * 40_000 * 4
    # Backward: the tile; the sums of a tile of the weight and of hidden; labels, logsumexp and what is copied of them.
    # Forward: the parts of each token's sum, two numbers for each of the ten tiles of the vocabulary.
    assert mine - gradients < 1.5 * tile + 400_000


def test_calls_that_cannot_work() -> None:
    hidden, weight, labels, bias = inputs()
    with pytest.raises(HalfstepError, match="not transposed"):
        token_log_probs(hidden, weight.t(), labels, bias)
    with pytest.raises(HalfstepError, match="Shift first"):
        token_log_probs(hidden[1:], weight, labels, bias)
    with pytest.raises(HalfstepError, match="one format"):
        token_log_probs(hidden.bfloat16(), weight, labels, bias)
    with pytest.raises(HalfstepError, match="at least 16384"):
        token_log_probs(hidden, weight, labels, bias, chunk_bytes=100)
    with pytest.raises(HalfstepError, match="Choose from"):
        token_statistics(hidden, weight, labels, bias, also=("perplexity",))
    for label in (WORDS, -1):
        with pytest.raises(HalfstepError, match="vocabulary of 9000"):
            token_log_probs(hidden, weight, labels.where(labels != -100, label), bias)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA: products of 16-bit inputs with fp32 results")
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
def test_on_cuda(low: torch.dtype) -> None:
    values = inputs()
    moved = tuple(
        None if value is None else value.detach().cuda().requires_grad_(value.is_floating_point()) for value in values
    )
    with torch.autocast("cuda", dtype=low):
        found = token_statistics(*moved, also=STATISTICS)  # type: ignore[arg-type]
    twin_values = twin_inputs(values, low)
    twin = plain(*twin_values)
    assert float((found.log_probs.cpu() - twin.log_probs).detach().abs().max()) < VALUES
    found.log_probs.sum().backward()
    twin.log_probs.sum().backward()
    for index in (0, 1, 3):
        mine, theirs = moved[index], twin_values[index]
        assert mine is not None
        assert theirs is not None
        assert mine.grad is not None
        assert distance(mine.grad.cpu(), theirs.grad) < LOW[low] + 30 * FP32
