"""Arguments and attributes of torch's mixed precision that sources use and that no version of torch has had."""

from __future__ import annotations

_AUTOCAST = frozenset({"enabled", "dtype", "cache_enabled"})
_SCALER = frozenset({"init_scale", "growth_factor", "backoff_factor", "growth_interval", "enabled"})

ARGUMENTS = {
    "torch.amp.autocast": _AUTOCAST | {"device_type"},
    "torch.cuda.amp.autocast": _AUTOCAST,
    "torch.cpu.amp.autocast": _AUTOCAST,
    "torch.amp.GradScaler": _SCALER | {"device"},
    "torch.cuda.amp.GradScaler": _SCALER,
    "torch.cpu.amp.GradScaler": _SCALER,
    "torch.amp.custom_fwd": frozenset({"fwd", "device_type", "cast_inputs"}),
    "torch.amp.custom_bwd": frozenset({"bwd", "device_type"}),
}
"""Every argument that a callable takes; each other one raises a TypeError."""

NEEDS_DEVICE = {"torch.amp.autocast": 1, "torch.amp.custom_fwd": None, "torch.amp.custom_bwd": None}
"""What cannot be called without ``device_type``: how many positional arguments make up for it, None for no number."""

FIRST_ARGUMENT: dict[str, tuple[type | tuple[type, ...], str]] = {
    "torch.cuda.amp.autocast": (str, "`enabled`: this device type only counts as true"),
    "torch.cpu.amp.autocast": (str, "`enabled`: this device type only counts as true"),
    "torch.cuda.amp.GradScaler": (str, "`init_scale`, not a device"),
    "torch.cpu.amp.GradScaler": (str, "`init_scale`, not a device"),
    "torch.amp.GradScaler": ((int, float), "`device`: this number is not the initial scale, name it init_scale="),
}
"""The type that is wrong for the first positional argument, which torch takes without a word; what that argument is."""

NAMES = {
    "torch.backends.cuda.matmul.allow_bf16": "bf16 products need no switch",
    "torch.backends.cuda.matmul.allow_fp16": "fp16 products need no switch",
    "torch.backends.cudnn.allow_bf16": "bf16 convolutions need no switch",
    "torch.backends.cudnn.allow_fp16": "fp16 convolutions need no switch",
    "torch.bf16": "write torch.bfloat16",
    "torch.fp16": "write torch.float16",
    "torch.fp32": "write torch.float32",
    "torch.amp.is_autocast_enabled": "write torch.is_autocast_enabled(device_type)",
    "torch.amp.get_autocast_dtype": "write torch.get_autocast_dtype(device_type)",
    "torch.cuda.amp.is_autocast_enabled": "write torch.is_autocast_enabled(device_type)",
    "torch.cuda.is_fp16_supported": "every GPU since compute capability 5.3 has fp16",
    "torch.cuda.is_bfloat16_supported": "write torch.cuda.is_bf16_supported(including_emulation=False)",
    "torch.cuda.is_bf16_available": "write torch.cuda.is_bf16_supported(including_emulation=False)",
    "torch.cpu.is_bf16_supported": "torch has no such question for the CPU",
    "torch.is_bf16_supported": "write torch.cuda.is_bf16_supported(including_emulation=False)",
}
"""Qualified names, each with what to do instead."""

SCALER_ATTRIBUTES = {
    "_found_inf": "compare get_scale() before and after update(): it is lower after a step that was skipped",
    "found_inf": "compare get_scale() before and after update(): it is lower after a step that was skipped",
    "has_overflow": "compare get_scale() before and after update(): it is lower after a step that was skipped",
    "unscale": "the method is unscale_, with an underscore",
    "unscale_gradients": "the method is unscale_(optimizer)",
    "backward": "write scaler.scale(loss).backward()",
    "loss_scale": "read get_scale()",
    "get_loss_scale": "read get_scale()",
    "set_scale": "update(new_scale) sets it",
    "clip_grad_norm_": "write scaler.unscale_(optimizer), then torch.nn.utils.clip_grad_norm_",
    "zero_grad": "it is the optimizer's",
}
"""Attributes that a GradScaler of torch lacks, each with what to do instead."""
