"""What would save memory on this model, by what-ifs: the trace without what is in question, its peak computed again.

Each rule takes a trace and gives a Saving, or None where it has nothing to say. What a rule calls "at most" it bounds
from above; every other number is what the change saves.
"""

from __future__ import annotations

import bisect
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from halfstep.plan.batch import saves_from
from halfstep.plan.holders import module_patterns, op_text, peak_phase, sections
from halfstep.plan.policy_plan import PolicyPlan
from halfstep.plan.size import size_text
from halfstep.plan.step_trace import BACKWARD, FORWARD, STEP, StepTrace, Storage
from halfstep.report import count_text

LEAST_SHARE = 0.02
"""Share of the peak below which nothing is worth a sentence."""

_CASTS = "16-bit weights"
_KEPT = ("activations", _CASTS)
_LASTING = ("weights", "master weights", "optimizer states", "gradients")
_SIXTEEN_BIT = ("bf16", "fp16")
_LOSS_OPS = ("_log_softmax", "nll_loss")
_ELEMENTWISE = frozenset(("sqrt", "div", "mul", "add", "sub", "neg", "reciprocal", "pow", "addcmul", "addcdiv"))


@dataclass(frozen=True)
class Saving:
    """nbytes: what it is worth at the peak. text: a sentence, without the policy that it is of."""

    nbytes: int
    text: str


def advise(plans: Sequence[PolicyPlan], tokens_per_sample: int | None = None) -> tuple[str, ...]:
    """Sentences for the first 16-bit policy of ``plans`` that has a trace, else for the first that has one.

    What is worth most comes first. The first of ``plans`` is what the others are compared with.
    tokens_per_sample: where it is known, batches are told in tokens as well.
    """
    traced = [(plan.policy, plan.trace) for plan in plans if plan.trace is not None]
    if not traced:
        return ()
    policy, trace = next(((p, t) for p, t in traced if _is_sixteen_bit(t)), traced[0])
    found = [saving for rule in RULES if (saving := rule(trace)) is not None]
    found = [s for s in found if s.nbytes > LEAST_SHARE * trace.peak.nbytes]
    texts = [f"{policy}: {s.text}" for s in sorted(found, key=lambda saving: -saving.nbytes)]
    reference = plans[0].trace
    if reference is not None and reference is not trace:
        texts += filter(None, [no_saving(plans[0].policy, reference, policy, trace, tokens_per_sample)])
    if not texts:
        kept = sum(nbytes for name, nbytes in trace.peak.components.items() if name in _LASTING)
        texts = [
            f"{policy}: none of the changes looked at is worth {100 * LEAST_SHARE:g} % of the peak; weights, optimizer"
            f" states and gradients are {100 * kept / max(1, trace.peak.nbytes):.0f} % of it."
        ]
    return tuple(texts)


def _is_sixteen_bit(trace: StepTrace) -> bool:
    return trace.policy.split()[0] in _SIXTEEN_BIT


# --- what-ifs -------------------------------------------------------------------------------------------------------


def peak_if(num_events: int, spans: Iterable[tuple[int, int | None, int]]) -> int:
    """The peak of blocks of memory, each as (born, died, nbytes)."""
    changes = [0] * (num_events + 1)
    for born, died, nbytes in spans:
        changes[born] += nbytes
        if died is not None:
            changes[died] -= nbytes
    return max(itertools.accumulate(changes))


def peak_without(trace: StepTrace, is_gone: Callable[[Storage], bool]) -> int:
    """The peak of ``trace`` without the storages that ``is_gone`` picks."""
    return peak_if(trace.num_events, ((s.born, s.died, s.nbytes) for s in trace.storages if not is_gone(s)))


def _saved(trace: StepTrace, is_gone: Callable[[Storage], bool]) -> int:
    return trace.peak.nbytes - peak_without(trace, is_gone)


# --- rules ----------------------------------------------------------------------------------------------------------


