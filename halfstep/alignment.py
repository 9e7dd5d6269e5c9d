"""align: which layer sizes keep tensor cores from full speed, what padding costs, and padding that changes no result.

Tensor cores want sizes in multiples of 16 bytes: of 8 in bf16 and fp16, 4 in tf32, 16 in FP8 and INT8. cuBLAS before
11.0 left them idle for any other size; later versions use them for every size, most efficiently in multiples (NVIDIA,
Matrix Multiplication Background User's Guide, table 1).

Padding touches no parameter. A padded layer appends zeros to what its product reads, and cuts its output back:

    y = [x 0] [W 0; 0 0]^T, of which the first out_features columns

so names, shapes, ties, checkpoints, gradients and optimizer states are those of the layer that it was.
"""

from __future__ import annotations

import fnmatch
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from halfstep import oplist
from halfstep.errors import HalfstepError
from halfstep.formats import FORMATS
from halfstep.policy import Policy, check_module_rules

ALIGNMENT_BYTES = 16
"""What the rows of a product should be multiples of for tensor cores."""

FITS, PADDABLE, PADDED, FIXED, LOOKUP = "fits", "can be padded", "padded", "fixed", "lookup"
GAIN = (
    "not known without the card: cuBLAS 11 and newer use tensor cores for every size, most efficiently in multiples; "
    "python benchmarks/bench_align.py measures it"
)

Dimensions = Mapping[str, int]


@dataclass(frozen=True)
class Size:
    """One dimension of a layer: its size, and the next multiple."""

    dimension: str
    size: int
    padded: int


@dataclass(frozen=True)
class LayerSizes:
    """The sizes of one layer.

    format:          the compute format that the policy gives it.
    multiple:        what its sizes should be multiples of, 1 for a format without tensor cores.
    num_weights:     elements of its weight matrices. Operations, forward and backward, are proportional to them.
    extra_weights:   zeros that padding every size adds to them; parameters, where the model itself is built larger.
    extra_flops_pct: operations that padding adds, in percent; 0 for a lookup, which multiplies nothing.
    status:          ``fits``; ``can be padded``; ``padded``; ``fixed``: only the model can change them; ``lookup``: an
                     embedding, whose sizes matter only where a product reads its weight.
    reason:          of ``fixed`` and ``lookup``.
    """

    name: str
    kind: str
    format: str
    multiple: int
    sizes: tuple[Size, ...]
    num_weights: int
    extra_weights: int
    extra_flops_pct: float
    status: str
    reason: str

    @property
    def is_off(self) -> bool:
        """Whether it multiplies with a size that is no multiple."""
        return self.status in (PADDABLE, FIXED)


@dataclass(frozen=True)
class AlignReport:
    """What :func:`align` found, and after it has padded, what is left.

    layers:       every linear, convolution, attention and recurrent layer and embedding, in the model's order.
    not_examined: names of the parameters with two dimensions or more that belong to none of these.
    """

    policy: str
    layers: tuple[LayerSizes, ...]
    not_examined: tuple[str, ...]

    @property
    def num_off(self) -> int:
        """Number of layers that multiply with a size that is no multiple."""
        return sum(layer.is_off for layer in self.layers)

    def to_dict(self) -> dict[str, Any]:
        return {
            "policy": self.policy,
            "num_layers": len(self.layers),
            "num_off": self.num_off,
            "gain": GAIN,
            "layers": [{**vars(layer), "sizes": [{**vars(size)} for size in layer.sizes]} for layer in self.layers],
            "not_examined": list(self.not_examined),
        }

    def __str__(self) -> str:
        multiples = sorted({layer.multiple for layer in self.layers} - {1})
        lines = [f"{self.policy}: no layer multiplies on tensor cores"]
        if multiples:
            wanted = " or ".join(map(str, multiples))
            lines = [
                f"{self.policy}: {self.num_off} of {len(self.layers)} layers have a size off multiples of {wanted}"
            ]
        rows = [["layer", "kind", "dimension", "size", "padded", "extra weights", "extra FLOPs", "status"]]
        for layer in self.layers:
            pct = layer.extra_flops_pct
            cost = [f"{layer.extra_weights:,}", f"{pct:.0f}%" if pct >= 100 else f"{pct:.2g}%"]
            cost.append(f"{layer.status}: {layer.reason}" if layer.reason else layer.status)
            for size in layer.sizes:
                if size.padded != size.size:
                    where = [layer.name or "(the model)", layer.kind, size.dimension]
                    rows.append([*where, str(size.size), str(size.padded), *cost])
                    cost = ["", "", ""]
        if len(rows) > 1:
            lines += [*_columns(rows), f"gain: {GAIN}"]
        if self.not_examined:
            lines.append(f"not examined, since no layer known here holds them: {', '.join(self.not_examined)}")
        return "\n".join(lines)


