"""The policy that a loop's region and scaler amount to."""

from __future__ import annotations

import ast
import math

from halfstep.lint.loop_parts import REGIONS, NotUnderstood, Parts, is_true, is_wrapped, name_of

SCALE_SETTINGS = {
    "init_scale": "init",
    "growth_factor": "growth",
    "backoff_factor": "backoff",
    "growth_interval": "interval",
}


def policy_of(parts: Parts, region: ast.With | None) -> str:
    """The source of the policy that ``region`` and the scaler amount to. Raises :class:`NotUnderstood`."""
    if region is None or is_wrapped(region):
        if parts.scaler is not None:
            raise NotUnderstood(parts.definitions["scaler"], "a GradScaler without a region")
        return '"fp32"'
    if len(region.items) > 1 or region.items[0].optional_vars is not None:
        raise NotUnderstood(region, "the region is entered together with something else")
    call = region.items[0].context_expr
    assert isinstance(call, ast.Call)
    values = _region_values(parts, call)
    device, enabled = values.get("device_type"), values.get("enabled")
    format_ = _format(parts, call, device, values.get("dtype"))
    if "cache_enabled" in values:
        raise NotUnderstood(call, "the region has cache_enabled")
    _check_device(parts, call, device)
    if format_ == "fp16" and parts.scaler is None:
        raise NotUnderstood(call, "an fp16 region without a GradScaler")
    if format_ == "bf16" and parts.scaler is not None:
        raise NotUnderstood(parts.definitions["scaler"], "a GradScaler with a bf16 region")
    policy, scaler_enabled = format_, enabled
    if parts.scaler is not None:
        settings, scaler_enabled = _scaler_settings(parts)
        policy = " ".join([format_, *settings])
    if _source(enabled) != _source(scaler_enabled):
        raise NotUnderstood(call, "region and scaler are not switched by the same name")
    if enabled is None:
        return f'"{policy}"'
    parts.check_known_early(enabled)
    return f'"{policy}" if {ast.unparse(enabled)} else "fp32"'


def _region_values(parts: Parts, call: ast.Call) -> dict[str, ast.expr]:
    """The arguments of a region by name, those that say what is so anyway left out."""
    old_device = REGIONS[parts.script.names.qualified(call.func) or ""]
    order = ("device_type", "dtype", "enabled") if old_device is None else ("enabled", "dtype")
    if len(call.args) > len(order) or any(k.arg is None for k in call.keywords):
        raise NotUnderstood(call, "the arguments of the region")
    values = dict(zip(order, call.args, strict=False)) | {str(k.arg): k.value for k in call.keywords}
    if old_device is not None:
        values["device_type"] = ast.Constant(old_device)
    return {name: value for name, value in values.items() if name != "enabled" or not is_true(value)}


def _format(parts: Parts, call: ast.Call, device: ast.expr | None, dtype: ast.expr | None) -> str:
    if dtype is None:
        defaults = {"cuda": "fp16", "cpu": "bf16"}
        known = defaults.get(str(device.value)) if isinstance(device, ast.Constant) else None
    else:
        formats = {"torch.float16": "fp16", "torch.bfloat16": "bf16"}
        known = formats.get(parts.script.names.qualified(dtype) or "")
    if known is None:
        raise NotUnderstood(call, "the dtype of the region is not known")
    return known


def _check_device(parts: Parts, call: ast.Call, device: ast.expr | None) -> None:
    """The region's device is the model's, which is where the Stepper works."""
    moved = [_moved_to(node, parts.model) for node in ast.walk(parts.scope)]
    places = [place for place in moved if place is not None]
    if isinstance(device, ast.Constant):
        is_right = all(place == device.value for place in places) if places else device.value == "cpu"
    else:
        root = ast.unparse(device).removesuffix(".type") if device is not None else ""
        is_right = bool(places) and all(place == root for place in places)
    if not is_right:
        raise NotUnderstood(call, f"the region's device is not known to be that of {parts.model}")


def _moved_to(node: ast.AST, model: str) -> str | None:
    """Where ``model = Net().to(place)`` or ``model.to(place)`` puts the model."""
    if isinstance(node, ast.Assign) and name_of(node.targets) == model:
        call: ast.AST = node.value
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        call = node.value
        if name_of([getattr(call.func, "value", call)]) != model:
            return None
    else:
        return None
    if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)) or call.keywords:
        return None
    if call.func.attr == "cuda":
        return "cuda" if not call.args else ast.unparse(call.args[0])
    if call.func.attr == "to" and len(call.args) == 1:
        return str(call.args[0].value) if isinstance(call.args[0], ast.Constant) else ast.unparse(call.args[0])
    return None


def _scaler_settings(parts: Parts) -> tuple[list[str], ast.expr | None]:
    """The words of the policy that say what the scaler was made with, and what switches it."""
    definition = parts.definitions["scaler"]
    call = definition.value
    assert isinstance(call, ast.Call)
    takes_device = parts.script.names.qualified(call.func) == "torch.amp.GradScaler"
    order = (*(["device"] if takes_device else []), *SCALE_SETTINGS, "enabled")
    if len(call.args) > len(order) or any(k.arg is None for k in call.keywords):
        raise NotUnderstood(call, "the arguments of the GradScaler")
    values = dict(zip(order, call.args, strict=False)) | {str(k.arg): k.value for k in call.keywords}
    words = []
    for name, word in SCALE_SETTINGS.items():
        if name in values:
            number = _number(values[name])
            is_fine = number is not None and (name == "growth_interval" or math.frexp(number)[0] == 0.5)
            if not is_fine or number is None or (name == "init_scale" and not 1 <= number <= 2**24):
                raise NotUnderstood(call, f"{name} is not a power of two that is known here")
            words.append(f"scale.{word}={number:.15g}")
    enabled = values.get("enabled")
    return words, None if enabled is None or is_true(enabled) else enabled


def _number(value: ast.expr) -> float | None:
    if isinstance(value, ast.Constant) and isinstance(value.value, int | float):
        return float(value.value)
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Pow):
        base, power = _number(value.left), _number(value.right)
        return None if base is None or power is None or abs(power) > 100 else base**power
    return None


def _source(node: ast.expr | None) -> str | None:
    return None if node is None else ast.unparse(node)