def optimizer_temporaries(trace: StepTrace) -> Saving | None:
    """Lists of temporaries that an optimizer makes and a fused one does not."""
    held = trace.peak.components
    # With masters the temporaries are theirs too, and with states in 8 bits fused is another optimizer.
    if peak_phase(trace) != STEP or "master weights" in held or held.get("optimizer states", 0) < 4 * trace.num_trained:
        return None

    def is_temporary(s: Storage) -> bool:
        return s.component == "step temporaries" and s.op is not None and _name(s.op) in _ELEMENTWISE

    made = Counter[str]()
    for s in trace.alive(trace.peak.time):
        if is_temporary(s) and s.op is not None:
            made[op_text(s.op)] += s.nbytes
    saved = _saved(trace, is_temporary)
    if not made or not saved:
        return None
    return Saving(
        saved,
        f"the peak is in the optimizer ({made.most_common(1)[0][0]}): fused=True, which torch's Adam, AdamW and SGD"
        f" take, saves {size_text(saved)}, checkpointing nothing.",
    )


def weight_casts(trace: StepTrace) -> Saving | None:
    """What autocast's copies of the weights cost at the peak."""
    saved = _saved(trace, lambda s: s.component == _CASTS)
    held = trace.peak.components.get(_CASTS, 0)
    if not saved:
        return None
    return Saving(
        saved,
        f"autocast's 16-bit copies of the weights hold {size_text(held)} at the peak, and without them it would be"
        f" {size_text(saved)} lower; weights that are 16-bit themselves (split16) need no copies.",
    )


def loss(trace: StepTrace) -> Saving | None:
    """Logits and what a cross entropy makes of them; a loss computed in pieces holds one piece at a time."""
    of_loss = loss_storages(trace)
    saved = _saved(trace, of_loss.__contains__)
    alive = [s for s in trace.alive(trace.peak.time) if s in of_loss]
    if not saved or not alive:
        return None
    held = sum(s.nbytes for s in alive)
    return Saving(
        saved,
        f"logits and loss hold {size_text(held)} at the peak, in {count_text(len(alive), 'block')} of up to"
        f" {size_text(max(s.nbytes for s in alive))}; a loss computed in pieces, or a fused cross entropy, saves"
        f" {size_text(saved)} at most.",
    )


def accumulation(trace: StepTrace) -> Saving | None:
    """Gradients that wait while the later micro-batches of a window run."""
    count = trace.num_samples // trace.batch_size if trace.batch_size else 0
    parts = sections(trace)
    first = next((end for phase, _, end in parts if phase == BACKWARD), None)
    if count < 2 or first is None:
        return None
    step = next((start for phase, start, _ in parts if phase == STEP), trace.num_events + 1)
    alone = max(nbytes for time, nbytes in trace.totals() if time <= first or time >= step)
    saved = trace.peak.nbytes - alone
    if not saved:
        return None
    return Saving(
        saved,
        f"gradients wait for the later micro-batches of a window: {count} of {trace.batch_size} need"
        f" {size_text(saved)} more than a window of one such micro-batch.",
    )


def frozen_base(trace: StepTrace) -> Saving | None:
    """Frozen parameters in fp32, of which autocast uses 16 bits."""
    frozen = trace.num_parameters - trace.num_trained
    weights = sum(s.nbytes for s in trace.storages if s.component == "weights")
    if not frozen or not _is_sixteen_bit(trace) or weights != 4 * trace.num_parameters:
        return None
    return Saving(
        2 * frozen,
        f"{frozen:,} frozen parameters are held in fp32: in 16 bits they take 2 bytes less each,"
        f" {size_text(2 * frozen)} in all, and need no copies for autocast.",
    )


