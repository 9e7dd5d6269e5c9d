"""The log-probability of each label, forward and backward: full fp32 logits, TRL's fused head, tiles in fp32.

Peak memory is that of live tensors (halfstep/compare/memory.py) beside hidden states and weight, the same on every
machine. The bound of the full logits, in bytes: what a head under autocast returns (2 or 4 for each logit), its copy in
fp32 (4), log_softmax, which backward needs (4), and the gradient of each of these while it is made. That of the tiles:
two, the gradients of weight and hidden, which every path has, and fp32 sums of hidden's size.

    python benchmarks/log_probs.py              the tables (about three minutes)
    python benchmarks/log_probs.py --tokens 64 --words 9000 --rounds 2     a try

The largest disagreement of a token's loss is taken against the plain fp64 logits of the same rounded inputs. Half of
the labels are ignored, as those of a prompt are.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from interleave import Contender, measure, report
from torch import Tensor
from torch.nn import functional as F

from halfstep.compare.memory import LiveBytes
from halfstep.region import Region
from halfstep.train.log_probs import CHUNK_BYTES, token_log_probs

Path = Callable[[Tensor, Tensor, Tensor], Tensor]
MIB = 2**20


def full(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """What a head, a cast and cross_entropy do."""
    return -F.cross_entropy(F.linear(hidden, weight).float(), labels, reduction="none")


def tiles(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return token_log_probs(hidden, weight, labels)


def trl_head(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """As TRL 1.16 calls its kernel for SFT, DPO and KTO: without Triton, all places are computed."""
    from trl.kernels import ChunkedLogProbFunction
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE as words

    found = ChunkedLogProbFunction.apply(
        hidden, weight, None, labels.clamp(min=0), 1.0, words, None, 1.0, ("log_probs",)
    )
    return found[0].masked_fill(labels == -100, 0)


def paths() -> dict[str, Path]:
    found: dict[str, Path] = {"full": full, "tiles": tiles}
    try:
        import trl.kernels  # noqa: F401
    except ImportError:
        print("TRL is not installed: its column is missing")
        return found
    return {"full": full, "trl": trl_head, "tiles": tiles}


class Case:
    """Inputs of one format, and a forward and backward pass through any path."""

    def __init__(self, policy: str, tokens: int, words: int, width: int, loss_scale: float = 1.0) -> None:
        torch.manual_seed(0)
        self.hidden = torch.randn(tokens, width, requires_grad=True)
        # Logits with a spread of 3, as a trained model has: some 20 nats between the likely words and the rest.
        self.weight = (torch.randn(words, width) * 3 / width**0.5).requires_grad_()
        self.labels = torch.randint(words, (tokens,))
        self.labels[::2] = -100
        self.policy, self.loss_scale = policy, loss_scale
        self.region = Region(torch.nn.Linear(1, 1), policy)

    def run(self, path: Path) -> tuple[Tensor, Tensor, Tensor]:
        """log p, and the gradients of hidden and weight without the loss scale."""
        self.hidden.grad = self.weight.grad = None
        with self.region:
            values = path(self.hidden, self.weight, self.labels)
        with self.region.backward():
            (-values.sum() * self.loss_scale).backward()
        assert self.hidden.grad is not None
        assert self.weight.grad is not None
        return values.detach(), self.hidden.grad / self.loss_scale, self.weight.grad / self.loss_scale

    def peak(self, path: Path) -> float:
        """MiB beside the inputs."""
        with LiveBytes() as live:
            live.count([self.hidden, self.weight, self.labels])
            before = live.now
            with self.region:
                values = path(self.hidden, self.weight, self.labels)
            with self.region.backward():
                values.sum().backward()
        self.hidden.grad = self.weight.grad = None
        return (live.peak - before) / MIB

    def exact(self) -> tuple[Tensor, Tensor, Tensor]:
        """In fp64, of the inputs as they are rounded for the products, sixteen tokens at a time."""
        low = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.policy, torch.float32)
        hidden, weight = (value.detach().to(low).double() for value in (self.hidden, self.weight))
        values, of_hidden, of_weight = self.labels.new_zeros(len(hidden)).double(), torch.zeros_like(hidden), 0
        for places in (self.labels != -100).nonzero()[:, 0].split(16):
            p = (hidden[places] @ weight.t()).log_softmax(1)
            label = self.labels[places, None]
            values[places] = p.gather(1, label)[:, 0]
            slope = p.exp_().scatter_add_(1, label, torch.full_like(label, -1, dtype=torch.float64))
            of_hidden[places] = slope @ weight
            of_weight = of_weight + slope.t() @ hidden[places]
        return values, of_hidden, torch.as_tensor(of_weight)


def memory(tokens: int, words: int, width: int) -> None:
    gradients = (tokens + words) * width * 4 / MIB
    print(f"\npeak, MiB beside inputs: {tokens} tokens, {words} words, width {width}; gradients alone {gradients:.0f}")
    print(f"  fp32 logits {tokens * words * 4 / MIB:.0f}, a tile {min(CHUNK_BYTES, tokens * 4096 * 4) / MIB:.0f}")
    for policy, frozen in (("fp32", False), ("bf16", False), ("bf16", True)):
        case = Case(policy, tokens, words, width)
        case.weight.requires_grad_(not frozen)
        figures = {name: case.peak(path) for name, path in paths().items()}
        ratio = figures["full"] / figures["tiles"]
        print(
            f"  {policy}{', frozen head' * frozen}: "
            + ", ".join(f"{name} {figure:.0f}" for name, figure in figures.items()),
            end="",
        )
        print(f"; full / tiles {ratio:.1f}", flush=True)


def disagreement(tokens: int, words: int, width: int) -> None:
    print(f"\nlargest disagreement with fp64: {tokens} tokens, {words} words (log p; relative in the norm: gradients)")
    for policy, loss_scale in (("fp32", 1.0), ("bf16", 1.0), ("fp16", 2.0**16), ("fp16", 2.0**-8)):
        case = Case(policy, tokens, words, width, loss_scale)
        exact = case.exact()
        for name, path in paths().items():
            values, *gradients = case.run(path)
            apart = float((values - exact[0]).abs().max())
            mean = abs(float((values - exact[0]).sum())) / int((case.labels != -100).sum())
            parts = [float((a - b).norm() / b.norm()) for a, b in zip(gradients, exact[1:], strict=True)]
            print(
                f"  {policy} x {loss_scale:g} {name:6} token {apart:.1e}, mean loss {mean:.1e}, "
                f"hidden {parts[0]:.1e}, weight {parts[1]:.1e}",
                flush=True,
            )


def speed(tokens: int, words: int, width: int, rounds: int) -> None:
    # One thread: on cores that are busy with other work, two wait for each other at every small operation.
    torch.set_num_threads(1)
    print(f"\ntime, forward and backward, one thread: {tokens} tokens, {words} words, width {width}")
    for policy in ("fp32", "bf16"):
        case = Case(policy, tokens, words, width)

        def contender(path: Path, case: Case = case) -> Contender:
            return Contender(lambda: case.run(path))

        times = measure({name: contender(path) for name, path in paths().items()}, rounds, warm_up=1)
        print(f" {policy}")
        for name in times:
            if name != "tiles":
                report(times, "tiles", name, "bound: 4 products against 3, of half the tokens: 0.67")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--words", type=int, default=128_000)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    memory(options.tokens, options.words, options.width)
    disagreement(min(options.tokens, 128), options.words, options.width)
    speed(min(options.tokens, 256), options.words, options.width, options.rounds)


if __name__ == "__main__":
    main()