class PaddedLinear(nn.Linear):
    """A Linear whose products run with both sizes padded by zeros to multiples; its parameters are the true ones.

    Input (*, in_features), output (*, out_features). The zeros meet only zeros, so that they add nothing and let no inf
    or NaN in or out. The output is the front of longer rows: ``view(-1)`` of it needs ``reshape(-1)``.
    """

    multiple: int

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        num_in, num_out = _next(self.in_features, self.multiple), _next(self.out_features, self.multiple)
        if input.shape[-1:] != (self.in_features,):
            return super().forward(input)  # torch says what is wrong with it
        input = _append_zeros(_as_computed(input), -1, num_in)
        weight = _append_zeros(_append_zeros(_as_computed(self.weight), 1, num_in), 0, num_out)
        bias = None if self.bias is None else _append_zeros(_as_computed(self.bias), 0, num_out)
        output = F.linear(input, weight, bias)
        if num_out == self.out_features:
            return output
        # As [..., :out_features], but backward copies the gradient once instead of filling and copying, and the result
        # may be changed in place. Unsafe would be to use the whole output as well, and nobody has it.
        return torch.unsafe_split(output, self.out_features, -1)[0]

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, multiple={self.multiple}"


def align(
    model: nn.Module, policy: str | Policy = "bf16", *, multiple: int | None = None, pad: bool | str = False
) -> AlignReport:
    """Report the layers of ``model`` whose sizes keep tensor cores from full speed, and pad them where asked.

    policy:   text or Policy; its module rules say which layer computes in which format. ``auto`` counts as bf16, which
              has the multiples of fp16. Op rules are not looked at.
    multiple: in place of the one that follows from the format: 16 for FP8, 64 or 128 for whole tiles.
    pad:      True pads every Linear that can be padded, in place; a pattern, as in module rules, those whose name it
              matches. Parameters stay as they are, so it may come before or after the optimizer and the checkpoint.

    Raises HalfstepError for a multiple that is none, a lazy layer without sizes, and a pattern that matches nothing, or
    nothing that can be padded.
    """
    policy = Policy.parse(policy)
    if multiple is not None:
        multiple = _whole(multiple)
    if not isinstance(pad, bool | str):
        raise HalfstepError(
            f"pad={pad!r}", "it is a switch, or one pattern of names", "Use True, or a name such as 'lm_head'."
        )
    modules = dict(model.named_modules())
    _check(modules, policy)
    layers = _layers(modules, policy, multiple)
    if pad is not False:
        for layer in _chosen(layers, pad):
            linear = modules[layer.name]
            linear.__class__ = PaddedLinear
            linear.multiple = layer.multiple
        layers = _layers(modules, policy, multiple)
    known = {id(parameter) for layer in layers for parameter in modules[layer.name].parameters()}
    unknown = [name for name, p in model.named_parameters() if p.dim() > 1 and id(p) not in known]
    return AlignReport(str(policy), layers, tuple(unknown))


def _whole(multiple: Any) -> int:
    try:
        number = 0 if isinstance(multiple, bool) else operator.index(multiple)
    except TypeError:
        number = 0
    if number < 1:
        raise HalfstepError(f"multiple={multiple!r}", "sizes are multiples of a whole number", "Use 8, 16, 64 or 128.")
    return number


