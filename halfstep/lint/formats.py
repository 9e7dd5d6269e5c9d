"""In which format a region computes, and an operation answers."""

from __future__ import annotations

from collections.abc import Iterable

from halfstep.lint import vocabulary
from halfstep.lint.values import Const, Name, Object, Tensor, Unknown, Value, finfo_bound, is_number, options

UNSURE_16 = frozenset({"16 bit"})
"""One of the 16-bit formats, not known which."""


def format_of(dtype: Value | None) -> frozenset[str]:
    """The formats that a dtype argument may mean; empty when that is not known."""
    found = [
        vocabulary.FORMATS.get(option.qualified) if isinstance(option, Name) else None for option in options(dtype)
    ]
    known = frozenset(format for format in found if format is not None)
    return known if None not in found else frozenset()


def devices_of(value: Value | None) -> frozenset[str]:
    """The device types that a device argument may mean: cpu, cuda ...; empty when that is not known."""
    if isinstance(value, Object) and value.kind == "device":
        value = value.argument("type", 0)
    found = set()
    for option in options(value):
        if not (
            isinstance(option, Const) and (isinstance(option.value, str | int)) and not isinstance(option.value, bool)
        ):
            return frozenset()
        found.add("cuda" if isinstance(option.value, int) else option.value.partition(":")[0])
    return frozenset(found)


def moved_to(method: str, args: tuple[Value, ...], keywords: tuple[tuple[str, Value], ...]) -> frozenset[str] | None:
    """The device types that ``x.to(...)``, ``x.cuda()`` or ``x.cpu()`` moves to, empty when that is not known.

    None for a call that does not move: another method, or ``to`` with a dtype alone.
    """
    if method in {"cuda", "cpu", "xpu"}:
        return frozenset({method})
    asked = dict(keywords).get("device", args[0] if args else None)
    if method != "to" or asked is None or format_of(asked) or asked == Unknown("dtype"):
        return None
    return asked.devices if isinstance(asked, Tensor) else devices_of(asked)


def devices_among(values: Iterable[Value | None]) -> frozenset[str]:
    """The device types that values which were moved are on; empty when none was, or they disagree."""
    known = {value.devices for value in values if isinstance(value, Tensor | Unknown) and value.devices}
    return next(iter(known)) if len(known) == 1 else frozenset()


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


def imposed(operation: str, region: Object | None) -> frozenset[str]:
    """The formats in which a region makes ``operation`` answer, whatever it is given; empty when it leaves it alone."""
    formats = region_formats(region)
    if formats and operation in vocabulary.LOWER_PRECISION:
        return formats
    if not formats or region is None:
        return frozenset()
    to_fp32 = vocabulary.CPU_FP32 if region_devices(region) == {"cpu"} else vocabulary.FP32
    return frozenset({"fp32"}) if operation in to_fp32 else frozenset()


def answer(operation: str, args: Iterable[Value | None], region: Object | None) -> frozenset[str]:
    """The formats in which ``operation`` (its plain name) answers; empty when that is not known."""
    formats = imposed(operation, region)
    if formats or operation not in _KNOWN:
        return formats
    return widest(args if operation in vocabulary.SEVERAL_OPERANDS else list(args)[:1])


def widest(args: Iterable[Value | None]) -> frozenset[str]:
    """What type promotion makes of tensors and numbers. Empty as soon as one is not known."""
    result: frozenset[str] | None = None
    numbers: list[str] = []
    for arg in args:
        if isinstance(arg, Tensor) and "number" not in arg.tags:
            if not arg.formats:
                return frozenset()
            result = arg.formats if result is None else frozenset(_promote(a, b) for a in result for b in arg.formats)
        elif isinstance(arg, Tensor) or is_number(arg):
            numbers.append(_format_of_number(arg))
        elif arg is not None and not isinstance(arg, Const):
            return frozenset()
    if not result or not numbers or not result & {"int", "bool"}:
        return result or frozenset()  # a number leaves a floating-point format as it is
    if "" in numbers:
        return frozenset()
    whole = frozenset({"int", "bool"})
    return (result - whole) | frozenset(_promote(a, b) for a in result & whole for b in numbers)


def _format_of_number(value: Value | None) -> str:
    """What a number counts for beside integers: int, or fp32; "" when that is not known."""
    if isinstance(value, Const):
        return "fp32" if isinstance(value.value, float) else "int" if type(value.value) is int else "bool"
    return "fp32" if finfo_bound(value) is not None else ""


_KNOWN = vocabulary.KEEPS_FORMAT | vocabulary.LOWER_PRECISION | vocabulary.FP32
_RANK = {"bool": 0, "int": 1, "fp16": 2, "bf16": 2, "16 bit": 2, "fp32": 3, "fp64": 4}


def _promote(first: str, second: str) -> str:
    if first == second:
        return first
    if _RANK[first] == _RANK[second]:
        return "16 bit" if "16 bit" in (first, second) else "fp32"
    return max(first, second, key=_RANK.__getitem__)
