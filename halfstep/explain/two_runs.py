"""One captured micro-batch under two policies, each at the loss scale that it would train at, and what brings them
together again."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cached_property

from halfstep import oplist
from halfstep.diagnosis.advice import MENDS, NOT_TRIED, Advice, try_policies
from halfstep.diagnosis.capture import Capture, Outcome, largest_scale
from halfstep.errors import HalfstepError
from halfstep.explain.divergence import Compared, Comparison, compare
from halfstep.explain.error import unit_of
from halfstep.explain.stream import Ran, Stream
from halfstep.formats import FORMATS, SIXTEEN_BIT, Format
from halfstep.policy import LossScale, Policy
from halfstep.record import Walk

_RAISE = (2.0**4, 2.0**8, 2.0**12)
"""By how much a larger loss scale is tried."""

_MOST_MODULES = 4


class TwoRuns:
    """``capture`` under ``policies``; the first is the reference. HalfstepError where the device cannot do one."""

    def __init__(self, capture: Capture, policies: tuple[Policy, Policy]) -> None:
        self.capture = capture
        self.policies = (capture.region(policies[0]).policy, capture.region(policies[1]).policy)
        own = [self._own_scale(policy) for policy in self.policies]
        # A format that needs no scale runs at that of the other, so that gradients compare as they are.
        common = next((scale for scale in own if scale is not None), 1.0)
        self.scales = (own[0] or common, own[1] or common)
        self.runs = tuple(self._run(policy, scale) for policy, scale in zip(self.policies, self.scales, strict=True))

    @cached_property
    def unit(self) -> Format:
        """The coarsest format that either policy computes in."""
        names = sorted(self.policies[0].formats | self.policies[1].formats)
        return max((FORMATS[name] for name in names), key=lambda format: format.eps)

    @cached_property
    def comparison(self) -> Comparison:
        return self._compare([ran for ran, _ in self.runs], self.scales)

    @property
    def outcomes(self) -> tuple[Outcome, Outcome]:
        return self.runs[0][1], self.runs[1][1]

    def advise(self) -> tuple[Advice, ...]:
        """What would keep the two together, in order of cost, each tried on the micro-batch; empty if they are."""
        parting = [compared for compared in self.comparison.compared if compared.parts]
        low = 0 if self._unit_of(0) > self._unit_of(1) else 1
        policy = self.policies[low]
        if not parting or not policy.formats & SIXTEEN_BIT:
            return ()
        advice = try_policies(self._proposals(policy, parting), lambda other: self._stays(low, other))
        site = parting[0].ran.site
        if site.file is None or any(a.policy is not None and a.result == MENDS for a in advice):
            return advice
        text = "write the line in another way, so that what it loses is not lost: see docs/diff.md"
        return (*advice, Advice(text, None, NOT_TRIED))

    def _unit_of(self, side: int) -> float:
        return max(FORMATS[name].eps for name in self.policies[side].formats)

    def _proposals(self, policy: Policy, parting: list[Compared]) -> Iterator[tuple[str, Policy]]:
        first = parting[0]
        if first.ran.site.phase == "backward" and math.isfinite(first.error) and "fp16" in policy.formats:
            yield from self._larger_scales(policy)
        modules = list(dict.fromkeys(c.ran.site.module for c in parting if c.ran.site.module))
        if modules and modules[0] == first.ran.site.module:
            yield from self._in_fp32(policy, modules)
        else:
            yield from self._op_in_fp32(policy, first)
        if policy.compute == "fp16":
            kept, ops = (tuple(rule for rule in rules if rule[1] != "fp16") for rules in (policy.modules, policy.ops))
            yield "compute in bf16", Policy("bf16", kept, ops)

    def _larger_scales(self, policy: Policy) -> Iterator[tuple[str, Policy]]:
        settings, scale = policy.scale, self.scales[self.policies.index(policy)]
        if settings.kind == "none":
            yield "scale the loss", replace(policy, scale=LossScale("dynamic"))
            return
        for factor in _RAISE:
            if scale * factor <= settings.ceiling:
                larger = replace(settings, init=scale * factor)
                yield f"raise the loss scale to {scale * factor:g}", replace(policy, scale=larger)

    def _in_fp32(self, policy: Policy, modules: list[str]) -> Iterator[tuple[str, Policy]]:
        """The module of the first divergence, the one around it, and those of all divergences together."""
        sets: list[tuple[str, ...]] = [(modules[0],), (modules[0].rpartition(".")[0],), tuple(modules)]
        for names in dict.fromkeys(sets):
            if all(names) and len(names) <= _MOST_MODULES:
                yield f"keep {' and '.join(names)} in fp32", policy.in_fp32(names)

    def _op_in_fp32(self, policy: Policy, first: Compared) -> Iterator[tuple[str, Policy]]:
        names: Iterable[str | None] = dict.fromkeys((first.ran.site.function, first.ran.op.strip("_")))
        for name in names:
            if name is not None and _is_operation(name):
                yield f"keep every {name} in fp32", replace(policy, ops=(*policy.ops, (name, "fp32")))
                return

    def _stays(self, side: int, policy: Policy) -> bool:
        """Whether nothing parts any more with ``policy`` on one side."""
        effective = self.capture.region(policy).policy
        scale = self._own_scale(effective)
        scales, runs = list(self.scales), [ran for ran, _ in self.runs]
        scales[side] = self.scales[side] if scale is None else scale
        runs[side] = self._run(effective, scales[side])[0]
        return not any(compared.parts for compared in self._compare(runs, scales).compared)

    def _compare(self, runs: list[list[Ran]], scales: tuple[float, ...] | list[float]) -> Comparison:
        return compare(runs[0], runs[1], unit_of(self.unit), scales[1] / scales[0])

    def _run(self, policy: Policy, scale: float) -> tuple[list[Ran], Outcome]:
        stream = Stream()
        outcome = self.capture.run(policy, scale, [Walk(self.capture.model, stream)])
        return stream.ran, replace(outcome, gradients={})

    def _own_scale(self, policy: Policy) -> float | None:
        """The loss scale that a policy trains this micro-batch at; None if it needs none.

        A dynamic scale is the captured one, or else the largest up to its first at which nothing overflows: that a
        fresh scale has to come down is no divergence.
        """
        settings, own = policy.scale, self.capture.region(self.capture.policy).policy
        if settings.kind == "none":
            return 1.0 if "fp16" in policy.formats else None
        if settings.kind == "static":
            return settings.init
        if (settings, policy.compute) == (own.scale, own.compute):
            return self.capture.scale
        found = self.capture.run(policy, settings.init)
        if found.is_finite or not math.isfinite(found.loss):
            return settings.init
        return largest_scale(lambda scale: self.capture.run(policy, scale).is_finite, settings.floor, settings.init)


def _is_operation(name: str) -> bool:
    try:
        oplist.check_rules([(name, "fp32")])
    except HalfstepError:
        return False
    return True
