"""The log-probability of each label in fp32, in tiles of the logits, without the logits themselves.

    log_probs = token_log_probs(hidden[:, :-1], head.weight, input_ids[:, 1:])
    loss = -log_probs.sum() / num_tokens

The logits of ``tokens x vocabulary`` exist one tile at a time: a product of 16-bit inputs under autocast (of fp32 ones
without it) that is summed and kept in fp32, where a head rounds it to 16 bits. Backward computes each tile again from
the hidden states and one number a token, its logsumexp. Tokens whose label is ``ignore_index`` are left out before the
first product. docs/log-probs.md has the arithmetic and what it costs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from halfstep.errors import HalfstepError

CHUNK_BYTES = 64 << 20
"""What one tile of fp32 logits may take: 4096 tokens by 4096 words."""
_WORDS = 4096
"""Words of a tile. A constant, so that a token's sum over the vocabulary has the same parts whatever the budget is."""
_LARGEST = 13
"""The largest gradient of a logit is brought between 2^12 and 2^13 before it is rounded to 16 bits; fp16 ends at 2^16.
A softmax that is flat over 128,000 words, 2^-17, then lies at 2^-5, and the smallest normal number at 2^-14."""

STATISTICS = ("entropy", "mean_logit", "log_sum_squares", "is_top1")
"""What :func:`token_statistics` can compute beside the log-probability, in the same pass and without a gradient."""


@dataclass(frozen=True)
class TokenStatistics:
    """One value a label, of the labels' shape; 0 (or False) where the label is ignored, None where not asked for."""

    log_probs: Tensor
    entropy: Tensor | None = None
    """Of the distribution over the vocabulary, in nats."""
    mean_logit: Tensor | None = None
    log_sum_squares: Tensor | None = None
    """log(sum of p squared) over the vocabulary, which WPO's weights are made of."""
    is_top1: Tensor | None = None
    """Whether the label has the largest logit; of equal ones the first word counts."""


def token_log_probs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    scale: float = 1.0,
    soft_cap: float | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> Tensor:
    """log p(label) of each token in fp32 (fp64 for fp64 inputs), of the labels' shape; 0 where the label is ignored.

    hidden:      the final hidden states, [..., width]; labels have its shape without the last dimension, and are
                 already shifted: the hidden state at a place predicts the label at the same place.
    weight:      that of the head, [vocabulary, width], and its bias [vocabulary]. Either may be frozen, or tied.
    scale:       the logits are multiplied by it; soft_cap: then squeezed to ``soft_cap * tanh(logit / soft_cap)``.
    chunk_bytes: what a tile of fp32 logits may take. A few tiles live at a time. No result depends on it, but for
                 the order in which fp32 products are summed.

    Gradients flow to hidden, weight and bias, each in its own format and summed in fp32. One read of the device finds
    the labels that count. Raises HalfstepError for shapes and formats that a head would refuse as well, and for a
    label outside the vocabulary.
    """
    return token_statistics(
        hidden,
        weight,
        labels,
        bias,
        ignore_index=ignore_index,
        scale=scale,
        soft_cap=soft_cap,
        chunk_bytes=chunk_bytes,
    ).log_probs


