"""halfstep in front of ``transformers.Trainer`` and of the trainers of TRL.

    class MyTrainer(halfstep.integrations.transformers.PrecisionMixin, SFTTrainer):
        pass

    trainer = MyTrainer(model, args=args, train_dataset=data, policy="auto")
    trainer.train()

The Trainer keeps its loop. Each micro-batch becomes a closure of a Stepper, so that one that overflows in fp16 can run
again; ``Trainer.training_step`` of whatever class runs inside it, up to its call of ``accelerator.backward``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import transformers.trainer
from torch import nn

from halfstep.errors import HalfstepError
from halfstep.events import RunInfo
from halfstep.integrations.accelerate import Accelerator
from halfstep.policy import Policy
from halfstep.ranks.contract import DEFAULT, Contract
from halfstep.stepper import Event, Stepper
from halfstep.watch.settings import Watch

_Base = transformers.Trainer if TYPE_CHECKING else object

STATE_NAME = "halfstep.pt"
"""File of a checkpoint that holds the Stepper's state, beside those of the Trainer."""


class PrecisionMixin(_Base):
    """In front of a Trainer class: its steps are those of a Stepper.

    policy:  text or Policy. None: ``fp16`` where the arguments say fp16=True, else ``auto``; the flags bf16 and fp16
             of the arguments open no region of their own then.
    keep_casts, log, watch, sinks, contract: as for a Stepper.

    All other arguments are those of the Trainer class. ``max_grad_norm``, ``gradient_accumulation_steps`` and the
    scheduler are the arguments' too.
    """

    def __init__(
        self,
        *args: Any,
        policy: str | Policy | None = None,
        keep_casts: bool = False,
        log: str | os.PathLike[str] | None = None,
        watch: Watch | str | os.PathLike[str] | bool = True,
        sinks: Sequence[Callable[[Event], None]] = (),
        contract: Contract = DEFAULT,
        **kwargs: Any,
    ) -> None:
        self._halfstep_policy = policy
        self._halfstep = {
            "keep_casts": keep_casts, "log": log, "watch": watch, "sinks": sinks, "contract": contract,
        }  # fmt: skip
        self._prepared_inputs: list[Any] | None = None
        super().__init__(*args, **kwargs)
        self.args.logging_nan_inf_filter = False  # a NaN is shown, and not replaced by a running mean

    @property
    def stepper(self) -> Stepper:
        """The Stepper behind the training loop, from the first step on."""
        return self.accelerator.stepper

    @property
    def info(self) -> RunInfo:
        """The policy asked for, the one in effect, why they differ, and the device."""
        return self.accelerator.info

    def create_accelerator_and_postprocess(self) -> None:
        policy = self._halfstep_policy
        if policy is None:
            policy = "fp16" if self.args.fp16 else "auto"

        def make(**kwargs: Any) -> Accelerator:
            return Accelerator(
                **{**kwargs, "mixed_precision": "no"}, policy=policy, opens_regions=False, **self._halfstep
            )

        # The Trainer makes its own, by this name.
        with mock.patch.object(transformers.trainer, "Accelerator", make):
            super().create_accelerator_and_postprocess()

    # A micro-batch.

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        is_last = self.accelerator.sync_gradients
        step = super().training_step

        def closure() -> tuple[torch.Tensor, float]:
            with self.accelerator.holding() as held:
                losses.append(step(model, inputs, num_items_in_batch))
            if len(held) != 1:
                raise HalfstepError("TODO", "TODO", "TODO")
            # The Trainer has divided the loss by what the window holds: the counts of a window add up to 1.
            return held[0], float(is_last)

        self._prepared_inputs, losses = [], []
        try:
            self.stepper.step(closure, is_last=is_last)
        finally:
            self._prepared_inputs = None
        return losses[-1]

    def _prepare_inputs(self, inputs: Any) -> Any:
        """Once a micro-batch: a replay must see the same inputs, and some trainers generate them."""
        if self._prepared_inputs is None:
            return super()._prepare_inputs(inputs)
        if not self._prepared_inputs:
            self._prepared_inputs.append(super()._prepare_inputs(inputs))
        prepared = self._prepared_inputs[0]
        return dict(prepared) if isinstance(prepared, dict) else prepared  # compute_loss pops labels

    def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> AbstractContextManager[Any]:
        if torch.is_grad_enabled():
            return nullcontext()  # the Stepper has opened it
        return self.stepper.region
