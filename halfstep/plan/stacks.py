"""Combinations of what saves memory: which are tried, what each needs, and which is the cheapest that fits. No torch.

Each technique is tried alone, beside the 16-bit policy that needs least, and then stacked with the others from the
cheapest on, while all weights train and with adapters. Every one of them runs as a step of its own in a worker.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from halfstep.errors import HalfstepError
from halfstep.formats import SIXTEEN_BIT
from halfstep.plan.batch import largest_batch
from halfstep.plan.policy_plan import PolicyPlan
from halfstep.plan.prices import ordered, price_key, price_of
from halfstep.plan.size import mib, size_text
from halfstep.plan.step_trace import StepTrace
from halfstep.plan.subject import Subject
from halfstep.plan.target import Target
from halfstep.plan.worker import Call
from halfstep.policy import Policy
from halfstep.report import Cell, Table

ACCUMULATES = "accumulate=2"
"""How accumulation is traced: from the second micro-batch on each is like it, so a longer window needs no more."""

COMBINATIONS: tuple[tuple[str, ...], ...] = (
    # Alone.
    *(("fused",), ("loop",), (ACCUMULATES,), ("checkpointing=selective",), ("checkpointing",)),
    *(("split16",), ("split8",), ("adamw8bit",), ("lora=16",)),
    # Where all weights train.
    ("fused", ACCUMULATES),
    ("fused", "checkpointing=selective"),
    ("fused", "checkpointing"),
    ("fused", ACCUMULATES, "checkpointing", "uncached"),
    ("fused", "checkpointing", "split16"),
    ("adamw8bit", "checkpointing"),
    ("adamw8bit", "checkpointing", "split8"),
    ("adamw8bit", "checkpointing", "split8", ACCUMULATES),
    # Where adapters do.
    ("lora=16", "16bit"),
    ("lora=16", "16bit", "checkpointing"),
    ("lora=16", "16bit", "4bit"),
    ("lora=16", "16bit", "4bit", "checkpointing"),
    ("lora=16", "16bit", "4bit", "checkpointing", ACCUMULATES),
)


COSTS = ("time", "accuracy", "memory")
"""What a price is in: the words that begin its parts."""


@dataclass(frozen=True)
class Stack:
    """A policy with techniques on top.

    names:   the techniques in the order in which they are applied; none is the policy alone.
    policy:  as asked for.
    batch_size: samples of a micro-batch of the step; times the micro-batches of a window they are those of the subject.
    trace:   the step, None where it is refused; then so is the rest, and ``refused`` says why.
    need:    bytes that the device needs.
    capacity: bytes that it has.
    largest_batch: samples of the largest micro-batch that fits, 0 if none does; None where nobody knows.
    price:   what each technique costs in time or accuracy.
    """

    names: tuple[str, ...]
    policy: str
    capacity: int
    batch_size: int = 0
    trace: StepTrace | None = None
    need: int | None = None
    largest_batch: int | None = None
    price: tuple[str, ...] = ()
    refused: str | None = None

    @property
    def fits(self) -> bool | None:
        """Whether the step fits; None for one that is refused."""
        return None if self.need is None else self.need <= self.capacity

    @property
    def title(self) -> str:
        return " + ".join((self.policy, *self.names))

    def to_dict(self) -> dict[str, Any]:
        """Sizes in MiB; what is not known is null."""
        peak = self.trace.peak if self.trace else None
        return {
            "names": list(self.names),
            "policy": self.policy,
            "batch_size": self.batch_size if self.trace else None,
            "peak_mib": mib(peak.nbytes) if peak else None,
            "need_mib": None if self.need is None else mib(self.need),
            "components": {name: mib(nbytes) for name, nbytes in peak.components.items()} if peak else {},
            "fits": self.fits,
            "largest_batch": self.largest_batch,
            "price": list(self.price),
            "refused": self.refused,
        }


class Runner(Protocol):
    """Runs calls in processes of their own: ``halfstep.plan.worker.Workers``."""

    def run(self, calls: Sequence[Call]) -> list[Any]: ...


Need = Callable[[StepTrace], int]
"""Bytes that a device needs for a step."""


def stacks_of(
    workers: Runner,
    subject: Subject,
    target: Target,
    plans: Sequence[PolicyPlan],
    need_of: Need,
    capacity: int,
    combinations: Sequence[tuple[str, ...]] = COMBINATIONS,
) -> tuple[Stack, ...]:
    """The policies of ``plans`` alone, and ``combinations`` on top of the best, from the cheapest to the dearest.

    The best is the first policy that computes in 16 bit, or the first where none does. What cannot run is among them,
    with its reason. ``plans`` has to have one that runs.
    """
    traced = [plan for plan in plans if plan.trace is not None]
    best = min(traced, key=lambda plan: not _is_low(plan))
    assert best.trace is not None
    search = _Search(workers, subject, target, best.policy, best.trace.batch_size, need_of, capacity)
    alone = [
        Stack((), plan.policy, capacity, plan.trace.batch_size, plan.trace, plan.need, plan.largest_batch)
        for plan in traced
        if plan.trace is not None
    ]
    return (*alone, *sorted(search.run(combinations), key=lambda stack: price_key(stack.names)))


def _is_low(plan: PolicyPlan) -> bool:
    assert plan.trace is not None
    return Policy.parse(plan.trace.policy).compute in SIXTEEN_BIT


@dataclass(frozen=True)
class _Search:
    """``batch_size`` samples are to be trained on in a step, however they are divided."""

    workers: Runner
    subject: Subject
    target: Target
    policy: str
    batch_size: int
    need_of: Need
    capacity: int

    def run(self, combinations: Sequence[tuple[str, ...]]) -> list[Stack]:
        names = [ordered(each) for each in combinations if self.batch_size > 1 or ACCUMULATES not in each]
        sizes = [-(-self.batch_size // 2) if ACCUMULATES in each else self.batch_size for each in names]
        traces = self._traces(names, sizes)
        return [self._stack(*each) for each in zip(names, traces, strict=True)]

    def _traces(self, names: Sequence[tuple[str, ...]], sizes: Sequence[int]) -> list[Any]:
        calls = [
            Call(
                "halfstep.plan.fake_step:fake_step",
                (replace(self.subject, batch_size=size), self.policy, self.target, each),
                {"finds_growth": True},
                f"{self.subject.spec} with {' + '.join(each)}",
            )
            for each, size in zip(names, sizes, strict=True)
        ]
        return self.workers.run(calls)

    def _stack(self, names: tuple[str, ...], trace: Any) -> Stack:
        stack = Stack(names, self.policy, self.capacity, price=price_of(names))
        if isinstance(trace, HalfstepError):
            return replace(stack, refused=str(trace))
        largest = largest_batch(trace.law, self.need_of, self.capacity)
        if ACCUMULATES in names:
            parts = self._parts(trace, largest)
            if parts is None:
                why = "smaller micro-batches run in another way than those that were traced"
                return replace(stack, refused=f"{' + '.join(names)}: {why}.")
            trace, num = parts
            names = tuple(f"accumulate={num}" if name == ACCUMULATES else name for name in names)
            stack = replace(stack, names=names, price=price_of(names))
            trace = replace(trace, techniques=names, num_samples=trace.num_samples // 2 * num)
        return replace(stack, batch_size=trace.batch_size, trace=trace, need=self.need_of(trace), largest_batch=largest)

    def _parts(self, trace: StepTrace, largest: int | None) -> tuple[StepTrace, int] | None:
        """The step with the fewest equal micro-batches that fit, or as many as there are samples if none do."""
        for num in range(2, self.batch_size + 1):
            size = self.batch_size // num
            is_last = size == 1
            if size * num == self.batch_size and (is_last or (largest is not None and size <= largest)):
                if size == trace.batch_size:
                    return trace, num
                return (trace.law.with_batch(size), num) if trace.law.growth is not None else None
        raise AssertionError("a sample each is a way to divide them")


def cheapest(stacks: Sequence[Stack]) -> Stack | None:
    """The first that fits; None if none does. ``stacks`` are in the order of their price."""
    return next((stack for stack in stacks if stack.fits), None)


def answer(stacks: Sequence[Stack]) -> str:
    """One sentence: the cheapest stack that fits, or how much memory is missing at the least."""
    found = cheapest(stacks)
    known = [stack for stack in stacks if stack.trace is not None]
    num_samples = known[0].trace.num_samples if known[0].trace else 0
    batch = f"a step of {num_samples:,} sample{'s' if num_samples > 1 else ''}"
    if found is None:
        nearest = min(known, key=lambda stack: stack.need or 0)
        need = nearest.need or 0
        return (
            f"No stack fits {batch} into {size_text(nearest.capacity)}: {nearest.title} comes nearest, needs "
            f"{size_text(need)}, and {size_text(need - nearest.capacity)} are missing."
        )
    need = found.need or 0
    return (
        f"The cheapest stack that fits {batch} into {size_text(found.capacity)} is {found.title}: it needs "
        f"{size_text(need)}."
    )


def larger_batch(stacks: Sequence[Stack], spec: str) -> tuple[str, ...]:
    """What to do with the memory that the cheapest fitting 16-bit stack leaves; no sentence if it admits no doubling.

    The rules for the learning rate: linear for SGD (Goyal et al. 2017, arXiv 1706.02677), by the square root for Adam
    (Malladi et al. 2022, arXiv 2205.10287; for SGD by the variance argument of Krizhevsky 2014, arXiv 1404.5997).
    """
    found = cheapest([stack for stack in stacks if stack.policy != "fp32"])
    if found is None or not found.largest_batch or found.largest_batch < 2 * found.batch_size:
        return ()
    factor = 1 << int(math.log2(found.largest_batch / found.batch_size))
    batch = factor * found.batch_size
    file, colon, _ = spec.rpartition(":")
    file = file if colon else spec
    other = f"{file if file.endswith('.py') else 'FILE.py'}:larger"
    this = "FILE.py:workload" if colon and not file.endswith(".py") else spec
    policies = f'"{found.policy}"' if " " in found.policy else found.policy
    return (
        f"{found.title} admits micro-batches of up to {found.largest_batch:,} samples, {factor} x {found.batch_size:,} "
        f"= {batch:,} in powers of two.",
        f"With {factor} times the batch the usual rules multiply the learning rate: by {factor} with SGD (linear, "
        f"Goyal et al. 2017, with a warm-up), by {math.sqrt(factor):.3g} with Adam (square root, Malladi et al. 2022; "
        "Krizhevsky 2014 derives it for SGD, and found linear better).",
        f"Neither is sure for your model. Write a function larger with that batch and rate and test it: halfstep "
        f"compare {other} --policies fp32,{policies}, with 1/{factor} of the steps of halfstep compare {this} "
        f"--policies fp32,{policies}, and read both final losses.",
    )


def stacks_table(stacks: Sequence[Stack]) -> Table:
    """The stacks for a reader, from the cheapest to the dearest; what is refused at its place."""
    rows: list[Sequence[str | Cell]] = []
    for stack in stacks:
        if stack.trace is None:
            rows.append((stack.title, Cell("cannot run", "bad"), "", "", "", stack.refused or ""))
            continue
        fits = Cell("yes", "good") if stack.fits else Cell("no", "bad")
        largest = "-" if stack.largest_batch is None else f"{stack.largest_batch:,}"
        costs = [word for word in COSTS if any(f"{word}: " in text for text in stack.price)]
        rows.append(
            (
                stack.title,
                size_text(stack.trace.peak.nbytes),
                size_text(stack.need or 0),
                fits,
                largest,
                ", ".join(costs) or "-",
            )
        )
    columns = ("stack", ">peak", ">needs", ">fits", ">largest micro-batch", "costs")
    note = "From the cheapest to the dearest. The prices with their arithmetic are in docs/stacks.md and in the JSON."
    return Table(columns, rows, title="What saves memory", note=note)