def _check(modules: Mapping[str, nn.Module], policy: Policy) -> None:
    for name, module in modules.items():
        if isinstance(module, nn.modules.lazy.LazyModuleMixin) and module.has_uninitialized_params():
            raise HalfstepError(
                f"{name or 'the model'}, a {type(module).__name__}",
                "a lazy layer has no sizes before its first batch",
                "Run one forward pass first.",
            )
    check_module_rules(policy.modules, modules)


def _chosen(layers: tuple[LayerSizes, ...], pad: bool | str) -> list[LayerSizes]:
    """The layers to pad. True takes what there is, a pattern has to find a Linear."""
    matched = [layer for layer in layers if pad is True or fnmatch.fnmatchcase(layer.name, str(pad))]
    if pad is not True and all(layer.status in (FIXED, LOOKUP) for layer in matched):
        names = ", ".join(layer.name for layer in layers if layer.status == PADDABLE)
        found = "; ".join(f"{layer.name} is {layer.status}: {layer.reason}" for layer in matched[:3])
        raise HalfstepError(
            f"pad={pad!r}",
            found or "no layer of the report has a name that it matches",
            f"Layers that can be padded: {names or 'none'}.",
        )
    return [layer for layer in matched if layer.status == PADDABLE]


# What is multiplied, and by what it should be divisible.


class _Products(NamedTuple):
    """What a layer multiplies with: its sizes, the weights that they make, and what speaks against padding it here."""

    sizes: Dimensions
    count: Callable[[Dimensions], int]
    reason: str = ""
    is_lookup: bool = False


def _layers(modules: Mapping[str, nn.Module], policy: Policy, multiple: int | None) -> tuple[LayerSizes, ...]:
    heads = {id(module.weight): name for name, module in modules.items() if isinstance(module, nn.Linear)}
    layers: list[LayerSizes] = []
    parts: set[nn.Module] = set()
    for name, module in modules.items():
        products = None if module in parts else _describe(module, heads)
        if products is not None:
            parts.update(module.modules())  # attention has a layer inside that it never calls
            format = _format_of(name, policy)
            layers.append(_sizes(name, module, products, format, _multiple_of(format, policy, multiple)))
    return tuple(layers)


def _sizes(name: str, module: nn.Module, products: _Products, format: str, multiple: int) -> LayerSizes:
    sizes, count, reason, is_lookup = products
    padded = {dimension: _next(size, multiple) for dimension, size in sizes.items()}
    status = FITS if padded == sizes else LOOKUP if is_lookup else FIXED if reason else PADDABLE
    if isinstance(module, PaddedLinear):
        own = {dimension: _next(size, module.multiple) for dimension, size in sizes.items()}
        is_enough = all(size % multiple == 0 for size in own.values())
        padded, status = (own, PADDED) if is_enough else (padded, PADDABLE)
    num_weights = count(sizes)
    extra = count(padded) - num_weights
    return LayerSizes(
        name=name,
        kind=type(module).__name__,
        format=format,
        multiple=multiple,
        sizes=tuple(Size(dimension, size, padded[dimension]) for dimension, size in sizes.items()),
        num_weights=num_weights,
        extra_weights=extra,
        extra_flops_pct=100.0 * extra / num_weights if extra and not is_lookup else 0.0,
        status=status,
        reason=reason if status in (FIXED, LOOKUP) else "",
    )


