"""The memory of a training job before it starts: what it needs, whether it fits, and what would make it fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from halfstep.errors import HalfstepError
from halfstep.hardware import detect
from halfstep.plan.batch import largest_batch
from halfstep.plan.measure import target_on
from halfstep.plan.planner import Planner
from halfstep.plan.size import size_text
from halfstep.plan.step_trace import StepTrace
from halfstep.plan.target import Target
from halfstep.plan.worker import Call, Workers
from halfstep.policy import Policy
from halfstep.train.planned_step import Job
from halfstep.train.settings import Settings

_SHOWN = 4
"""Components of a peak, and switches of a message, at most."""
_RANK = 16
"""Of the adapters that a message proposes: what --lora has without --lora-rank."""


@dataclass(frozen=True)
class Planned:
    """need: bytes that the device needs. capacity: those it has, None where that is not known.

    components: bytes at the peak by what they are, the largest first. device: its name.
    is_whole: whether nothing was set besides that a plan does not look at.
    """

    need: int
    capacity: int | None
    components: dict[str, int]
    device: str
    is_whole: bool = True

    @property
    def parts(self) -> str:
        """What the peak consists of."""
        shown = list(self.components.items())[:_SHOWN]
        return ", ".join(f"{name} {size_text(nbytes)}" for name, nbytes in shown)

    def __str__(self) -> str:
        has = "whose memory is not known" if self.capacity is None else f"which has {size_text(self.capacity)}"
        rest = "" if self.is_whole else " What --options change is not in it."
        return f"Planned: a step needs {size_text(self.need)} of {self.device}, {has} ({self.parts}).{rest}"


def plan_job(settings: Settings, model: Any, policy: Policy, device: str, length: int) -> Planned:
    """The memory of a step of ``settings``, which are whole. HalfstepError where it does not fit, with what would.

    model:  its class and configuration are planned; it needs no weights.
    length: tokens of the longest sample. policy: the effective one.

    Each step runs on tensors without memory in a process of its own.
    """
    target = target_on(detect(device))
    if settings.memory is not None:
        target = replace(target, memory_gib=settings.memory)
    job = job_of(settings, model, policy, length)
    with Workers() as workers:
        search = _Search(workers, target)
        (trace,) = search.traces([job])
        if isinstance(trace, HalfstepError):
            raise trace
        planned = replace(search.planned(trace), is_whole=not settings.options)
        if planned.capacity is None or planned.need <= planned.capacity:
            return planned
        fix = search.fix(job)
    raise HalfstepError(
        f"{settings.task} of {job.batch} x {job.length} tokens",
        f"it needs {size_text(planned.need)} ({planned.parts}), and {planned.device} has {size_text(planned.capacity)}",
        fix,
    )


def job_of(settings: Settings, model: Any, policy: Policy, length: int) -> Job:
    """What of ``settings`` takes memory."""
    assert settings.batch is not None
    targets = tuple(name.strip() for name in settings.lora_targets.split(","))
    return Job(
        task=settings.task,
        kind=type(model),
        config=model.config,
        policy=str(policy),
        batch=settings.batch,
        length=length,
        accumulate=settings.accumulate,
        max_norm=settings.max_norm,
        optimizer=settings.optimizer,
        checkpointing=settings.checkpointing,
        rank=settings.lora_rank if settings.lora else None,
        targets=None if targets == ("all-linear",) else targets,
        in_4_bit=settings.quantize == "4bit",
    )


@dataclass(frozen=True)
class _Way:
    """What a user may add to the call, the job that it then is, and what that needs; None where it cannot run."""

    text: str
    job: Job
    need: int | None = None

    def __str__(self) -> str:
        return f"{self.text} ({size_text(self.need or 0)})"


class _Search:
    def __init__(self, workers: Workers, target: Target) -> None:
        self._workers, self._target = workers, target
        self._planner = Planner(target, None)

    def traces(self, jobs: Sequence[Job]) -> list[Any]:
        """The trace of each, or its HalfstepError."""
        step = "halfstep.train.planned_step:job_step"
        return self._workers.run([Call(step, (job, self._target), about=f"halfstep train {job.task}") for job in jobs])

    def planned(self, trace: StepTrace) -> Planned:
        components = dict(sorted(trace.peak.components.items(), key=lambda item: -item[1]))
        return Planned(self._planner.need_of(trace), self._planner.capacity, components, self._target.name)

    def fix(self, job: Job) -> str:
        """What to add to the call: the cheapest that fits, and what others need."""
        whole = [_Way(text, changed) for text, changed in _ways(job)]
        traces = self.traces([way.job for way in whole])
        whole = [replace(way, need=self._need(trace)) for way, trace in zip(whole, traces, strict=True)]
        fitting = next((at for at, way in enumerate(whole) if self._fits(way)), len(whole))
        # What costs accuracy or a forward pass more comes after smaller micro-batches of what costs less.
        ways = [*self._divided(job, [_Way("", job), *whole[:fitting]]), *whole[fitting : fitting + 1]]
        known = sorted((way for way in whole if way.need is not None), key=lambda way: way.need or 0)
        if not ways:
            least = f" The least is {known[0]}." if known else ""
            return f"No switch makes it fit: use a smaller model or another device.{least}"
        others = [str(way) for way in whole if way.need is not None and way.text != ways[0].text]
        return f"Add {ways[0]}; the others need: {', '.join(others[:_SHOWN])}." if others else f"Add {ways[0]}."

    def _divided(self, job: Job, ways: Sequence[_Way]) -> list[_Way]:
        """The ways in smaller micro-batches, with as many samples a step, that fit; in order."""
        if job.batch == 1:
            return []
        num = max(2, job.accumulate)
        traces = self.traces([replace(way.job, accumulate=num) for way in ways])
        found = []
        for way, trace in zip(ways, traces, strict=True):
            assert self._planner.capacity is not None
            if isinstance(trace, HalfstepError) or trace.law.growth is None:
                continue
            most = largest_batch(trace.law, self._planner.need_of, self._planner.capacity) or 0
            sizes = [size for size in range(1, job.batch) if job.batch % size == 0 and size <= most]
            if sizes:
                text = f"{way.text} --batch {sizes[-1]} --accumulate {job.accumulate * job.batch // sizes[-1]}"
                need = self._planner.need_of(trace.law.with_batch(sizes[-1]))
                found.append(_Way(text.strip(), replace(way.job, batch=sizes[-1]), need))
        return found

    def _need(self, trace: Any) -> int | None:
        return None if isinstance(trace, HalfstepError) else self._planner.need_of(trace)

    def _fits(self, way: _Way) -> bool:
        assert self._planner.capacity is not None
        return way.need is not None and way.need <= self._planner.capacity


def _ways(job: Job) -> Iterator[tuple[str, Job]]:
    """Switches that are not set, from the cheapest to the dearest, as ``halfstep.plan.prices`` has them."""
    saving = [("", job)]
    if job.rank is None and job.optimizer == "adamw":
        saving.append(("--optimizer adamw8bit", replace(job, optimizer="adamw8bit")))
    if not job.in_4_bit and Policy.parse(job.policy).master == "fp32":
        adapted = job if job.rank is not None else replace(job, rank=_RANK)
        added = "" if job.rank is not None else "--lora"
        if added:
            saving.append((added, adapted))
        saving.append((f"{added} --quantize 4bit".strip(), replace(adapted, in_4_bit=True)))
    for text, changed in saving:
        if text:
            yield text, changed
        if not job.checkpointing:
            yield f"{text} --checkpointing".strip(), replace(changed, checkpointing=True)
