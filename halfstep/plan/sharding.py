"""What one of several ranks holds, derived from the trace of one device: ZeRO 1, 2, 3; FSDP2 is stage 3. No torch.

Nothing of this runs. The parts that ranks divide among them are those of the trace, each divided by the number of ranks
and rounded up; what a rank gathers for a moment follows from the sizes of the modules.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from halfstep.errors import HalfstepError
from halfstep.formats import SIXTEEN_BIT
from halfstep.plan.step_trace import BACKWARD, FORWARD, STEP, StepTrace, Storage
from halfstep.policy import Policy

DIVIDED = {
    1: frozenset({"optimizer states"}),
    2: frozenset({"optimizer states", "gradients"}),
    3: frozenset({"optimizer states", "gradients", "weights"}),
}
"""Components that the ranks of a stage divide among them (Rajbhandari et al. 2020, arXiv 1910.02054)."""

GATHERED, REDUCED = "gathered weights", "reduce-scatter buffers"
_FP32_BYTES = 4


@dataclass(frozen=True, eq=False)
class ShardedPeak:
    """The memory of one rank at its peak: bytes in all and by component, the phase, and what the figure rests on."""

    num_ranks: int
    stage: int
    nbytes: int
    components: Mapping[str, int]
    phase: str
    how: str


@dataclass(frozen=True)
class _Units:
    """Elements of the largest unit that is gathered at once, a repeated block, and of what stands outside of blocks."""

    block: int
    rest: int


def sharded(trace: StepTrace, num_ranks: int, stage: int) -> ShardedPeak:
    """The peak of one rank of ``num_ranks`` that train with ``trace``'s micro-batch each.

    Stage 3 gathers a block's weights in the format of the policy, and the next block's ahead of time, and keeps what
    stands outside of blocks gathered until the backward pass ends; autocast's casts are gone, since what was gathered
    is in that format already. Stages 2 and 3 hold a block's whole gradients until they are reduced: in stage 3 in that
    format, and in fp32 to be reduced. The optimizer's temporaries are those of a rank's part.

    HalfstepError for a stage or number that there is not, for a layout of master weights, and in stage 3 for frozen
    weights, whose modules a trace does not tell.
    """
    policy = Policy.parse(trace.policy)
    _check(trace, policy, num_ranks, stage)
    units = _units(trace)
    width = 2 if policy.compute in SIXTEEN_BIT else _FP32_BYTES
    gathered = (2 * units.block + units.rest) * width if stage == 3 else 0
    reduced = {1: 0, 2: units.block * _FP32_BYTES, 3: units.block * (_FP32_BYTES + width)}[stage]
    overlays = {FORWARD: {GATHERED: gathered}, BACKWARD: {GATHERED: gathered, REDUCED: reduced}, STEP: {}}
    mine = replace(trace, storages=[_part(storage, num_ranks, stage) for storage in trace.storages])
    phases = {start: phase for phase, start in trace.phases}
    best, at, phase, phase_at = -1, 0, FORWARD, FORWARD
    for time, nbytes in mine.totals():
        phase = phases.get(time, phase)
        total = nbytes + sum(overlays[phase].values())
        if total > best:
            best, at, phase_at = total, time, phase
    overlay = {name: nbytes for name, nbytes in overlays[phase_at].items() if nbytes}
    return ShardedPeak(
        num_ranks,
        stage,
        best,
        {**mine.at(at).components, **overlay},
        phase_at,
        f"derived: stage {stage} over {num_ranks} ranks by division of one device's trace, not run",
    )


def check_ranks(num_ranks: int) -> None:
    """Refuse what is no number of ranks."""
    if isinstance(num_ranks, bool) or not isinstance(num_ranks, int) or num_ranks < 1:
        raise HalfstepError(f"{num_ranks!r} ranks", "it is not a number of ranks", "Use a whole number from 1.")


def _check(trace: StepTrace, policy: Policy, num_ranks: int, stage: int) -> None:
    if stage not in DIVIDED:
        raise HalfstepError(f"stage {stage}", "ZeRO has the stages 1, 2 and 3", "Use 3 for FSDP2.")
    check_ranks(num_ranks)
    if policy.master != "fp32":
        raise HalfstepError(
            f"master={policy.master} over {num_ranks} ranks",
            "how ranks divide 16-bit weights and their rests is not derived",
            "Plan it with fp32 weights.",
        )
    if stage == 3 and trace.num_trained != trace.num_parameters:
        raise HalfstepError(
            "stage 3 of a model with frozen weights",
            "the modules that are gathered are known by their gradients, which frozen weights have none of",
            "Plan stage 1 or 2.",
        )


def _part(storage: Storage, num_ranks: int, stage: int) -> Storage:
    """What a rank holds of a storage: a part in whole fp32 numbers, all of it, or, of a cast that is gone, nothing."""
    if stage == 3 and storage.component == "16-bit weights":
        return replace(storage, nbytes=0)
    if storage.component in DIVIDED[stage] or storage.component == "step temporaries":
        num_elements = -(-storage.nbytes // _FP32_BYTES)
        return replace(storage, nbytes=min(storage.nbytes, -(-num_elements // num_ranks) * _FP32_BYTES))
    return storage


def _units(trace: StepTrace) -> _Units:
    """By the gradients at the end of the backward pass: each fp32, and made by the module of its parameter."""
    ends = [
        start for (_, start), (before, _) in zip(trace.phases[1:], trace.phases, strict=False) if before == BACKWARD
    ]
    end = (ends[-1] if ends else trace.num_events + 1) - 1
    sizes: Counter[str] = Counter()
    for storage in trace.alive(end):
        if storage.component == "gradients":
            sizes[_block_of(storage.module or "")] += storage.nbytes // _FP32_BYTES
    rest = sizes.pop("", 0)
    return _Units(max(sizes.values(), default=0), rest)


def _block_of(module: str) -> str:
    """``layers.3`` of ``layers.3.mlp.up``; nothing where no part of the name is a number."""
    parts = module.split(".")
    number = next((at for at, part in enumerate(parts) if part.isdigit()), None)
    return "" if number is None else ".".join(parts[: number + 1])