def token_statistics(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    also: Collection[str] = (),
    ignore_index: int = -100,
    scale: float = 1.0,
    soft_cap: float | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> TokenStatistics:
    """:func:`token_log_probs`, and of the same tiles what ``also`` names (of :data:`STATISTICS`), without gradients."""
    compute = _check(hidden, weight, labels, bias, also, chunk_bytes)
    index = (labels.reshape(-1) != ignore_index).nonzero().squeeze(1)
    kept = labels.reshape(-1)[index]
    _check_labels(kept, weight.shape[0])
    states = hidden.reshape(-1, hidden.shape[-1])
    if len(index) < len(states):
        states = states.index_select(0, index)
    rows = max(1, chunk_bytes // (4 * _WORDS))
    values = _LogProbs.apply(  # type: ignore[no-untyped-call]
        states, weight, bias, kept, compute, rows, scale, soft_cap, frozenset(also)
    )

    def spread(value: Tensor | None) -> Any:
        if value is None:
            return None
        # index_copy keeps the graph when no label counts: the gradients are zeros, which DDP waits for.
        return value.new_zeros(labels.numel()).index_copy(0, index, value).view(labels.shape)

    return TokenStatistics(*[spread(value) for value in values])


class _LogProbs(torch.autograd.Function):
    """Rows of hidden states with labels that all count. The words are the outer loop, so that a tile of the weight is
    cast once a pass, and its gradient is complete in fp32 before it is rounded to the weight's format."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        compute: torch.dtype,
        rows: int,
        scale: float,
        soft_cap: float | None,
        also: frozenset[str],
    ) -> tuple[Tensor | None, ...]:
        with torch.autocast(hidden.device.type, enabled=False):
            head = _Head(hidden.to(compute), weight, bias, compute, rows, scale, soft_cap)
            label_logit = torch.full_like(labels, torch.nan, dtype=head.wide)
            parts: dict[str, list[Tensor]] = {}
            for words, weight_tile in head.tiles():
                chunks: dict[str, list[Tensor]] = {}
                for tokens in head.chunks():
                    logits, _ = head.logits(tokens, words, weight_tile)
                    inside, place = _places(labels[tokens], words)
                    label = logits.gather(1, place[:, None])[:, 0]
                    label_logit[tokens] = torch.where(inside, label, label_logit[tokens])
                    for name, value in _sums(logits, words.start, also).items():
                        chunks.setdefault(name, []).append(value)
                    del logits  # before the next tile is made
                for name, values in chunks.items():
                    parts.setdefault(name, []).append(torch.cat(values))
            whole = {name: torch.stack(values) for name, values in parts.items()}
            logsumexp = (whole["max"] + whole["sum"].log()).logsumexp(0)
            found = _combine(whole, logsumexp, labels, weight.shape[0])
        ctx.save_for_backward(head.hidden, weight, bias, labels, logsumexp)
        ctx.settings = compute, rows, scale, soft_cap, hidden.dtype
        statistics = [found.get(name) for name in STATISTICS]
        ctx.mark_non_differentiable(*(value for value in statistics if value is not None))
        ctx.set_materialize_grads(False)
        return (label_logit - logsumexp, *statistics)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            # torch's once_differentiable says so only when the upstream gradient has a graph too; else the second
            # derivative would be 0 without an error.
            raise HalfstepError(
                "a gradient of token_log_probs with create_graph=True",
                "its backward recomputes tiles of logits and keeps no graph of them",
                "Take log_softmax of the full logits where second derivatives are needed.",
            )
        rest = (None,) * 6
        if gradient is None:
            return (None, None, None, *rest)
        hidden, weight, bias, labels, logsumexp = ctx.saved_tensors
        compute, rows, scale, soft_cap, hidden_dtype = ctx.settings
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        with torch.autocast(hidden.device.type, enabled=False):
            head = _Head(hidden, weight, bias, compute, rows, scale, soft_cap)
            gradient, factor = _bring_in_range(gradient.to(head.wide))
            factor = factor * scale
            of_hidden = torch.zeros_like(hidden, dtype=head.wide) if needs_hidden else None
            of_weight = torch.empty_like(weight) if needs_weight else None
            of_bias = torch.empty_like(bias) if needs_bias else None
            for words, weight_tile in head.tiles():
                # Of one tile of the weight, over all tokens.
                tile_sum = torch.zeros_like(weight_tile, dtype=head.wide) if needs_weight else None
                bias_sum = torch.zeros_like(weight_tile[:, 0], dtype=head.wide) if needs_bias else None
                for tokens in head.chunks():
                    logits, slope = head.logits(tokens, words, weight_tile)
                    # d log p / d logit is 1 at the label minus p everywhere; the gradient of the token weighs both.
                    weights = gradient[tokens]
                    of_logits = logits.sub_(logsumexp[tokens, None]).exp_().mul_(-weights[:, None])
                    inside, place = _places(labels[tokens], words)
                    of_logits.scatter_add_(1, place[:, None], weights.where(inside, 0)[:, None])
                    if slope is not None:
                        of_logits.mul_(slope)
                    if bias_sum is not None:
                        bias_sum += of_logits.sum(0)
                    low = of_logits.to(compute)
                    del logits, of_logits, slope
                    if of_hidden is not None:
                        of_hidden[tokens] += _product(low, weight_tile)
                    if tile_sum is not None:
                        tile_sum += _product(low.t(), hidden[tokens])
                    del low
                if of_weight is not None and tile_sum is not None:
                    of_weight[words] = tile_sum.mul_(factor)
                if of_bias is not None and bias_sum is not None:
                    of_bias[words] = bias_sum.mul_(factor)
            if of_hidden is not None:
                of_hidden = of_hidden.mul_(factor).to(hidden_dtype)
        return (of_hidden, of_weight, of_bias, *rest)


class _Head:
    """The logits, a tile at a time. A 16-bit tile of the weight lives as long as its products are made."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        compute: torch.dtype,
        rows: int,
        scale: float,
        soft_cap: float | None,
    ) -> None:
        self.hidden, self._weight, self._bias, self._compute = hidden, weight, bias, compute
        self._rows, self._scale, self._soft_cap = rows, scale, soft_cap
        self.wide = torch.promote_types(compute, torch.float32)

    def tiles(self) -> Iterator[tuple[slice, Tensor]]:
        """Slices of the vocabulary, and the weight's rows there in the compute format."""
        for start in range(0, len(self._weight), _WORDS):
            words = slice(start, min(start + _WORDS, len(self._weight)))
            yield words, self._weight[words].to(self._compute)

    def chunks(self) -> Iterator[slice]:
        """Slices of the tokens; an empty one where there are none, so that every sum has its value."""
        for start in range(0, max(1, len(self.hidden)), self._rows):
            yield slice(start, min(start + self._rows, len(self.hidden)))

    def logits(self, tokens: slice, words: slice, weight: Tensor) -> tuple[Tensor, Tensor | None]:
        """A new tile of logits, and the slope of the cap where there is one (``scale`` is not in it)."""
        logits = _product(self.hidden[tokens], weight.t())
        if self._bias is not None:
            logits += self._bias[words].to(self._compute)
        if self._scale != 1:
            logits *= self._scale
        if self._soft_cap is None:
            return logits, None
        squeezed = logits.div_(self._soft_cap).tanh_()
        slope = 1 - squeezed.square()
        return squeezed.mul_(self._soft_cap), slope


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b with sums in fp32 that are not rounded to the 16 bits of the inputs."""
    if a.dtype == torch.promote_types(a.dtype, torch.float32):
        return a @ b
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    # The product of two 16-bit numbers is exact in fp32: only the order of the sums differs from a tensor core's.
    return a.float() @ b.float()


def _places(labels: Tensor, words: slice) -> tuple[Tensor, Tensor]:
    """Whether each label is one of these words, and its column (of the nearest word where it is not)."""
    local = labels - words.start
    num_words = words.stop - words.start
    return (local >= 0) & (local < num_words), local.clamp(0, num_words - 1)


def _sums(logits: Tensor, start: int, also: frozenset[str]) -> dict[str, Tensor]:
    """What a tile of logits adds to each token. Takes the tile apart."""
    found = {}
    if "mean_logit" in also:
        found["total"] = logits.sum(1)
    if "is_top1" in also:
        largest, first = logits.max(1)
        found["top"], found["word"] = largest, first + start
    else:
        largest = logits.amax(1)
    # A tile of -inf alone, words that are masked out, has no largest to subtract.
    largest = largest.clamp(min=torch.finfo(logits.dtype).min)
    shifted = logits.sub_(largest[:, None])
    terms = shifted.exp() if "entropy" in also else shifted.exp_()
    found["max"], found["sum"] = largest, terms.sum(1)
    if "entropy" in also:
        # A word at -inf has the share 0 and adds nothing.
        found["weighed"] = shifted.clamp_(min=torch.finfo(logits.dtype).min).mul_(terms).sum(1)
    if "log_sum_squares" in also:
        found["squares"] = terms.square_().sum(1)
    return found


def _combine(whole: dict[str, Tensor], logsumexp: Tensor, labels: Tensor, num_words: int) -> dict[str, Tensor]:
    """The statistics of each token, of its sums over the tiles, [tiles, tokens]."""
    found = {}
    share = (whole["max"] - logsumexp).exp()
    if "weighed" in whole:
        mean = share * (whole["weighed"] + whole["max"] * whole["sum"])
        found["entropy"] = logsumexp - mean.sum(0)
    if "total" in whole:
        found["mean_logit"] = whole["total"].sum(0) / num_words
    if "squares" in whole:
        found["log_sum_squares"] = (share.square() * whole["squares"]).sum(0).log()
    if "word" in whole:
        best = whole["top"].argmax(0)
        found["is_top1"] = whole["word"].gather(0, best[None])[0] == labels
    return found


def _bring_in_range(gradient: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient times a power of two, so that fp16 holds it times any softmax, and what undoes it.

    With a loss scale, a token's gradient may be 2^16 and more, which fp16 has no number for; without one, it is 1 over
    the tokens, and times a small softmax 0 in fp16.
    """
    largest = gradient.abs().amax() if len(gradient) else gradient.new_ones(())
    exponent = torch.frexp(largest)[1].clamp(-100, 128)
    return torch.ldexp(gradient, _LARGEST - exponent), torch.ldexp(gradient.new_ones(()), exponent - _LARGEST)


def _check(
    hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, also: Collection[str], chunk_bytes: int
) -> torch.dtype:
    """The format of the products."""
    width = hidden.shape[-1]
    if weight.dim() != 2 or weight.shape[1] != width or (bias is not None and bias.shape != weight.shape[:1]):
        raise HalfstepError(
            f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)}, bias {bias if bias is None else bias.shape}",
            "a head is [vocabulary, width] with a bias [vocabulary], and width is the hidden states' last dimension",
            "Pass the weight of the output layer as it stands, not transposed.",
        )
    if labels.shape != hidden.shape[:-1]:
        raise HalfstepError(
            f"labels {tuple(labels.shape)} for hidden {tuple(hidden.shape)}",
            "each hidden state predicts one label",
            "Shift first: hidden[:, :-1] predicts labels[:, 1:].",
        )
    if chunk_bytes < 4 * _WORDS:
        raise HalfstepError(
            f"chunk_bytes={chunk_bytes}",
            f"one token's tile of {_WORDS} logits takes {4 * _WORDS} bytes",
            f"Pass at least {4 * _WORDS}.",
        )
    if not set(also) <= set(STATISTICS):
        raise HalfstepError(
            f"also={sorted(also)}", "there is no such statistic", f"Choose from {', '.join(STATISTICS)}."
        )
    device = hidden.device.type
    if torch.is_autocast_enabled(device) and hidden.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    if weight.dtype != hidden.dtype:
        raise HalfstepError(
            f"hidden in {hidden.dtype} and a weight in {weight.dtype}",
            "outside autocast the two multiply in one format",
            "Cast one of them, or open a region around the call.",
        )
    return hidden.dtype


def _check_labels(labels: Tensor, num_words: int) -> None:
    if len(labels):
        low, high = torch.stack(torch.aminmax(labels)).tolist()
        if low < 0 or high >= num_words:
            raise HalfstepError(
                f"labels from {low} to {high} for a vocabulary of {num_words}",
                "a label is a word's number, or ignore_index",
                "Look for a padding number other than ignore_index, or a tokenizer with more words than the head.",
            )
