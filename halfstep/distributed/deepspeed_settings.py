"""A Policy as DeepSpeed's configuration, and the policy that a configuration stands for.

DeepSpeed has no place for most of a policy (op lists, module rules, bounds of the loss scale), so its text travels in
the configuration, under a key of its own, to the DeepSpeedStepper, which does what it says. DeepSpeed's own keys are
set so that it stores, sums and sends in the formats of the policy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from halfstep.errors import HalfstepError
from halfstep.formats import SIXTEEN_BIT
from halfstep.hardware import Hardware, detect
from halfstep.policy import LossScale, Policy, resolve

STAGES = (1, 2, 3)
_KEY = "halfstep"
_TRAVELS = ("fp32", "bf16", "fp16")


def deepspeed_config(
    policy: str | Policy = "auto",
    *,
    stage: int = 2,
    accumulate: int = 1,
    max_norm: float | None = None,
    reduce: str = "fp32",
    micro_batch: int = 1,
    hardware: Hardware | None = None,
) -> dict[str, Any]:
    """What ``deepspeed.initialize(config=...)`` takes, for an engine that :class:`DeepSpeedStepper` drives.

    policy:      fp32 weights that the region casts where it computes (``bf16``), or 16-bit weights with an fp32 copy in
                 the shards of the optimizer (``bf16 master=copy``). ``auto`` never picks the second on a card with
                 bf16; fp16 that it picks drops a step that overflows, since DeepSpeed can replay none.
    stage:       of ZeRO: 1 shards optimizer states, 2 the gradients too, 3 the weights too.
    accumulate:  number of micro-batches in a window.
    max_norm:    clips the true gradient's global 2-norm to it.
    reduce:      format that gradients travel in between ranks.
    micro_batch: samples in a micro-batch, of which DeepSpeed counts what it has seen; no number here depends on it.

    Other keys can be added to the result. Raises HalfstepError for what DeepSpeed cannot do.
    """
    hardware = detect() if hardware is None else hardware
    requested = Policy.parse(policy)
    policy, _ = resolve(requested, hardware)
    if requested.compute == "auto" and policy.scale.kind == "dynamic":
        policy = replace(policy, on_overflow="skip")
    _check_policy(policy)
    if stage not in STAGES:
        raise HalfstepError(f"stage={stage}", "ZeRO has stages 1, 2 and 3", "Use 1, 2 or 3; without any, use Stepper.")
    if not hasattr(accumulate, "__index__") or accumulate < 1:
        raise HalfstepError(f"accumulate={accumulate}", "a window holds whole micro-batches", "Use 1, 2, 3, ...")
    if max_norm is not None and not 0 < max_norm < math.inf:
        raise HalfstepError(f"max_norm={max_norm}", "a norm is clipped to a positive number", "Use None to not clip.")
    if reduce not in _TRAVELS:
        raise HalfstepError(f"reduce={reduce!r}", "no format that gradients travel in", "Use fp32, bf16 or fp16.")
    config: dict[str, Any] = {
        _KEY: {"policy": str(policy)},
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": accumulate,
        "zero_optimization": {"stage": stage},
        "communication_data_type": reduce,
        "data_types": {"grad_accum_dtype": "fp32"},
    }
    if max_norm is not None:
        config["gradient_clipping"] = max_norm
    if policy.master == "copy":
        config[policy.compute] = {"enabled": True, **(_guard if policy.compute == "bf16" else _scaling(policy.scale))}
    return config


_guard = {"check_grad_overflow": True}


def _scaling(scale: LossScale) -> dict[str, Any]:
    """The nearest of DeepSpeed's fp16 settings. It doubles and halves, without a ceiling, and down to 1 or more."""
    if scale.kind != "dynamic":
        return {"loss_scale": scale.init if scale.kind == "static" else 1.0}
    return {
        "loss_scale": 0,
        "initial_scale_power": round(math.log2(scale.init)),
        "loss_scale_window": scale.interval,
        "hysteresis": scale.hysteresis,
        "consecutive_hysteresis": True,
        "min_loss_scale": max(1, int(scale.floor)),
    }


def _check_policy(policy: Policy) -> None:
    """Refuse what an engine that accumulates and shards by itself cannot do."""
    if policy.scale.kind == "dynamic" and policy.on_overflow == "replay":
        raise HalfstepError(
            f"policy '{policy}' under DeepSpeed",
            "a micro-batch that overflowed is in DeepSpeed's sums already, so that it cannot be replayed",
            f"Drop such steps instead: '{policy} on_overflow=skip'.",
        )
    if policy.on_exhausted == "promote":
        raise HalfstepError(
            f"policy '{policy}' under DeepSpeed",
            "finding the module to promote runs the step once more, in which all ranks would have to take part",
            "Leave on_exhausted out, and keep the module that the error names in fp32.",
        )
    if policy.master not in ("fp32", "copy"):
        raise HalfstepError(
            f"master={policy.master} under DeepSpeed",
            "its optimizer keeps 16-bit weights with an fp32 copy in shards, and knows no other layout",
            "Use master=copy, or leave master out for fp32 weights.",
        )
    if policy.modules and policy.master == "copy":
        raise HalfstepError(
            f"policy '{policy}' under DeepSpeed",
            "it gives all weights of a model one format, so that a module cannot keep another",
            "Leave master out, so that the weights are fp32 and the rule decides where they are cast.",
        )


def policy_of(config: Mapping[str, Any]) -> Policy:
    """The policy that DeepSpeed's configuration stands for: what :func:`deepspeed_config` wrote, or what it enables."""
    if _KEY in config:
        policy = Policy.parse(config[_KEY]["policy"])
        _check_policy(policy)
        return policy
    blocks = {
        "fp16": config.get("fp16", {}),
        "bf16": config.get("bf16", config.get("bfloat16", {})),
    }
    for compute, block in blocks.items():
        if block.get("enabled"):
            scale = _scale_of(block) if compute == "fp16" else LossScale("none")
            return Policy(compute, master="copy", scale=scale, on_overflow="skip")
    autocast = config.get("torch_autocast", {})
    if autocast.get("enabled"):
        names = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16"}
        dtype = str(autocast.get("dtype")).removeprefix("torch.")
        compute = names.get(dtype, dtype)
        if compute not in SIXTEEN_BIT:
            raise HalfstepError(
                f"torch_autocast.dtype={autocast.get('dtype')!r}", "no 16-bit format", "Use bfloat16 or float16."
            )
        return Policy(compute, on_overflow="skip")
    return Policy("fp32")


def _scale_of(fp16: Mapping[str, Any]) -> LossScale:
    """The loss scale of an fp16 block that was written by hand; a key that it lacks has DeepSpeed's default."""
    if fp16.get("loss_scale"):
        return LossScale("static", init=float(fp16["loss_scale"]))
    hysteresis = fp16.get("hysteresis", 2)
    if hysteresis > 1 and not fp16.get("consecutive_hysteresis", False):
        raise HalfstepError(
            f"fp16.hysteresis={hysteresis} without fp16.consecutive_hysteresis",
            "overflows that lie any number of clean steps apart would add up; a DeepSpeedStepper counts those in a row",
            'Set "consecutive_hysteresis": true, or "hysteresis": 1; deepspeed_config() writes the block.',
        )
    init = 2.0 ** fp16.get("initial_scale_power", 16)
    return LossScale(
        "dynamic",
        init=init,
        interval=fp16.get("loss_scale_window", 1000),
        floor=float(fp16.get("min_loss_scale", 1)),
        ceiling=max(init, LossScale.ceiling),
        hysteresis=hysteresis,
    )
