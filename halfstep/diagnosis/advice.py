"""Proposals, in order of cost, each tried on the captured step before it is made.

What a policy says is tried by running the step under that policy, what an edit of a line says by running that one call
as the edited line would. The words:

    mends it    with it, loss and gradient of this step are finite (or, where they were, its line does not overflow)
    does not    with it, they are not
    not tried   it was not run, and the text says why
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.nn.functional as F

from halfstep.diagnosis.capture import Capture
from halfstep.diagnosis.exhaustion import can_promote
from halfstep.diagnosis.intervention import Change, Intervention, MaskedRows, away_from_zero, clamped, in_fp32, with_eps
from halfstep.diagnosis.trials import Trials
from halfstep.errors import HalfstepError
from halfstep.formats import FORMATS
from halfstep.policy import Policy
from halfstep.record import BATCH, Producer, Walk
from halfstep.report import Cell, Table

MENDS, DOES_NOT, NOT_TRIED = "mends it", "does not", "not tried"
_TONES = {MENDS: "good", DOES_NOT: "bad", NOT_TRIED: "open"}


@dataclass(frozen=True)
class Advice:
    """What to do, the policy to do it with (None where it is no policy), and what came of trying it."""

    text: str
    policy: str | None
    result: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def try_policies(
    proposals: Iterable[tuple[str, Policy]], mends: Callable[[Policy], bool], limit: int = 1
) -> tuple[Advice, ...]:
    """Try policies, cheapest first, until ``limit`` of them mend it; the rest is marked as not tried.

    A policy that this device refuses is not tried either.
    """
    advice: list[Advice] = []
    for text, policy in proposals:
        result = NOT_TRIED
        if sum(a.result == MENDS for a in advice) < limit:
            try:
                result = MENDS if mends(policy) else DOES_NOT
            except HalfstepError as error:
                text = f"{text} ({error.why})"
        advice.append(Advice(text, str(policy), result))
    return tuple(advice)


def advice_table(advice: Iterable[Advice]) -> Table:
    """The table that ends a report."""
    rows = [(a.text, a.policy or "-", Cell(a.result, _TONES[a.result])) for a in advice]
    return Table(("what to do", "policy", "tried here"), rows, title="Advice")


_ZERO_AT = {
    **dict.fromkeys(("log", "log2", "log10", "sqrt", "rsqrt", "reciprocal", "pow", "rdiv", "rtruediv"), 0),
    **dict.fromkeys(("norm", "vector_norm", "linalg_norm", "linalg_vector_norm"), 0),
    **dict.fromkeys(("div", "divide", "true_divide", "truediv", "itruediv", "idiv"), 1),
}
"""Torch functions that are inf or NaN at 0, or have such a gradient there, and which of their arguments that is."""
_SMALL = (2.0**-14, 2.0**-10)
"""What to keep an argument away from 0 by, the cheaper first: fp16's smallest normal number, and its eps."""
_LONGEST_CHAIN = 8
_ADAM_EPS = (1e-7, 1e-6, 1e-5, 1e-4)


def advise(
    capture: Capture, producer: Producer | None, update: Callable[[float], bool] | None = None
) -> tuple[Advice, ...]:
    """What to do about a captured micro-batch that is not finite or overflows, in order of cost, each tried on it.

    producer: who made the first non-finite value, from :meth:`Capture.find_producer`; None if nobody knows.
    update:   for a fault of phase ``update``: repeats the optimizer's step with this eps and says whether every weight
              is finite then. Without it a larger eps is not tried.

    Empty for a micro-batch without a fault. It takes some ten to twenty runs of the micro-batch; models that are
    compiled run eagerly meanwhile.
    """
    if producer is not None and producer.phase == "update":
        return (_larger_adam_eps(update),)
    trials = Trials(capture, producer)
    if not trials.is_bad:
        return ()
    return tuple(dict.fromkeys(_Proposals(trials, producer).by_cost()))


def _larger_adam_eps(update: Callable[[float], bool] | None) -> Advice:
    text = "raise the eps of the optimizer"
    if update is None:
        return Advice(
            f"{text}, to {_ADAM_EPS[0]:g} or more (the optimizer's step cannot be repeated here)", None, NOT_TRIED
        )
    for eps in _ADAM_EPS:
        if update(eps):
            return Advice(f"{text} to {eps:g}", None, MENDS)
    return Advice(f"{text}, up to {_ADAM_EPS[-1]:g}", None, DOES_NOT)


