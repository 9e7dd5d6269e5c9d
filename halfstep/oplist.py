"""Which operation autocast runs in which format: CUDA's own lists, for the CPU as well, and the user's op rules.

torch has two op policies. On CUDA, softmax, layer_norm, sum, exp and sixty more take their input to fp32; the CPU's
list leaves them in 16 bit and differs in a hundred other places, so a CPU run says little about a GPU run. Every torch
wheel ships the CUDA lists in a header (include/ATen/autocast_mode.h). They are read from there, and Python kernels on
the AutocastCPU dispatch key make a CPU region follow them, for the torch that is installed.

A kernel acts only while a region has set :data:`active`; otherwise it hands the call on to what torch had registered,
so plain ``torch.autocast`` outside our regions gives the same bits as without us, and with the last region they are
gone.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from halfstep.errors import HalfstepError
from halfstep.kernels import Kernels

active: Mapping[str, torch.dtype] | None = None
"""The op rules of the region that is open (often empty), None when no region of ours is.

One value for the process: the backward pass of a CUDA device runs in autograd's own thread, and a checkpoint that
recomputes there has to find the rules of its region. Autocast itself is per thread, so a thread that opened no region
never reaches these kernels.
"""

_HEADER = "include/ATen/autocast_mode.h"
_LISTS = {
    "low": "AT_FORALL_LOWER_PRECISION_FP",
    "fp32": "AT_FORALL_FP32",
    "set_dtype": "AT_FORALL_FP32_SET_OPT_DTYPE",
    "promote": "AT_FORALL_PROMOTE",
}
# Two overloads that the header lists with whole signatures; the CUDA kernel appends dtype=float32, as fp32 input does.
_APPEND_DTYPE = {"aten::norm.Scalar": "fp32", "aten::norm.ScalarOpt_dim": "fp32"}
_BANNED = {"aten::binary_cross_entropy": "banned"}
# On CUDA cuDNN runs these, and a kernel of its own casts for it (ATen/cudnn/AutocastRNN.cpp), which the header has not.
# A CPU has no such kernel: its autocast would mix formats, or ask oneDNN for an LSTM that most CPUs do not have.
_RNNS = {
    f"aten::{name}.{form}": "low" for name in ("lstm", "gru", "rnn_tanh", "rnn_relu") for form in ("input", "data")
}
_POSITIONAL_DTYPE = ("softmax", "log_softmax")


@functools.cache
def cuda_lists() -> Mapping[str, str]:
    """What CUDA autocast does with an overload (``aten::softmax.int``): low, fp32, set_dtype, promote or banned."""
    path = Path(torch.__file__).parent / _HEADER
    try:
        text = path.read_text(encoding="utf-8").replace("\\\n", "\n")
    except OSError:
        raise HalfstepError(
            f"torch {torch.__version__} without {_HEADER}",
            "the op lists of CUDA autocast are read from it",
            "Install torch from its official wheel.",
        ) from None
    kinds: dict[str, str] = {}
    for kind, macro in _LISTS.items():
        body = re.search(rf"#define {macro}\(_\)(.*?)(?=\n#define|\n\n|\Z)", text, re.S)
        assert body is not None, f"{macro} not found in {path}"
        for entry in re.findall(r"_\(([\w, ]+)\)", body.group(1)):
            kinds["aten::" + ".".join(part.strip() for part in entry.split(","))] = kind
    return kinds | _APPEND_DTYPE | _BANNED


def overload(name: str) -> Any:
    """The OpOverload called ``aten::base.overload``, None where this torch does not have it."""
    base, _, rest = name.removeprefix("aten::").partition(".")
    return getattr(getattr(torch.ops.aten, base, None), rest or "default", None)


def check_rules(rules: Iterable[tuple[str, str]]) -> None:
    """Refuse an op rule whose name is none of an operation, or of one in place, with the names that come near."""
    for name, _ in rules:
        if not _overloads(name):
            known = {full.removeprefix("aten::").partition(".")[0] for full in torch._C._dispatch_get_all_op_names()}
            close = difflib.get_close_matches(name, sorted(known), 9, 0.5)
            near = ", ".join([other for other in close if _overloads(other)][:3])
            raise HalfstepError(
                f"op rule {name!r}",
                "torch has no aten operation of this name that returns a new tensor",
                f"Did you mean {near}?" if near else "Names are those of torch.ops.aten, such as softmax or linear.",
            )


def _overloads(base: str) -> list[str]:
    """The functional overloads of an aten operation. TorchScript knows some more, which the dispatcher has not."""
    packet = getattr(torch.ops.aten, base, None)
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        return []
    names = [f"aten::{base}" + ("" if name == "default" else f".{name}") for name in packet.overloads()]
    names = [name for name in names if torch._C._dispatch_has_kernel(name)]
    return [name for name in names if not any(r.alias_info for r in overload(name)._schema.returns)]


@functools.cache
def kernels(device_type: str) -> Kernels:
    """The kernels of one device type: on a CPU all that make it follow CUDA's lists, elsewhere those of op rules."""
    return Kernels(f"Autocast{device_type.upper()}", _follow_cuda if device_type == "cpu" else lambda _: None)


