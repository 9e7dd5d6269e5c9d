"""Trainable weights in 16 bit: a model's are refused, adapters are fp32 again, and a layout begins with fp32 ones."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch
from torch import nn

from halfstep.dtypes import LOW_DTYPES
from halfstep.errors import HalfstepError, and_more
from halfstep.master import has_rest

logger = logging.getLogger(__name__)


def exact_adapters(model: object) -> dict[torch.Tensor, torch.Tensor]:
    """The trainable fp32 weights of a PEFT model by parameter, copied: TRL rounds them where the base is quantised."""
    if not isinstance(model, nn.Module) or not hasattr(model, "peft_config"):
        return {}
    wanted = (p for p in model.parameters() if p.requires_grad and p.dtype == torch.float32)
    return {parameter: parameter.detach().clone() for parameter in wanted}


def keep_fp32(model: nn.Module, exact: Mapping[torch.Tensor, torch.Tensor], has_layout: bool) -> None:
    """Make trainable weights in 16 bit fp32, if they are adapters or a layout narrows them; refuse those of a model.

    exact: what some of them were before they became 16 bit. has_layout: whether the policy keeps 16-bit weights with
    rests. It then does so from fp32 ones, and leaves in fp32 what it does not narrow, such as norms.
    """
    low = {name: p for name, p in model.named_parameters() if p.requires_grad and p.dtype in LOW_DTYPES}
    if has_layout:
        for parameter in low.values():
            if not has_rest(parameter):
                parameter.data = exact[parameter] if parameter in exact else parameter.data.float()
        return
    if not low:
        return
    formats = " and ".join(sorted({str(parameter.dtype).removeprefix("torch.") for parameter in low.values()}))
    if not hasattr(model, "peft_config"):
        raise HalfstepError(
            f"{len(low)} trainable parameters in {formats} ({and_more(list(low))})",
            "in 16 bit a weight loses every update under half its last place",
            'Load the model with dtype="float32" (in a TRL config: model_init_kwargs={"dtype": "float32"}), since the '
            "policy computes in 16 bit all the same; or keep 16-bit weights with exact rests beside them, "
            'policy="bf16 master=split16".',
        )
    for parameter in low.values():
        parameter.data = exact[parameter] if parameter in exact else parameter.data.float()
    logger.warning(
        "%d trainable weights of adapters (%s) were %s and are fp32 now: in 16 bit they would lose small updates.",
        len(low),
        and_more(list(low)),
        formats,
    )
