"""What can be changed to save memory besides the policy: names, prices, and what excludes what. No torch in here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from halfstep.errors import HalfstepError


@dataclass(frozen=True)
class Kind:
    """A technique, or a family of them that differ by a number.

    name:     as a stack lists it; one that ends in ``=`` is followed by a whole number from ``least``.
    group:    of two techniques in one group a stack has one. excludes: groups that it has no use beside.
    needs:    the group that has to stand before it in a stack.
    price:    what it costs in time or accuracy, with the arithmetic.
    """

    name: str
    group: str
    price: str
    excludes: tuple[str, ...] = ()
    needs: str | None = None
    least: int = 1

    @property
    def takes_number(self) -> bool:
        return self.name.endswith("=")

    @property
    def example(self) -> str:
        return f"{self.name}{EXAMPLES[self.name]}" if self.takes_number else self.name


EXAMPLES = {"accumulate=": 4, "lora=": 16}
"""A usual number of each family."""

KINDS = (
    Kind(
        "fused",
        "optimizer",
        "none: one kernel in place of several passes, the same arithmetic but for its rounding",
    ),
    Kind(
        "foreach",
        "optimizer",
        "memory: lists of temporaries, with AdamW 4 bytes a trained parameter (20 in place of 16 at the step)",
    ),
    Kind(
        "loop",
        "optimizer",
        "time: a dozen small kernels for each parameter tensor, with AdamW, in place of a dozen for all",
    ),
    Kind(
        "accumulate=",
        "window",
        "time: N times the kernel launches for the same samples, on 1/N of the rows each; BatchNorm sees 1/N of the "
        "samples at once",
        least=2,
    ),
    Kind(
        "checkpointing=selective",
        "checkpointing",
        "time: what is neither a product nor attention runs once more (norms, activations, casts); the products, "
        "nearly all of the operations, do not",
    ),
    Kind(
        "checkpointing",
        "checkpointing",
        "time: one more forward pass of the blocks, 2 + 2 + 4 operations for each weight and token in place of 2 + 4: "
        "+33 %",
    ),
    Kind(
        "uncached",
        "cache of casts",
        "none where a forward pass uses each weight once: it is cast once either way; one that is used k times is cast "
        "k times",
    ),
    Kind(
        "split16",
        "master",
        "time: a step of the optimizer takes 2.2 to 3.7 times as long (a whole step of charlm on a CPU: +3 %); 16 "
        "+ 16 bits are all of fp32 (fp16: of weights above 7.6e-6)",
        excludes=("adapter",),
    ),
    Kind(
        "split8",
        "master",
        "accuracy: 16 + 8 bits of a weight, updates under 2^-17 of it (bf16) are lost; time: as split16 (charlm: +4 %)",
        excludes=("adapter",),
    ),
    Kind(
        "adamw8bit",
        "optimizer",
        "accuracy: each moment is one of 256 values x the largest of its 256 neighbours, 2 x (1 + 4/256) = 2.03 bytes "
        "in place of 8; time: a pass over the gradients for the loss scale, which fused has in its kernel",
    ),
    Kind(
        "lora=",
        "adapter",
        "accuracy: the base stays as it is, each matrix moves by a product of rank R, R x (in + out) weights in place "
        "of in x out; time: two thin products more, and no gradients of the base, 2 + 2 operations in place of 2 + 4",
    ),
    Kind(
        "16bit",
        "base in 16 bit",
        "accuracy: the frozen weights are rounded once, by at most 2^-9 of each in bf16 (fp16: 2^-12)",
        needs="adapter",
    ),
    Kind(
        "4bit",
        "base in 4 bit",
        "accuracy: each frozen weight is one of 16 values x the largest of its 64 neighbours, 1/2 + 4/64 = 0.5625 "
        "bytes; time: each matrix is unpacked in the forward and the backward pass, with checkpointing three times",
        needs="adapter",
    ),
)
"""From the cheapest to the dearest, in the order in which they are applied."""


def names() -> str:
    """All names, for a message."""
    return ", ".join(kind.example for kind in KINDS)


def parse(name: str) -> tuple[Kind, int]:
    """The kind that ``name`` is of, and its number (0 if it takes none). HalfstepError if there is none."""
    for kind in KINDS:
        if name == kind.name and not kind.takes_number:
            return kind, 0
        number = name.removeprefix(kind.name)
        if kind.takes_number and number != name:
            if number.isascii() and number.isdigit() and int(number) >= kind.least:
                return kind, int(number)
            raise HalfstepError(
                f"technique {name!r}", f"its number is a whole one from {kind.least}", f"Use {kind.example}."
            )
    raise HalfstepError(f"technique {name!r}", "there is none of this name", f"Use {names()}.")


def ordered(stack: Sequence[str]) -> tuple[str, ...]:
    """The names in the order in which they are applied. HalfstepError if they do not go together."""
    kinds = {name: parse(name)[0] for name in stack}
    groups: dict[str, str] = {}
    for name, kind in kinds.items():
        if kind.group in groups:
            raise HalfstepError(
                f"techniques {groups[kind.group]} and {name}", f"both set the {kind.group}", "Leave one of them out."
            )
        groups[kind.group] = name
    for name, kind in kinds.items():
        for group in kind.excludes:
            if group in groups:
                raise HalfstepError(
                    f"techniques {groups[group]} and {name}",
                    f"the weights that train then are the {group}'s alone, too few to gain by {name}",
                    "Leave one of them out.",
                )
        if kind.needs is not None and kind.needs not in groups:
            raise HalfstepError(
                f"technique {name} alone",
                "it stores weights that do not train, and here all of them do",
                f"Use lora=16 with it (lora=16 {name}).",
            )
    return tuple(sorted(kinds, key=lambda name: KINDS.index(kinds[name])))


def price_key(stack: Sequence[str]) -> tuple[int, ...]:
    """Orders stacks by price: by their dearest technique, then by the next one."""
    return tuple(sorted((KINDS.index(parse(name)[0]) for name in stack), reverse=True))


def price_of(stack: Sequence[str]) -> tuple[str, ...]:
    """The price of each technique, in the order of ``stack``, as ``name: price``."""
    return tuple(f"{name}: {parse(name)[0].price}" for name in stack)
