"""In which format a region computes, and an operation answers."""

from __future__ import annotations

from collections.abc import Iterable

from halfstep.lint import vocabulary
from halfstep.lint.values import Const, Name, Object, Tensor, Value, options

UNSURE_16 = frozenset({"16 bit"})
"""One of the 16-bit formats, not known which."""


def format_of(dtype: Value | None) -> frozenset[str]:
    """The formats that a dtype argument may mean; empty when that is not known."""
    names = options(dtype)
    found = frozenset(
        vocabulary.FORMATS[name.qualified]
        for name in names
        if isinstance(name, Name) and name.qualified in vocabulary.FORMATS
    )
    return found if len(names) and all(isinstance(n, Name) and n.qualified in vocabulary.FORMATS for n in names) else frozenset()


def devices_of(value: Value | None) -> frozenset[str]:
    """The device types that a device argument may mean: cpu, cuda ...; empty when that is not known."""
    if isinstance(value, Object) and value.kind == "device":
        value = value.argument("type", 0)
    found = set()
    for option in options(value):
        if not (isinstance(option, Const) and (isinstance(option.value, str | int)) and not isinstance(option.value, bool)):
            return frozenset()
        found.add("cuda" if isinstance(option.value, int) else option.value.partition(":")[0])
    return frozenset(found)


def region_devices(region: Object) -> frozenset[str]:
    """The device types that an autocast region covers; empty when that is not known."""
    if region.type.startswith("torch.cuda."):
        return frozenset({"cuda"})
    if region.type.startswith("torch.cpu."):
        return frozenset({"cpu"})
    return devices_of(region.argument("device_type", 0))


def region_dtype(region: Object) -> Value | None:
    """The dtype argument of a region, None when it was left out."""
    return region.argument("dtype", 1)


def region_enabled(region: Object) -> bool | None:
    """Whether a region is on: True, False, or None when that depends."""
    old = region.type.startswith(("torch.cuda.", "torch.cpu."))
    value = region.argument("enabled", 0 if old else 2)
    if value is None:
        return True
    return bool(value.value) if isinstance(value, Const) else None


def region_formats(region: Object | None) -> frozenset[str]:
    """In which formats a region computes; empty for none and for one that is off."""
    if region is None or region_enabled(region) is False:
        return frozenset()
    dtype = region_dtype(region)
    if dtype is not None and dtype != Const(None):
        return format_of(dtype) or UNSURE_16
    defaults = {"cuda": "fp16", "cpu": "bf16", "xpu": "fp16", "mps": "fp16", "hpu": "bf16"}
    devices = region_devices(region)
    return frozenset(defaults.get(device, "16 bit") for device in devices) or UNSURE_16


def answer(operation: str, args: Iterable[Value | None], region: Object | None) -> frozenset[str]:
    """The formats in which ``operation`` (its plain name) answers; empty when that is not known."""
    formats = region_formats(region)
    if formats and operation in vocabulary.LOWER_PRECISION:
        return formats
    if operation in vocabulary.FP32 and formats and region is not None and region_devices(region) != {"cpu"}:
        return frozenset({"fp32"})
    if operation in vocabulary.KEEPS_FORMAT | vocabulary.LOWER_PRECISION | vocabulary.FP32:
        return widest(args)
    return frozenset()


def widest(args: Iterable[Value | None]) -> frozenset[str]:
    """What type promotion makes of tensors; numbers take no part. Empty as soon as one is not known."""
    result: frozenset[str] | None = None
    for arg in args:
        if not isinstance(arg, Tensor):
            if arg is None or isinstance(arg, Const):
                continue
            return frozenset()
        if "number" in arg.tags:
            continue
        if not arg.formats:
            return frozenset()
        result = arg.formats if result is None else frozenset(_promote(a, b) for a in result for b in arg.formats)
    return result or frozenset()


_RANK = {"bool": 0, "int": 1, "fp16": 2, "bf16": 2, "16 bit": 2, "fp32": 3, "fp64": 4}


def _promote(first: str, second: str) -> str:
    if first == second:
        return first
    if _RANK[first] == _RANK[second]:
        return "16 bit" if "16 bit" in (first, second) else "fp32"
    return max(first, second, key=_RANK.__getitem__)
