"""Inference in 16 bit: weights stored in the format that the policy computes in, at 2 bytes each instead of 4.

    report = halfstep.cast_for_inference(model.eval(), "bf16")      # in place
    logits = model(x)                                               # opens the policy's region by itself

Under autocast a product rounds its fp32 weight to 16 bit each time. Here that rounding is done once and the fp32 weight
is gone; everything else stays as a region has it: CUDA's op lists, module rules, cpu16. So a model whose weights go
into products alone gives the bits of ``Region.inference()``. What else changes is one rounding each: embedding tables,
and matrices that a module of the user's own holds.
"""

from __future__ import annotations

import fnmatch
import inspect
import types
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.utils._pytree import tree_map_only

from halfstep.dtypes import LOW_DTYPES
from halfstep.errors import HalfstepError
from halfstep.events import RunInfo
from halfstep.formats import FORMATS, SIXTEEN_BIT, format_of
from halfstep.hardware import Hardware
from halfstep.policy import Policy
from halfstep.region import Region, forward_of
from halfstep.weights import NORMS, is_source, widen_embedding

_PRODUCTS = (nn.Linear, _ConvNd, nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention)
"""Modules whose parameters meet 16-bit operations alone."""
_FLOATS = LOW_DTYPES | {torch.float32}

BY_KEEP = "keep names it"
BY_RULE = "a module rule keeps it in fp32"
BY_POLICY = "the policy computes in fp32"
BY_NORM = "a normalisation computes in fp32"
BY_VECTOR = "a vector or number of a module of another kind"
BY_SOURCE = "the weight is computed from it in each forward pass"
BY_SHARING = "a bf16 and an fp16 module share it"


@dataclass(frozen=True)
class InferenceReport:
    """What :func:`cast_for_inference` did. Names are those of ``model.named_parameters()``, each tied weight once.

    info:      the policy asked for, the one in effect, why they differ, and the device.
    cast:      parameter to the 16-bit format that it is stored in now.
    kept:      parameter to the reason why it is not.
    converted: parameters of ``cast`` that were in the other 16-bit format before, so were rounded a second time.
    underflow: parameter to the number of its elements that were not zero and are now, where there are any.
    num_bytes_before, num_bytes_after: of all parameters and buffers, each storage once.
    """

    info: RunInfo
    cast: Mapping[str, str]
    kept: Mapping[str, str]
    converted: tuple[str, ...]
    underflow: Mapping[str, int]
    num_bytes_before: int
    num_bytes_after: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        formats = Counter(self.cast.values())
        total = len(self.cast) + len(self.kept)
        cast = ", ".join(f"{count} in {format}" for format, count in formats.items()) or "none in 16 bit"
        lines = [
            f"policy      {self.info.effective} on {self.info.device}: {self.info.reason}",
            f"parameters  {total}: {cast}, {len(self.kept)} kept",
            *(f"            {count} kept: {why}" for why, count in Counter(self.kept.values()).items()),
            f"memory      {self.num_bytes_after / 2**20:.2f} MiB, before {self.num_bytes_before / 2**20:.2f} MiB",
        ]
        if self.converted:
            lines.append(f"rounded twice  {', '.join(self.converted)}: 16 bit of the other format before")
        if self.underflow:
            counts = ", ".join(f"{name} {count}" for name, count in self.underflow.items())
            lines.append(f"rounded to zero  {counts}")
        return "\n".join(lines)


@dataclass
class _Weight:
    """One weight, whatever its names: parameters that share their storage are cast together and stay tied."""

    name: str
    parameters: list[nn.Parameter]
    formats: set[str]
    reason: str | None = None
    is_left: bool = False
    """Not a plain tensor of 16 or 32 bits, so not to be touched at all."""

    @property
    def dtype(self) -> torch.dtype:
        """What it is to be stored in."""
        return self.parameters[0].dtype if self.is_left else FORMATS["fp32" if self.reason else self.format].dtype

    @property
    def format(self) -> str:
        (format,) = self.formats
        return format

    def explain(self) -> str:
        """Why it is not cast, and from what it was widened if it was in 16 bit before."""
        before = self.parameters[0].dtype
        return f"{self.reason}{'' if before == self.dtype else f', widened from {format_of(before).name}'}"

    def store(self) -> None:
        before = self.parameters[0].data
        if before.dtype != self.dtype:
            values = before.to(self.dtype)
            for parameter in self.parameters:
                parameter.data = values