def math_attention(trace: StepTrace) -> Saving | None:
    """Attention that falls to the math kernel, which keeps a matrix of tokens by tokens."""
    found = {reason: set(modules) for reason, modules in (trace.attention or {}).items() if reason.startswith("math")}
    modules = set[str]().union(*found.values())

    def is_softmax(s: Storage) -> bool:
        return s.module in modules and s.op is not None and "softmax" in s.op

    held = sum(s.nbytes for s in trace.alive(trace.peak.time) if is_softmax(s))
    saved = _saved(trace, is_softmax)
    if not saved or not held:
        return None
    return Saving(
        saved,
        f"attention runs as {next(iter(found))} in {count_text(len(modules), 'module')}: its softmax alone holds"
        f" {size_text(held)} at the peak, which the other kernels never keep.",
    )


def large_buffers(trace: StepTrace) -> Saving | None:
    """Buffers, which no policy makes smaller."""
    buffers = [s for s in trace.storages if s.component == "buffers"]
    if not buffers or any(name.startswith("4bit") for name in trace.techniques):
        return None
    largest = max(s.nbytes for s in buffers)
    held = sum(s.nbytes for s in trace.alive(trace.peak.time) if s.component == "buffers")
    return Saving(
        _saved(trace, lambda s: s.component == "buffers"),
        f"buffers hold {size_text(held)} at the peak, the largest {size_text(largest)}; no policy makes them smaller.",
    )


def wide_inputs(trace: StepTrace) -> Saving | None:
    """Inputs in fp32 that autocast copies to 16 bits, where 16 bits could have been loaded."""
    if not _is_sixteen_bit(trace):
        return None
    inputs = {s.nbytes: s for s in trace.storages if s.component == "inputs"}
    copies = [
        s
        for s in trace.storages
        if s.phase == FORWARD and s.op is not None and _name(s.op) == "_to_copy" and s.component == "activations"
    ]
    # A copy of just half the size of an input, made while the input is there.
    wide = {inputs[2 * s.nbytes] for s in copies if 2 * s.nbytes in inputs and inputs[2 * s.nbytes].born < s.born}
    saved = _saved(trace, wide.__contains__)
    if not wide or not saved:
        return None
    return Saving(
        saved,
        f"inputs of {size_text(sum(s.nbytes for s in wide))} stay in fp32 beside their 16-bit copies: a batch that is"
        f" 16-bit before the step saves {size_text(saved)}.",
    )


def checkpointing(trace: StepTrace) -> Saving | None:
    """What repeated blocks keep for the backward pass, made again when it comes to each.

    Meanwhile nothing of a block is counted but autocast's copies of its weights, up to the end of the forward pass.
    What a checkpoint holds besides, its inputs and what it makes on the way, only adds to the memory.
    """
    if any(name.startswith("checkpointing") for name in trace.techniques):
        return None
    block_of = blocks(s.module for s in trace.storages)
    kept: dict[str, list[Storage]] = {}
    backward: dict[str, list[int]] = {}
    spans: list[tuple[int, int | None, int]] = []
    for s in trace.storages:
        block = block_of.get(s.module or "")
        if block is None or s.component not in _KEPT:
            spans.append((s.born, s.died, s.nbytes))
        else:
            kept.setdefault(block, []).append(s)
        if block is not None and s.phase == BACKWARD:
            backward.setdefault(block, []).append(s.born)
    ends = [end + 1 for phase, _, end in sections(trace) if phase == FORWARD]
    for block, storages in kept.items():
        starts = backward.get(block, [])
        for s in storages:
            again = bisect.bisect_left(starts, s.born)
            if again < len(starts) and (s.died is None or starts[again] < s.died):
                spans.append((starts[again], s.died, s.nbytes))
            end = ends[min(bisect.bisect_right(ends, s.born), len(ends) - 1)]
            if s.component == _CASTS and (s.died is None or end < s.died):
                spans.append((s.born, end, s.nbytes))
    saved = trace.peak.nbytes - peak_if(trace.num_events, spans)
    at_peak: dict[str, list[int]] = {}
    for s in trace.alive(trace.peak.time):
        if s.module in block_of and s.component in _KEPT:
            at_peak.setdefault(block_of[s.module], []).append(s.nbytes)
    if not saved or all(len(sizes) < 2 for sizes in at_peak.values()):
        return None  # a single block of memory is the input of a checkpoint
    held = {block: sum(sizes) for block, sizes in at_peak.items()}
    largest = max(held, key=lambda block: held[block])
    return Saving(
        saved,
        f"{count_text(len(held), 'block')} like {largest} keep {size_text(sum(held.values()))} for the backward pass at"
        f" the peak, {size_text(held[largest])} in the largest; checkpointing each saves {size_text(saved)} at most.",
    )