def add_rules(device_type: str, ops: Iterable[str]) -> None:
    """Put in place what op rules for the operations ``ops`` need; the caller uses ``kernels(device_type)`` already."""
    for base in ops:
        for name in _overloads(base):
            kernels(device_type).add(name, _kernel(name, device_type))


def _follow_cuda(cpu: Kernels) -> None:
    for name in _differing(cpu.key):
        cpu.add(name, _kernel(name, "cpu"))


@functools.cache
def _differing(key: str) -> tuple[str, ...]:
    """The overloads that the CPU's lists treat in another way than CUDA's. Asked once, before we change an answer."""
    lists = {**cuda_lists(), **_RNNS}
    listed_by_cpu = {name for name in torch._C._dispatch_get_all_op_names() if _has_kernel(name, key)}
    # The CPU's C++ kernels of the low-precision list stay: they do the same, and they cache the cast weights.
    same = {name for name in listed_by_cpu if lists.get(name) == "low"}
    return tuple(name for name in sorted((listed_by_cpu | lists.keys()) - same) if overload(name) is not None)


def _has_kernel(name: str, key: str) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, key))


@functools.cache
def _kernel(name: str, device_type: str) -> Callable[..., Any]:
    """The kernel of one overload: by op rule, else as CUDA's lists say (on a CPU), else as torch had it.

    Made once a process, before anything of ours hides what torch had.
    """
    op = overload(name)
    key = f"Autocast{device_type.upper()}"
    base = name.removeprefix("aten::").partition(".")[0]
    dispatch_key = getattr(torch._C.DispatchKey, key)
    own_set = torch._C.DispatchKeySet(dispatch_key)
    below = torch._C._dispatch_keyset_full_after(dispatch_key)
    original = torch.library.get_kernel(op, key) if _has_kernel(name, key) else None
    kind = _RNNS.get(name) or cuda_lists().get(name, "none") if device_type == "cpu" else "torch"
    if kind == "low" and original is not None:
        kind = "torch"
    low_dtype = torch.get_autocast_dtype
    dtype_is_positional = base in _POSITIONAL_DTYPE
    tensor_places = [i for i, argument in enumerate(op._schema.arguments) if str(argument.type) == "Tensor"]

    def skip(keyset: Any, args: Any, kwargs: Any) -> Any:
        if any(i < len(args) and not isinstance(args[i], torch.Tensor) for i in tensor_places):
            # The number of an x * 2.0, which only another overload takes.
            with torch._C._ExcludeDispatchKeyGuard(own_set):
                return op.overloadpacket(*args, **kwargs)
        return op.redispatch(keyset & below, *args, **kwargs)

    def pass_on(keyset: Any, args: Any, kwargs: Any) -> Any:
        if original is not None:
            return original.call_boxed(keyset, *args, **kwargs)
        return skip(keyset, args, kwargs)

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        rules = active
        if rules is None:
            return pass_on(keyset, args, kwargs)
        target = rules.get(base) if rules else None
        if target is None:
            if kind == "torch":
                return pass_on(keyset, args, kwargs)
            if kind == "none":
                return skip(keyset, args, kwargs)
            if kind == "banned":
                raise HalfstepError(
                    "binary_cross_entropy in a 16-bit region",
                    "its logarithm of a rounded probability overflows, and CUDA autocast refuses it too",
                    "Use binary_cross_entropy_with_logits on the raw output, or keep the loss in fp32 with a rule.",
                )
            if kind == "set_dtype":
                if eligible(args[0], device_type):
                    if not dtype_is_positional:
                        kwargs.setdefault("dtype", torch.float32)
                    elif len(args) == 2:
                        args = (*args, torch.float32)
                with torch._C._ExcludeDispatchKeyGuard(own_set):
                    return op(*args, **kwargs)
            if kind == "promote":
                target = torch.float32 if _any_fp32((*args, *kwargs.values())) else None
            else:
                target = torch.float32 if kind == "fp32" else low_dtype(device_type)
        with torch._C._ExcludeDispatchKeyGuard(own_set):
            if target is None:
                return op(*args, **kwargs)
            args = tuple([_cast(value, target, device_type) for value in args])
            if kwargs:
                kwargs = {key: _cast(value, target, device_type) for key, value in kwargs.items()}
            return op(*args, **kwargs)

    return kernel


def eligible(value: Any, device_type: str) -> bool:
    """torch's rule: a floating tensor of the region's device, double left alone."""
    return (
        isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and value.dtype != torch.float64
        and value.device.type == device_type
    )


def _cast(value: Any, dtype: torch.dtype, device_type: str) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.dtype != dtype and eligible(value, device_type) else value
    if isinstance(value, (list, tuple)):
        return [_cast(item, dtype, device_type) for item in value]
    return value


def _any_fp32(values: Iterable[Any]) -> bool:
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.dtype == torch.float32:
                return True
        elif isinstance(value, (list, tuple)) and _any_fp32(value):
            return True
    return False