@torch.inference_mode(False)
@torch.no_grad()
def cast_for_inference(
    model: nn.Module,
    policy: str | Policy = "auto",
    *,
    keep: Sequence[str] = (),
    hardware: Hardware | None = None,
) -> InferenceReport:
    """Turn ``model``, in place, into one that serves under ``policy`` with 16-bit weights.

    Its parameters are rounded and frozen, so cast a ``copy.deepcopy`` of a model that trains on. Afterwards it is
    called as before: its forward opens the region of ``policy``, takes inputs in fp32 or 16 bit and returns what
    autocast would, so 16 bit where the last operation is a product. Gradients flow to inputs that ask for them.

    In the policy's format, or in that of the innermost module rule, are the parameters of linear, convolution,
    recurrent and attention layers, the tables of embeddings, and the matrices of any other module. Normalisations,
    vectors of other modules, buffers (BatchNorm's statistics, rotary tables) and what a rule keeps in fp32 stay fp32.
    ``keep`` names parameters, or patterns of their names, that stay fp32 as well, where a module rule would reach too
    far. Parameters are cast one by one, so the most memory is that of the model and a 16-bit copy of its largest one.

    Raises HalfstepError, with the model as it was, for one in training mode, for a policy that the device or the model
    cannot follow, for a ``keep`` that matches nothing, and for a weight too large for the format.
    """
    if isinstance(model, torch.jit.ScriptModule):
        raise HalfstepError(
            "a scripted model", "what its modules do cannot be changed", "Cast the model, then torch.jit.trace it."
        )
    if model.training:
        raise HalfstepError(
            "a model in training mode",
            "dropout would go on and BatchNorm would move its statistics",
            "Call model.eval() first; if it trains on, cast a copy.deepcopy of it.",
        )
    region = Region(model, policy, hardware)
    weights = _weights(model, region.policy, (keep,) if isinstance(keep, str) else keep)
    num_bytes_before = _num_bytes(model)
    converted, underflow = [], {}
    for weight in weights:
        if weight.reason is None:
            if count := _num_underflows(weight):
                underflow[weight.name] = count
            if weight.parameters[0].dtype not in (weight.dtype, torch.float32):
                converted.append(weight.name)
    kept = {weight.name: weight.explain() for weight in weights if weight.reason is not None}
    for parameter in model.requires_grad_(False).parameters():
        parameter.grad = None
    for weight in weights:
        weight.store()
    for module in model.modules():
        _fit(module)
    _serve(model, region)
    return InferenceReport(
        region.info,
        {weight.name: weight.format for weight in weights if weight.reason is None},
        kept,
        tuple(converted),
        underflow,
        num_bytes_before,
        _num_bytes(model),
    )


# --- what goes to which format -------------------------------------------------------------------------------------


def _weights(model: nn.Module, policy: Policy, keep: Sequence[str]) -> list[_Weight]:
    """Every weight of ``model`` and what is to become of it. One that any owner needs in fp32 stays there."""
    weights: dict[Any, _Weight] = {}
    unmatched = dict.fromkeys(keep)
    for prefix, module in model.named_modules(remove_duplicate=False):
        ruled = policy.rule_of(prefix)
        format = ruled or policy.compute
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            full_name = f"{prefix}.{name}".removeprefix(".")
            _check(full_name, parameter)
            weight = weights.setdefault(_identity(parameter), _Weight(full_name, [], set()))
            patterns = [pattern for pattern in keep if fnmatch.fnmatchcase(full_name, pattern)]
            for pattern in patterns:
                unmatched.pop(pattern, None)
            if not any(parameter is other for other in weight.parameters):
                weight.parameters.append(parameter)
            weight.formats.add(format)
            if why := _why_not_touched(parameter):
                weight.reason, weight.is_left = why, True
            elif weight.reason is None:
                if patterns:
                    weight.reason = BY_KEEP
                elif format not in SIXTEEN_BIT:
                    weight.reason = BY_RULE if ruled else BY_POLICY
                else:
                    weight.reason = _why_fp32(module, name, parameter)
    if unmatched:
        names = ", ".join([weight.name for weight in weights.values()][:6])
        raise HalfstepError(
            f"keep {next(iter(unmatched))!r}",
            "no parameter of the model has a name that it matches",
            f"Names are those of model.named_parameters(), such as {names or 'none, it has no parameters'}.",
        )
    for weight in weights.values():
        if weight.reason is None and len(weight.formats) > 1:
            weight.reason = BY_SHARING
    return list(weights.values())


def _check(name: str, parameter: nn.Parameter) -> None:
    if isinstance(parameter, nn.parameter.UninitializedParameter):
        raise HalfstepError(
            f"{name} of a lazy module", "it has no values yet", "Call the model once with a batch, then cast it."
        )
    if parameter.is_inference():
        raise HalfstepError(
            f"{name}, made in torch.inference_mode()",
            "torch lets nobody change it outside",
            "Build and load the model outside of it; calling it inside is fine.",
        )