RULES: tuple[Callable[[StepTrace], Saving | None], ...] = (
    optimizer_temporaries,
    weight_casts,
    loss,
    accumulation,
    frozen_base,
    math_attention,
    large_buffers,
    wide_inputs,
    checkpointing,
)


def no_saving(
    reference_name: str, reference: StepTrace, name: str, trace: StepTrace, tokens_per_sample: int | None = None
) -> str | None:
    """Says that ``trace`` needs no less memory than ``reference``, why, and from which batch on it does."""
    if trace.peak.nbytes < reference.peak.nbytes:
        return None
    more = trace.peak.nbytes - reference.peak.nbytes
    here = f"{name} needs {f'{size_text(more)} more than' if more else 'as much memory as'} {reference_name} here"
    theirs, ours = _held_for_backward(reference), _held_for_backward(trace)
    casts = trace.peak.components.get(_CASTS, 0)
    if peak_phase(reference) == peak_phase(trace) == STEP:
        why = ": both peaks are in the optimizer step, where nothing is in 16 bits"
    elif casts >= theirs - ours >= 0 and casts:
        why = (
            f": the 16-bit copies of the weights cost {size_text(casts)}, and what the passes hold shrinks by"
            f" {size_text(theirs - ours)}"
        )
    else:
        why = ""
    if reference.law.growth is None or trace.law.growth is None:
        return f"{here}{why}."
    batch = saves_from(reference.law, trace.law)
    if batch is None:
        return f"{here}{why}; it saves nothing with any batch."
    tokens = f" ({batch * tokens_per_sample:,} tokens)" if tokens_per_sample else ""
    return f"{here}{why}; it saves memory from {count_text(batch, 'sample')}{tokens} in a micro-batch on."


def _held_for_backward(trace: StepTrace) -> int:
    names = ("activations", "forward temporaries", "backward temporaries")
    return sum(trace.peak.components.get(name, 0) for name in names)


# --- what is what ---------------------------------------------------------------------------------------------------


def _name(op: str) -> str:
    """``sqrt`` of ``aten._foreach_sqrt.default`` and of ``aten.sqrt.default``."""
    return op.split(".")[1].removeprefix("_foreach_")


def blocks(modules: Iterable[str | None]) -> dict[str, str]:
    """The repeated block that each module is in, by its name: ``blocks.3`` for ``blocks.3.attention.out``."""
    found = {}
    for module, pattern in module_patterns({module for module in modules if module}).items():
        parts = pattern.split(".")
        if "*" in parts:
            found[module] = ".".join(module.split(".")[: parts.index("*") + 1])
    return found


def loss_storages(trace: StepTrace) -> set[Storage]:
    """What a cross entropy makes, with the logits and the casts that it is made from; nothing below 1 % of the peak.

    These are told by their order and size: born right before a log-softmax or right after an operation of the loss, and
    of its size in 16 or 32 bits.
    """
    storages = [s for s in trace.storages if s.born > 0]
    found = set()
    for at, s in enumerate(storages):
        if s.op is None or not _name(s.op).startswith(_LOSS_OPS) or 100 * s.nbytes < trace.peak.nbytes:
            continue
        found.add(s)
        sizes = (s.nbytes // 2, s.nbytes, 2 * s.nbytes)
        ways = [range(at + 1, len(storages))]
        if _name(s.op) == "_log_softmax":
            ways.append(range(at - 1, -1, -1))
        for way in ways:
            for other in way:
                if storages[other].nbytes not in sizes:
                    break
                found.add(storages[other])
    return found
