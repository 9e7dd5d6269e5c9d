"""Lost updates: how many of a 16-bit weight's updates are too small to move it.

A number of p significant bits lies one ulp, 2^(1 - p) times its power of two, from the next one. Rounding to nearest
takes w + d back to w where |d| is under half of that, so the update d is lost, and so is the next one of its size. bf16
has p = 8: from 1 to 2 its ulp is 2^-7, and an AdamW update of 1e-3 is a quarter of the half.

A plain 16-bit weight does not show an update that it did not take, and need not: one that stayed where it was, although
there was a gradient, had an update under half an ulp (or exactly half, a tie). Where a master weight is kept, the
update is its difference, laid against the ulp of the 16-bit weight. docs/lost-updates.md has the arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from halfstep.dtypes import LOW_DTYPES
from halfstep.errors import HalfstepError
from halfstep.formats import format_of
from halfstep.gradients import gradients_of, values_of

Exact = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""``exact(parameter, index)``: the fp32 weights that the optimizer moves, at ``index`` of ``parameter.flatten()``."""

_HIGH_PCT = 10.0
"""From this share on, the updates of a module are worth advice."""
_NUM_SHOWN = 10
_SEED = 0
_STOCHASTIC = "Rounded stochastically: an update of r ulp moves its weight with probability r, so unmoved is not lost."


def ulp(weights: torch.Tensor) -> torch.Tensor:
    """The distance from each 16-bit weight to the next number away from zero, exact, as fp32.

    Of 0 and of subnormal weights it is the smallest subnormal, of the largest number the distance to the one before,
    of inf and NaN it is NaN.
    """
    format = format_of(weights.dtype)
    power = weights.view(torch.int16) & ((1 << format.exponent_bits) - 1 << format.mantissa_bits)
    # The power of two at or below the weight, and the number next to it: they lie the weight's ulp apart.
    return (power | 1).view(weights.dtype).float() - power.view(weights.dtype).float()


def spacing(weights: torch.Tensor, updates: torch.Tensor) -> torch.Tensor:
    """The distance from each 16-bit weight to its neighbour on the side that its update points to, exact, as fp32.

    It is the ulp, and half of it from a power of two towards zero, where the numbers lie twice as close.
    """
    format = format_of(weights.dtype)
    is_power = weights.view(torch.int16) & (1 << format.mantissa_bits) - 1 == 0
    is_closer = is_power & (weights.abs() > format.tiny) & (weights.sign() == -updates.sign())
    size = ulp(weights)
    return torch.where(is_closer, size / 2, size)


@dataclass(frozen=True)
class ModuleUpdates:
    """The updates of one module's own 16-bit weights in the sampled step.

    module:      its qualified name, empty for the model itself. format: bf16 or fp16.
    num_weights: how many weights it has. num_samples: how many of the sampled ones had an update.
    unmoved_pct: share of the updates that left the weight where it was, its master weight included.
    below_half_ulp_pct: share of the updates under half an ulp of the 16-bit weight. Without a master weight it is
                 ``unmoved_pct``. Under stochastic rounding the weights do not show it, and it is None.
    median_ulps: median of |update| / ulp, where a lost update of a plain 16-bit weight counts 0; None as above.
    """

    module: str
    format: str
    num_weights: int
    num_samples: int
    unmoved_pct: float
    below_half_ulp_pct: float | None
    median_ulps: float | None

    def __str__(self) -> str:
        return self.module or "the model itself"


@dataclass(frozen=True)
class UpdateReport:
    """What one sampled step did to the 16-bit weights.

    step:    the step it was taken at, counted from 1 by the meter; 0 before the first sample.
    modules: those with an update, in the model's order, one entry a format.
    unmoved_pct, below_half_ulp_pct: as of a module, over all weights that had an update; None without any.
    advice:  what to do about a high share, else empty.
    note:    why there is no number, or how to read one, else empty.
    """

    step: int
    modules: tuple[ModuleUpdates, ...]
    unmoved_pct: float | None
    below_half_ulp_pct: float | None
    advice: str = ""
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        lines = []
        if self.modules:
            below = "" if self.below_half_ulp_pct is None else f"{_pct(self.below_half_ulp_pct)} under half an ulp, "
            lines.append(f"weight updates of step {self.step}: {below}{_pct(self.unmoved_pct)} moved no weight")
            shown = sorted(self.modules, key=_share, reverse=True)[:_NUM_SHOWN]
            width = max(6, *(len(str(module)) for module in shown))
            lines.append(f"  {'module':{width}}  format  samples  under 1/2 ulp  unmoved  median ulp")
            for module in shown:
                median = "-" if module.median_ulps is None else f"{module.median_ulps:.3g}"
                lines.append(
                    f"  {module!s:{width}}  {module.format:6}  {module.num_samples:7}  "
                    f"{_pct(module.below_half_ulp_pct):>13}  {_pct(module.unmoved_pct):>7}  {median:>10}"
                )
            if len(self.modules) > len(shown):
                lines.append(f"  and {len(self.modules) - len(shown)} more, with lower shares")
        return "\n".join([*lines, *filter(None, (self.note, self.advice))])