def _identity(parameter: nn.Parameter) -> Any:
    """The same for parameters that are one view of one storage."""
    if not _is_plain(parameter):
        return id(parameter)
    storage = parameter.untyped_storage()
    return storage._cdata, parameter.storage_offset(), parameter.shape, parameter.stride(), parameter.dtype


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether it has a storage of numbers, and no subclass or layout that stores it in another way."""
    return type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout == torch.strided


def _why_not_touched(parameter: nn.Parameter) -> str | None:
    if not _is_plain(parameter):
        return f"a {type(parameter).__name__}, {parameter.layout}, is stored in a way of its own"
    if parameter.dtype not in _FLOATS:
        return f"{str(parameter.dtype).removeprefix('torch.')} is left alone, as autocast does"
    return None


def _why_fp32(module: nn.Module, name: str, parameter: nn.Parameter) -> str | None:
    if isinstance(module, NORMS):
        return BY_NORM
    if is_source(module, name):
        return BY_SOURCE
    if not isinstance(module, _PRODUCTS) and parameter.dim() < 2:
        return BY_VECTOR
    return None


# --- casting -------------------------------------------------------------------------------------------------------


def _num_underflows(weight: _Weight) -> int:
    """How many elements the cast turns to zero. Refuses a weight that it would turn to inf."""
    values = weight.parameters[0].detach()
    if values.dtype == weight.dtype or values.numel() == 0:
        return 0
    low = values.to(weight.dtype)
    if not all(map(torch.isfinite, low.aminmax())):
        too_large = values[low.isinf() & values.isfinite()]
        if too_large.numel():
            raise HalfstepError(
                f"{weight.name} in {weight.format}",
                f"{too_large.numel()} of its elements, up to {too_large.abs().max().item():g}, are beyond "
                f"{FORMATS[weight.format].max:g} and would become inf",
                f"Keep it in fp32: keep=[{weight.name!r}], or a module rule."
                + " Or use bf16." * (weight.format == "fp16"),
            )
    return int(values.count_nonzero() - low.count_nonzero())


def _num_bytes(model: nn.Module) -> int:
    sizes = {}
    for tensor in (*model.parameters(), *model.buffers()):
        if _is_plain(tensor):
            storage = tensor.untyped_storage()
            sizes[storage._cdata] = storage.nbytes()
        else:
            sizes[id(tensor)] = tensor.numel() * tensor.element_size()
    return sum(sizes.values())


# --- serving -------------------------------------------------------------------------------------------------------


def _serve(model: nn.Module, region: Region) -> None:
    """Open ``region`` in the model's forward, as a bound method, so that a copy of the model is bound to the copy."""
    own: Any = model.__dict__.get("forward")
    inner_of = forward_of(model)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        is_inference, has_grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        # The caller's modes, not the region's: logits that may be changed in place, and trained on by a head.
        with region.inference(), torch.inference_mode(is_inference), torch.set_grad_enabled(has_grad):
            return inner_of(self)(*args, **kwargs)

    is_bound = isinstance(own, types.MethodType) and own.__self__ is model
    if is_bound and getattr(own.__func__, "__code__", None) is forward.__code__:
        inner_of = own.__func__.halfstep_inner  # cast before: one region, and not two
    signature = inspect.signature(model.forward)
    itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    # Callers such as generate() of transformers ask which arguments there are.
    forward.__signature__ = signature.replace(parameters=[itself, *signature.parameters.values()])  # type: ignore[attr-defined]
    forward.halfstep_inner = inner_of  # type: ignore[attr-defined]
    model.forward = types.MethodType(forward, model)


def _fit(module: nn.Module) -> None:
    """Make a module at home among 16-bit weights where autocast does not."""
    if any(parameter.dtype in LOW_DTYPES for parameter in module.parameters(recurse=False)):
        widen_embedding(module)
        if isinstance(module, nn.RNNBase | nn.EmbeddingBag) and _match_inputs not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(_match_inputs, with_kwargs=True)
    if isinstance(module, nn.RNNBase):
        module.flatten_parameters()  # cuDNN wants one piece of memory
    if isinstance(module, NORMS):
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.dtype in _FLOATS:
                setattr(module, name, buffer.float())


def _match_inputs(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Inputs in the dtype of the weights, as cuDNN's layers get them from autocast; the CPU's kernels refuse a mix."""
    dtype = next(module.parameters()).dtype

    def match(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.dtype in _FLOATS else tensor

    args, kwargs = tree_map_only(torch.Tensor, match, (args, kwargs))
    return args, kwargs