class _Proposals:
    """Proposals for one captured micro-batch, each tried when it is asked for."""

    def __init__(self, trials: Trials, producer: Producer | None) -> None:
        self.trials, self.producer = trials, producer
        self.capture, self.policy = trials.capture, trials.policy
        is_hopeless = math.isfinite(trials.base.loss) and not trials.base.is_finite and trials.largest_scale is None
        self._scale = self.capture.scale
        if producer is not None and is_hopeless and self.policy.scale.kind == "dynamic":
            # At a large scale something else may be the first to overflow than what still does at the floor.
            self._scale = self.policy.scale.floor
            self.producer = self.capture.find_producer(scale=self._scale) or producer

    def by_cost(self) -> Iterator[Advice]:
        in_fp32 = self._under("compute in fp32", Policy("fp32"))
        if in_fp32.result == DOES_NOT:
            yield self._not_the_precision()
        else:
            yield from self._lower_scale()
            if self.producer is not None and not self.producer.is_module:
                yield from self._float_before()
            yield from self._modules()
            yield from self._clamp()
        yield from self._guards()
        yield from self._bf16()
        yield in_fp32

    def _not_the_precision(self) -> Advice:
        cause = "lower the learning rate or look at the data"
        if self.producer is not None and self.producer.module == BATCH:
            cause = f"look at the data, the batch holds {self.producer.kind}"
        elif self.producer is not None and self.producer.holds:
            cause = f"go back to a checkpoint from before, {self.producer.holds} holds {self.producer.kind} already"
        return Advice(f"Not the precision: fp32 fails as well at step {self.capture.step}: {cause}", None, NOT_TRIED)

    # Trying.

    def _tried(self, text: str, policy: Policy | None, try_it: Callable[[], bool]) -> Advice:
        line = None if policy is None else str(policy)
        try:
            return Advice(text, line, MENDS if try_it() else DOES_NOT)
        except HalfstepError as error:
            return Advice(f"{text} ({error.why})", line, NOT_TRIED)
        except Exception as error:  # of the user's code, which has not been run like this before
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
            return Advice(f"{text} (it raised {reason})", line, NOT_TRIED)

    def _under(self, text: str, policy: Policy) -> Advice:
        return self._tried(text, policy, partial(self.trials.is_good, policy))

    def _edited(self, text: str, changes: Iterable[tuple[str, Change]]) -> Advice:
        """The first of ``changes``, each with the words that end ``text``, to the producer's call that mends it."""
        producer, met = self.producer, False
        assert producer is not None

        def try_it(change: Change) -> bool:
            nonlocal met
            edits: list[Intervention] = []

            def under() -> list[Intervention]:
                edits[:] = [Intervention(self.capture.model, producer, change)]
                return edits

            is_good = self.trials.is_good(self.policy, under)
            met |= edits[0].num_changed > 0
            return is_good

        advice = Advice(text, None, NOT_TRIED)
        for words, change in changes:
            advice = self._tried(f"{text}{words}", None, partial(try_it, change))
            if advice.result != DOES_NOT:
                break
        return (
            advice
            if met or advice.result == NOT_TRIED
            else replace(advice, text=f"{advice.text} (the call was not met again)", result=NOT_TRIED)
        )

    # Proposals.

    def _lower_scale(self) -> Iterator[Advice]:
        scale, floor = self.policy.scale, self.policy.scale.floor
        if scale.kind == "none":
            return
        if not math.isfinite(self.trials.base.loss):
            yield Advice("lower the loss scale (the loss itself is not finite, which no scale mends)", None, DOES_NOT)
        elif self.capture.scale <= floor:
            yield Advice(f"lower the loss scale (it is at its floor of {floor:g})", None, DOES_NOT)
        elif (largest := self.trials.largest_scale) is None:
            yield Advice(f"lower the loss scale, down to its floor of {floor:g}", None, DOES_NOT)
        else:
            by_itself = ", where a dynamic one goes by itself" if scale.kind == "dynamic" else ""
            policy = replace(self.policy, scale=replace(scale, init=largest))
            yield Advice(f"lower the loss scale to {largest:g}{by_itself}", str(policy), MENDS)

    def _float_before(self) -> Iterator[Advice]:
        if self._call is not None:
            text = f"compute {self._call} in fp32: .float() on what goes into it"
            yield self._edited(text, [("", in_fp32(self.capture.device.type))])

    def _modules(self) -> Iterator[Advice]:
        """Module rules, the fewest modules first, until one mends it."""
        for names in self._module_sets():
            advice = self._under(f"keep {' and '.join(names)} in fp32", self.policy.in_fp32(names))
            yield advice
            if advice.result == MENDS:
                return

    def _module_sets(self) -> Iterator[tuple[str, ...]]:
        """The producer's module; it with those that make it next; what is around it; it with what feeds it."""
        if self.producer is None or self.producer.module == BATCH:
            return
        module = self.producer.module if self.producer.is_module else ""
        around = [module] if module else []
        while around and (parent := around[-1].rpartition(".")[0]):
            around.append(parent)
        yield from ((name,) for name in around[:1] if self._is_low(name))
        yield from self._chain()
        yield from ((name,) for name in around[1:] if self._is_low(name))
        leaf = self.trials.leaf_before(module or None)
        for feeder in [leaf, leaf.rpartition(".")[0]] if leaf else []:
            if self._is_low(feeder) and feeder not in around:
                yield (module, feeder) if self._is_low(module) else (feeder,)

    def _chain(self) -> Iterator[tuple[str, ...]]:
        """The producer's module, who makes it where that one is in fp32, and so on, until nobody does."""
        names: list[str] = []
        policy, producer, phase = self.policy, self.producer, self.producer.phase if self.producer else ""
        while can_promote(producer, policy) and producer.phase == phase and len(names) < _LONGEST_CHAIN:
            names.append(producer.module)
            policy = policy.in_fp32([producer.module])
            producer = self.capture.find_producer(policy, self._scale)
        if len(names) > 1 and (producer is None or producer.phase != phase):
            yield tuple(names)

    def _is_low(self, module: str) -> bool:
        return bool(module) and self.policy.format_of(module) != "fp32"

    def _clamp(self) -> Iterator[Advice]:
        producer = self.producer
        if producer is None or self._call is None or (producer.phase, producer.kind) != ("forward", "inf"):
            return
        if self.trials.base.is_finite:
            return  # what is beyond the format does no harm as it is
        limit = FORMATS[self.policy.format_of(producer.module) if producer.is_module else self.policy.compute].max
        what = f"what goes into {self._call}" if producer.op == "_to_copy" else f"the result of {self._call}"
        change = clamped(limit, goes_in=producer.op == "_to_copy")
        yield self._edited(f"clamp {what} to {limit:g}: .clamp(-{limit:g}, {limit:g})", [("", change)])

    def _guards(self) -> Iterator[Advice]:
        producer = self.producer
        if producer is None or self._call is None or producer.function is None:
            return
        if producer.kind == "nan" and "softmax" in f"{producer.op} {producer.function}":
            text = f"leave something unmasked in each row of {self._call}, or give such a row zeros: it is 0 / 0"
            yield self._tried(text, None, self._mask_mends)
        elif _takes_eps(producer.function):
            yield self._edited(f"give {self._call} a larger eps", [(f": eps={e:g}", with_eps(e)) for e in _SMALL])
        elif producer.function.removesuffix("_") in _ZERO_AT:
            place = _ZERO_AT[producer.function.removesuffix("_")]
            what = "the divisor" if place else "the argument"
            changes = [(f": .clamp_min({e:g}) where it is positive", away_from_zero(place, e)) for e in _SMALL]
            yield self._edited(f"keep {what} of {self._call} away from 0", changes)

    def _mask_mends(self) -> bool:
        return self.trials.is_good(self.policy, lambda: [Walk(self.capture.model, MaskedRows())])

    def _bf16(self) -> Iterator[Advice]:
        if self.policy.compute == "fp16":
            modules = tuple(rule for rule in self.policy.modules if rule[1] != "fp16")
            ops = tuple(rule for rule in self.policy.ops if rule[1] != "fp16")
            policy = Policy("bf16", modules, ops, self.policy.master)
            yield self._under("compute in bf16", policy)

    @property
    def _call(self) -> str | None:
        """The producer's call in the user's words; None where it is not known."""
        producer = self.producer
        if producer is None or producer.function is None or producer.file is None:
            return None
        return f"{producer.function} in {Path(producer.file).name} line {producer.line}"


def _takes_eps(function: str) -> bool:
    """Whether it is one of torch.nn.functional with an argument ``eps``."""
    found = getattr(F, function, None)
    return inspect.isfunction(found) and "eps" in inspect.signature(found).parameters