class UpdateMeter:
    """Measures on a sample, in every ``every``-th step, how many weight updates are under half an ulp.

    model, optimizer: of any loop. The 16-bit weights of the model that the optimizer holds are watched. Each call of
                 ``optimizer.step`` counts. One that skips, by ``found_inf`` or over a gradient that is not finite,
                 leaves the sample before it in place.
    num_samples: elements watched of each parameter, the same throughout: one drawn from each of as many equal
                 stretches, or all. The standard error of a parameter's share s is about
                 sqrt(s (1 - s) / num_samples), at most 1.6 points by default.
    exact:       reads the fp32 weights, where a master weight is kept. None: the 16-bit weights are all there is.
    stochastic:  the 16-bit weights are rounded stochastically, so that one which did not move has lost nothing.

    A sampled step reads nothing back to the host (torch's ``coalesce`` of a sparse CUDA gradient waits by itself);
    :meth:`report` reads once for each device and format.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        every: int = 100,
        num_samples: int = 1024,
        exact: Exact | None = None,
        stochastic: bool = False,
    ) -> None:
        for name, value in (("every", every), ("num_samples", num_samples)):
            if not hasattr(value, "__index__") or value < 1:
                raise HalfstepError(f"{name}={value}", "it counts steps or weights", "Use a whole number from 1 up.")
        if not isinstance(optimizer, Optimizer):
            raise HalfstepError(
                f"an optimizer of type {type(optimizer).__name__}",
                "it has no hooks around its step, where the weights are looked at",
                "Pass the torch.optim.Optimizer that it wraps.",
            )
        self.every, self.num_steps = every, 0
        self._model, self._optimizer, self._num_samples = model, optimizer, num_samples
        self._exact, self._is_stochastic = exact, stochastic
        self._is_sampling = False
        self._skipped = torch.tensor(False)
        self._samples: list[_Sample] = []
        self._groups: list[_Group] = []
        self._hooks = (
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        )

    def remove(self) -> None:
        """Take the hooks off the optimizer. What was sampled can still be reported."""
        for hook in self._hooks:
            hook.remove()

    def report(self) -> UpdateReport:
        """The last sampled step that was applied. Waits for the device."""
        if not self._groups:
            self._watch()
        if not self._groups:
            return UpdateReport(0, (), None, None, note="No weight that the optimizer holds is stored in 16 bit.")
        ulps: dict[_Sample, torch.Tensor] = {}
        for group in self._groups:
            number, own = group.read()
            ulps |= own
        step = number * self.every
        if not step:
            note = f"No applied step has been sampled yet; every {self.every}th one is."
            return UpdateReport(0, (), None, None, note=note)
        by_module: dict[tuple[str, str], list[_Sample]] = {}
        for sample in self._samples:
            by_module.setdefault((sample.module, sample.format), []).append(sample)
        modules = []
        for (module, format), samples in by_module.items():
            if (shares := self._shares(samples, ulps)) is not None:
                num_weights = sum(sample.num_weights for sample in samples)
                modules.append(ModuleUpdates(module, format, num_weights, *shares))
        total = self._shares(self._samples, ulps)
        if total is None:
            return UpdateReport(step, (), None, None, note=f"No sampled weight had an update in step {step}.")
        _, unmoved, below, _ = total
        note = _STOCHASTIC if self._is_stochastic else ""
        return UpdateReport(step, tuple(modules), unmoved, below, self._advise(modules), note)

    def _watch(self) -> None:
        """Draw the samples, where the 16-bit weights are others than before: a Stepper's, moved, put in fp32."""
        held = {id(parameter) for group in self._optimizer.param_groups for parameter in group["params"]}
        named = {name: p for name, p in self._model.named_parameters() if id(p) in held and p.dtype in LOW_DTYPES}
        named = {name: p for name, p in named.items() if _local(p).numel()}
        known = [(id(sample.parameter), sample.kind) for sample in self._samples]
        if known == [(id(p), _kind(p)) for p in named.values()]:
            return
        generator = torch.Generator().manual_seed(_SEED)
        self._samples = [
            _Sample(name.rpartition(".")[0], p, _kind(p), _draw(_local(p), self._num_samples, generator))
            for name, p in named.items()
        ]
        kinds = dict.fromkeys(sample.kind for sample in self._samples)
        self._groups = [_Group([s for s in self._samples if s.kind == kind], self._exact) for kind in kinds]

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.num_steps += 1
        self._is_sampling = self.num_steps % self.every == 0
        if self._is_sampling:
            self._watch()
            self._is_sampling = bool(self._groups)
        if self._is_sampling:
            for group in self._groups:
                group.keep_weights()
            # With a closure the gradients are made inside the step; without, they may be gone after it.
            if not _has_closure(args, kwargs):
                self._keep_gradients(optimizer)

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._is_sampling:
            if _has_closure(args, kwargs):
                self._keep_gradients(optimizer)
            for group in self._groups:
                group.compare(self._skipped, self.num_steps // self.every)

    @torch.no_grad()
    def _keep_gradients(self, optimizer: Optimizer) -> None:
        self._skipped = _is_skipped(optimizer)
        for group in self._groups:
            group.keep_gradients()

    def _shares(
        self, samples: Iterable[_Sample], ulps: dict[_Sample, torch.Tensor]
    ) -> tuple[int, float, float | None, float | None] | None:
        """(updates sampled, % unmoved, % below half an ulp, median ulps); None where no sample had an update."""
        sizes = torch.cat([ulps[sample] for sample in samples])
        # A sample stands for as many weights as its parameter has for each of its samples.
        counts = [torch.full_like(ulps[s], s.num_weights / s.index.numel()) for s in samples]
        has_update = ~sizes.isnan()
        sizes, count = sizes[has_update], torch.cat(counts)[has_update]
        if not len(sizes):
            return None
        sizes, order = sizes.sort()
        up_to = count[order].cumsum(0)
        total = float(up_to[-1])
        unmoved, below = ((sizes == 0).sum(), (sizes < 0.5).sum())
        unmoved_pct, below_pct = (100 * float(up_to[num - 1]) / total if num else 0.0 for num in (unmoved, below))
        if self._is_stochastic:
            return len(sizes), unmoved_pct, None, None
        return len(sizes), unmoved_pct, below_pct, float(sizes[torch.searchsorted(up_to, total / 2)])

    def _advise(self, modules: list[ModuleUpdates]) -> str:
        if self._is_stochastic:
            return ""
        high = [module for module in modules if module.unmoved_pct >= _HIGH_PCT]
        if not high:
            return ""
        worst = max(high, key=lambda module: (module.unmoved_pct, module.num_weights))
        others = f", and {_HIGH_PCT:g} % or more of those of {len(high) - 1} other modules" if len(high) > 1 else ""
        what = f"{_pct(worst.unmoved_pct)} of the updates of {worst} in {worst.format}{others}"
        if self._exact is not None:
            return f"{what} are too small for its master weight as well: keep a wider one."
        return (
            f"{what} are under half an ulp and round away: train with a master weight (policy "
            f"'{worst.format} master=split16', 2 bytes a parameter) or with stochastic rounding "
            f"('{worst.format} master=stochastic', no byte)."
        )


_Kind = tuple[torch.device, str]


def _kind(parameter: torch.Tensor) -> _Kind:
    """Its device and the name of its format."""
    return parameter.device, format_of(parameter.dtype).name


@dataclass(frozen=True, eq=False)
class _Sample:
    """What is watched of one parameter. index: into the flattened parameter, or into a sharded one's local part."""

    module: str
    parameter: torch.Tensor
    kind: _Kind
    index: torch.Tensor

    @property
    def format(self) -> str:
        return self.kind[1]

    @property
    def num_weights(self) -> int:
        return _local(self.parameter).numel()

    def take(self) -> torch.Tensor:
        return _local(self.parameter).take(self.index)

    def has_gradient(self) -> torch.Tensor | None:
        """Where the gradient is not zero; None where there is no gradient at all."""
        if self.parameter.grad is None:
            return None
        gradient = _local(self.parameter.grad)
        return (_take_sparse(gradient, self.index) if gradient.is_sparse else gradient.take(self.index)) != 0


class _Group:
    """The samples of one device and format, side by side in flat tensors on the device."""

    def __init__(self, samples: list[_Sample], exact: Exact | None) -> None:
        self._samples, self._exact = samples, exact
        self._sizes = [sample.index.numel() for sample in samples]
        # |update| / ulp of each, NaN where there was no update, and last the number of the sample, which counts from 1.
        self._ulps = torch.zeros(sum(self._sizes) + 1, dtype=torch.float32, device=samples[0].parameter.device)
        self._stored = self._weights = self._ulps[:0]
        self._gradients: list[torch.Tensor | None] = []

    def keep_weights(self) -> None:
        self._stored, self._weights = self._take()

    def keep_gradients(self) -> None:
        self._gradients = [sample.has_gradient() for sample in self._samples]

    @torch.no_grad()
    def compare(self, skipped: torch.Tensor, number: int) -> None:
        """After the step: how far the weights moved since ``keep_weights``. A skipped step changes nothing here."""
        stored, weights = self._take()
        updates = weights - self._weights
        # Without any gradient here the optimizer got it from elsewhere, or did nothing.
        moved = (updates != 0).split(self._sizes)
        has_gradient = [m if g is None else g for m, g in zip(moved, self._gradients, strict=True)]
        has_update = torch.cat(has_gradient) | (stored != self._stored)
        ulps = torch.where(has_update, updates.abs() / spacing(self._stored, updates), math.nan)
        ulps = torch.cat((ulps, ulps.new_full((1,), number)))
        self._ulps = torch.where(skipped.to(ulps.device), self._ulps, ulps)

    def read(self) -> tuple[int, dict[_Sample, torch.Tensor]]:
        """The number of the sample, 0 for none yet, and |update| / ulp by parameter; one read."""
        *ulps, number = self._ulps.double().cpu().split([*self._sizes, 1])
        return int(number), dict(zip(self._samples, ulps, strict=True))

    @torch.no_grad()
    def _take(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The 16-bit weights, and the fp32 ones that the optimizer moves."""
        stored = torch.cat([sample.take() for sample in self._samples])
        if self._exact is None:
            return stored, stored.float()
        return stored, torch.cat([self._exact(sample.parameter, sample.index) for sample in self._samples])


def _draw(parameter: torch.Tensor, num_samples: int, generator: torch.Generator) -> torch.Tensor:
    """One index at random from each of ``num_samples`` equal stretches of the flat parameter; all, of a small one."""
    num = min(num_samples, parameter.numel())
    edges = torch.arange(num + 1) * parameter.numel() // num
    within = torch.rand(num, dtype=torch.float64, generator=generator) * edges.diff()
    return (edges[:-1] + within.long()).to(parameter.device)


def _take_sparse(gradient: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """``gradient.to_dense().take(index)`` without the dense tensor."""
    gradient = gradient.coalesce()
    row_size = math.prod(gradient.shape[gradient.sparse_dim() :])
    values = gradient.values().reshape(-1, row_size)
    if not len(values):
        return values.new_zeros(len(index))
    rows = index.new_zeros(len(values))
    for size, places in zip(gradient.shape, gradient.indices(), strict=False):
        rows = rows * size + places
    row = index // row_size
    # Coalesced rows are in ascending order.
    place = torch.searchsorted(rows, row).clamp_(max=len(rows) - 1)
    return torch.where(rows[place].eq(row), values[place, index % row_size], 0)


def _has_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether ``optimizer.step`` was called with one; the first of ``args`` is the optimizer."""
    return (args[1] if len(args) > 1 else kwargs.get("closure")) is not None


def _is_skipped(optimizer: Optimizer) -> torch.Tensor:
    """Whether the optimizer skips the step, on the device: by ``found_inf``, or else over a non-finite gradient."""
    found = getattr(optimizer, "found_inf", None)
    if found is not None:
        return torch.eq(found.reshape(()), 1)  # as torch's kernels ask
    gradients = [_local(gradient) for gradient in gradients_of(optimizer).values()]
    values = [v for v in map(values_of, gradients) if v.numel()]
    if not values:
        return torch.tensor(False)
    # Not the norm, which overflows by itself in fp16 where the gradient is scaled.
    ends = [end.to(values[0].device) for value in values for end in value.aminmax()]
    return torch.stack(ends).isfinite().all().logical_not()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a sharded tensor; any other as it is."""
    to_local: Callable[[], torch.Tensor] | None = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def _share(module: ModuleUpdates) -> float:
    return module.unmoved_pct if module.below_half_ulp_pct is None else module.below_half_ulp_pct


def _pct(share: float | None) -> str:
    return "-" if share is None else f"{share:.3g} %"