def _describe(module: nn.Module, heads: Mapping[int, str]) -> _Products | None:
    m: Any = module
    if isinstance(module, nn.Linear):
        reason = ""
        if type(module) not in (nn.Linear, PaddedLinear):
            reason = "a subclass of Linear may use its weight in its own way"
        elif type(module.weight) is not nn.Parameter:
            reason = f"its weight is a {type(module.weight).__name__} and no plain parameter"
        return _Products({"in_features": m.in_features, "out_features": m.out_features}, _product, reason)
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        head = heads.get(id(m.weight))
        reason = f"{head} multiplies by its weight" if head else "it matters where a product reads this weight"
        return _Products({"num_embeddings": m.num_embeddings, "embedding_dim": m.embedding_dim}, _product, reason, True)
    if isinstance(module, nn.modules.conv._ConvNd):
        num_taps = m.groups * math.prod(m.kernel_size)
        if m.in_channels == m.groups > 1:  # depthwise: no sum over channels, so no matrix product
            return _Products({}, lambda _: int(m.weight.numel()))
        each = "" if m.groups == 1 else " of a group"
        sizes = {f"in_channels{each}": m.in_channels // m.groups, f"out_channels{each}": m.out_channels // m.groups}
        return _Products(sizes, lambda padded: num_taps * _product(padded), "choose its channels in the model")
    if isinstance(module, nn.MultiheadAttention):
        sizes = {"head_dim": m.head_dim}  # embed_dim is a multiple of it
        if not m._qkv_same_embed_dim:
            sizes |= {"kdim": m.kdim, "vdim": m.vdim}
        return _Products(sizes, lambda padded: _projections(padded, m.num_heads), "choose its sizes in the model")
    if isinstance(module, nn.RNNBase | nn.RNNCellBase):
        sizes = {"input_size": m.input_size, "hidden_size": m.hidden_size}
        if getattr(m, "proj_size", 0):
            sizes["proj_size"] = m.proj_size
        return _Products(sizes, lambda padded: _recurrences(padded, m), "choose its sizes in the model")
    return None


def _product(sizes: Dimensions) -> int:
    return math.prod(sizes.values())


def _projections(sizes: Dimensions, num_heads: int) -> int:
    """Query, key, value and output projections; the products of attention itself depend on the sequence."""
    embed = num_heads * sizes["head_dim"]
    return embed * (2 * embed + sizes.get("kdim", embed) + sizes.get("vdim", embed))


def _recurrences(sizes: Dimensions, module: Any) -> int:
    """Input, hidden and output matrices over gates, layers and directions."""
    hidden, projection = sizes["hidden_size"], sizes.get("proj_size", 0)
    num_layers, num_directions = getattr(module, "num_layers", 1), 1 + getattr(module, "bidirectional", False)
    num_gates = {"LSTM": 4, "LSTMCell": 4, "GRU": 3, "GRUCell": 3}.get(type(module).__name__, 1)
    out = projection or hidden
    inputs = sizes["input_size"] + (num_layers - 1) * num_directions * out
    return num_directions * (num_gates * hidden * (inputs + num_layers * out) + num_layers * hidden * projection)


def _format_of(name: str, policy: Policy) -> str:
    """The format of a module; of ``auto`` the multiple is that of either 16-bit one."""
    format = policy.format_of(name)
    return "bf16" if format == "auto" else format


def _multiple_of(format: str, policy: Policy, given: int | None) -> int:
    """What sizes should be multiples of; fp32 runs on no tensor core, unless as TF32."""
    if format == "fp32" and not policy.uses_tf32:
        return 1
    return ALIGNMENT_BYTES // FORMATS[format].bytes if given is None else given


def _next(size: int, multiple: int) -> int:
    """The smallest multiple that is not below ``size``."""
    return -(-size // multiple) * multiple


# What a padded layer does to its tensors.

_AUTOCAST_KINDS = frozenset(kind for kind in ("cpu", "cuda", "mps", "xpu") if torch.amp.is_autocast_available(kind))
"""Asked once, since torch 2.11's compiler breaks a graph at the question."""


def _as_computed(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` in the format that autocast gives the product, so that zeros are appended to 2 bytes instead of 4."""
    kind = tensor.device.type
    if kind not in _AUTOCAST_KINDS or not torch.is_autocast_enabled(kind):
        return tensor
    if not oplist.eligible(tensor, kind) or "linear" in (oplist.active or ()):
        return tensor  # a rule for the operation has its own format
    return tensor.to(torch.get_autocast_dtype(kind))


def _append_zeros(tensor: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    shape = list(tensor.shape)
    shape[dim] = size - shape[dim]
    return torch.cat([tensor, tensor.new_zeros(shape)], dim) if shape[dim] else tensor


def _columns(rows: list[list[str]]) -> list[str]:
    """Rows as aligned text; the last column is as long as it is."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
