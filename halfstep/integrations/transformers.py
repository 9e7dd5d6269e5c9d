"""halfstep in front of ``transformers.Trainer`` and of the trainers of TRL.

    class MyTrainer(halfstep.integrations.transformers.PrecisionMixin, SFTTrainer):
        pass

    trainer = MyTrainer(model, args=args, train_dataset=data, policy="auto")
    trainer.train()

The Trainer keeps its loop. Each micro-batch becomes a closure of a Stepper, so that one that overflows in fp16 can run
again; ``Trainer.training_step`` of whatever class runs inside it, up to its call of ``accelerator.backward``.
"""

from __future__ import annotations

import math
import os
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import transformers.trainer
from torch import nn

from halfstep.errors import HalfstepError
from halfstep.events import RunInfo
from halfstep.integrations.arguments import check_arguments, policy_of
from halfstep.integrations.bookkeeping import Bookkeeping
from halfstep.integrations.interval import Intervals
from halfstep.integrations.staging import Staging
from halfstep.integrations.trainable import exact_adapters, keep_fp32
from halfstep.integrations.trainer_accelerator import TrainerAccelerator
from halfstep.policy import Policy
from halfstep.ranks.contract import DEFAULT, Contract
from halfstep.stepper import Event, Stepper
from halfstep.watch.settings import Watch

if TYPE_CHECKING:
    from transformers import Trainer as _Base
else:
    _Base = object


class PrecisionMixin(_Base):
    """In front of a Trainer class: its steps are those of a Stepper.

    policy:  text or Policy. None: what the flags of the arguments say, ``fp16=True`` or ``bf16=True``, and ``auto``
             where neither is set. The flags open no region and scale no loss of their own.
    keep_casts, log, watch, sinks, contract: as for a Stepper.

    All other arguments are those of the Trainer class. ``max_grad_norm``, ``gradient_accumulation_steps`` and the
    scheduler are the arguments' too. See docs/transformers.md.
    """

    accelerator: TrainerAccelerator
    optimizer: Any
    _total_loss_scalar: float

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        order = [base for base in cls.__mro__ if base in (PrecisionMixin, transformers.Trainer)]
        if order != [PrecisionMixin, transformers.Trainer]:
            raise HalfstepError(
                f"class {cls.__name__}({', '.join(base.__name__ for base in cls.__bases__)})",
                "PrecisionMixin changes what a Trainer does, and stands in front of it",
                f"Write class {cls.__name__}(PrecisionMixin, Trainer), or another trainer class in its place.",
            )

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
        self._halfstep = _State(policy)
        self._halfstep.settings = {
            "keep_casts": keep_casts,
            "log": log,
            "watch": watch,
            "sinks": (self._halfstep.intervals, *sinks),
            "contract": contract,
        }
        self._halfstep.exact = exact_adapters(args[0] if args else kwargs.get("model"))
        super().__init__(*args, **kwargs)
        self.args.logging_nan_inf_filter = False  # a NaN is shown, and not replaced by a running mean
        if self.model_init is None:
            self._keep_fp32()

    @property
    def stepper(self) -> Stepper:
        """The Stepper behind the training loop, from the beginning of ``train()`` on."""
        return self.accelerator.stepper

    @property
    def info(self) -> RunInfo:
        """The policy asked for, the one in effect, why they differ, and the device."""
        return self.accelerator.info

    def create_accelerator_and_postprocess(self) -> None:
        check_arguments(self.args)
        state = self._halfstep
        if not hasattr(self, "accelerator"):  # a search makes one for each trial
            state.requested = policy_of(self.args, state.policy)

        trainer = weakref.ref(self)

        def model_of() -> nn.Module | None:
            return getattr(trainer(), "model", None)

        def make(**kwargs: Any) -> TrainerAccelerator:
            return TrainerAccelerator(
                model_of, **{**kwargs, "mixed_precision": "no"}, policy=state.requested, **state.settings
            )

        # The Trainer makes its own, by this name.
        with mock.patch.object(transformers.trainer, "Accelerator", make):
            super().create_accelerator_and_postprocess()

    def _keep_fp32(self) -> None:
        """Once a model: what a Stepper holds in 16 bit stays so."""
        state, model = self._halfstep, self.accelerator.unwrap_model(self.model)
        if state.kept is None or state.kept() is not model:
            keep_fp32(model, state.exact, has_layout=Policy.parse(state.requested).master != "fp32")
            state.kept, state.exact = weakref.ref(model), {}

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        for model in vars(self).values():
            # One to compare with, as that of DPO; train() has begun by freeing all.
            if isinstance(model, nn.Module) and model in self.accelerator.adopted:
                self.accelerator.adopt(model)
        prepared = super()._prepare_for_training(*args, **kwargs)
        _ = self.stepper  # built now, so that what it refuses is refused before the first batch
        return prepared

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        self._keep_fp32()
        return super().create_optimizer(*args, **kwargs)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        self._halfstep.intervals.start()
        try:
            output = super().train(*args, **kwargs)
        except BaseException as error:
            if self.accelerator.has_stepper:
                self.stepper.close(error)  # whoever catches it, the log has to know
            raise
        self.stepper.close()
        return output

    # A micro-batch.

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        state = self._halfstep
        is_last = self.accelerator.sync_gradients
        step = super().training_step
        # What generates its inputs, as GRPO does, does it for the mode that the model is in; and only once, so that a
        # replay sees the same inputs and the same random state.
        model.train()
        if callable(train := getattr(self.optimizer, "train", None)):
            train()
        with self.accelerator.region():
            prepared = super()._prepare_inputs(inputs)
        losses: list[torch.Tensor] = []
        counted = Bookkeeping(self, self.state)

        def closure() -> tuple[torch.Tensor, float]:
            is_replay, is_over = bool(losses), state.prepared is None
            now = Bookkeeping(self, self.state) if is_over else None
            if is_replay:
                counted.restore()
            with self._given(prepared), self.accelerator.holding() as held, self.accelerator.inside():
                losses.append(step(model, inputs, num_items_in_batch))
            if now is not None:
                now.restore()  # only looked at once more, after the window's end
            if len(held) != 1:
                raise HalfstepError(
                    f"{type(self).__name__}.training_step with {len(held)} calls of accelerator.backward",
                    "a micro-batch is one loss, differentiated by accelerator.backward(loss)",
                    "Add the losses up and call it once; for a loop of another kind use halfstep.Stepper itself.",
                )
            # The Trainer has divided the loss by what the window holds: the counts of a window add up to 1.
            return held[0], float(is_last)

        with self._given(prepared):
            self.stepper.step(closure, is_last=is_last)
        return losses[-1]

    @contextmanager
    def _given(self, prepared: Any) -> Iterator[None]:
        """Inside, the inputs are those that were prepared before."""
        before, self._halfstep.prepared = self._halfstep.prepared, (prepared,)
        try:
            yield
        finally:
            self._halfstep.prepared = before

    def _prepare_inputs(self, inputs: Any) -> Any:
        if self._halfstep.prepared is None:
            return super()._prepare_inputs(inputs)
        (prepared,) = self._halfstep.prepared
        # compute_loss pops labels.
        kind: Any = type(prepared)
        return kind({**prepared}) if isinstance(prepared, Mapping) else prepared

    def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> AbstractContextManager[Any]:
        return self.accelerator.region()

    # Logs.

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        intervals = self._halfstep.intervals
        if {"loss", "learning_rate"} <= logs.keys():
            interval = intervals.current()
            logs |= {
                "loss_scale": interval.scale,
                "skipped_steps": interval.num_skipped,
                "replays": interval.num_replays,
            }
        elif "train_loss" in logs:
            total = intervals.total()
            logs |= {"train_skipped_steps": total.num_skipped, "train_replays": total.num_replays}
        super().log(logs, start_time)

    def _maybe_log_save_evaluate(self, tr_loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        last, total = self._globalstep_last_logged, self._total_loss_scalar
        super()._maybe_log_save_evaluate(tr_loss, *args, **kwargs)
        if self._globalstep_last_logged != last:
            tr_loss.zero_()  # the Trainer subtracts it from itself, which leaves a NaN one
            if not math.isfinite(self._total_loss_scalar):
                self._total_loss_scalar = total + self._halfstep.intervals.current().finite_loss
            self._halfstep.intervals.end()

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        """``train_loss`` is the mean over the steps whose loss is finite."""
        intervals = self._halfstep.intervals
        if not math.isfinite(self._tr_loss.item()):
            self._tr_loss.fill_(intervals.current().finite_loss)
        total = intervals.total()
        if total.num_finite < total.num_steps:
            loss = self._total_loss_scalar + self._tr_loss.item()
            self._total_loss_scalar = loss * total.num_steps / total.num_finite if total.num_finite else math.nan
            self._tr_loss.zero_()
        return super()._finalize_training(*args, **kwargs)

    # Checkpoints.

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        state = self._halfstep
        step = self.state.global_step
        final = Path(self._get_output_dir(trial)) / f"{transformers.trainer.PREFIX_CHECKPOINT_DIR}-{step}"
        state.staging = staging = Staging(final, self.args.should_save)
        self.accelerator.wait_for_everyone()  # one has removed what was left there

        def save_to_json(path: str) -> None:
            """The last file of a checkpoint."""
            if self.state.best_global_step == step:
                self.state.best_model_checkpoint = str(final)  # it has no name yet by which the Trainer could find it
            type(self.state).save_to_json(self.state, str(staging.part / Path(path).name))
            staging.publish()

        try:
            with staging.writing(), mock.patch.object(self.state, "save_to_json", save_to_json):
                super()._save_checkpoint(model, trial)
        finally:
            state.staging = None
        self.accelerator.wait_for_everyone()

    def _place(self, folder: str | None) -> Any:
        return self._halfstep.staging.place(folder) if self._halfstep.staging else folder

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        super().save_model(self._place(output_dir), _internal_call)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Weights in 16 bit with rests beside them are written exactly, as fp32."""
        has_rests = self.accelerator.has_stepper and bool(self.stepper.masters)
        if state_dict is not None or not has_rests or not self.args.should_save:
            super()._save(output_dir, state_dict)
            return
        super()._save(output_dir, self.stepper.fp32_state_dict())
        config = getattr(self.accelerator.unwrap_model(self.model), "config", None)
        folder = Path(output_dir or self.args.output_dir)
        if isinstance(config, transformers.PreTrainedConfig):
            config.dtype = "float32"  # by which from_pretrained would round them
            if (folder / "config.json").is_file():
                config.save_pretrained(folder)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(self._place(output_dir))

    def _save_scaler(self, output_dir: str) -> None:
        super()._save_scaler(self._place(output_dir))

    def _save_rng_state(self, output_dir: str) -> None:
        """The last that every rank writes; with it the Stepper's state."""
        folder = self._place(output_dir)
        super()._save_rng_state(folder)
        torch.save(self.stepper.state_dict(), self._state_file(folder))
        self.accelerator.wait_for_everyone()

    def _state_file(self, folder: str) -> Path:
        rank = f"_{self.args.process_index}" if self.args.world_size > 1 else ""
        return Path(folder) / f"halfstep{rank}.pt"

    def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self._keep_fp32()  # before it is loaded, so that nothing is rounded
        super()._load_from_checkpoint(*args, **kwargs)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            _ = self.stepper  # built now, so that it keeps the formats of the states that are loaded
        super()._load_optimizer_and_scheduler(checkpoint)

    def _load_scaler(self, checkpoint: str | None) -> None:
        """The last that is loaded, when there is a Stepper."""
        if checkpoint is None:
            return
        holds_exact = not (self.is_fsdp_enabled or self.is_deepspeed_enabled)
        if not (file := self._state_file(checkpoint)).is_file() and holds_exact:
            # Of another number of ranks: replicas hold the same.
            others = (Path(checkpoint) / name for name in ("halfstep.pt", "halfstep_0.pt"))
            file = next((other for other in others if other.is_file()), file)
        if not file.is_file():
            what, scale = "its counters start afresh", self.stepper.scale
            plain = Path(checkpoint) / transformers.trainer.SCALER_NAME  # of a Trainer without halfstep, in fp16
            its = torch.load(plain, map_location="cpu", weights_only=True) if plain.is_file() else {}
            if not scale.load_from_scaler(its) and scale.kind != "none":
                what = "the loss scale starts afresh"
            warnings.warn(f"{checkpoint} holds no {file.name}, so that {what}.", stacklevel=2)
            return
        if self.stepper.masters and holds_exact:
            self._load_from_checkpoint(checkpoint)  # again, now that there are rests to take what 16 bit cannot hold
        state = torch.load(file, map_location="cpu", weights_only=True)
        scale = self.stepper.scale
        if (kind := state["scale"]["kind"]) != scale.kind:  # of another policy
            if scale.kind != "none":
                warnings.warn(
                    f"{file} has a loss scale of kind {kind}, and the policy one of kind {scale.kind}, so that it "
                    "starts afresh.",
                    stacklevel=2,
                )
            state["scale"] = scale.state_dict()
        if holds_exact and state["masters"]["layout"] != self.stepper.policy.master:
            # The weights that were loaded are the exact ones, and not the 16-bit ones that saved rests belong to.
            state["masters"] = {**self.stepper.masters.state_dict(), "num_steps": state["masters"]["num_steps"]}
        self.stepper.load_state_dict(state)
        self.stepper.drop()  # the Trainer goes on at the beginning of a window


class _State:
    """What the mixin keeps, in one place, so that a trainer's own attributes are all that a replay has to restore.

    requested: the policy in words. settings: of each Stepper. exact: adapters before somebody rounded them. kept: the
    model whose formats were settled last. prepared: the inputs of the micro-batch that is running.
    """

    def __init__(self, policy: str | Policy | None) -> None:
        self.policy = policy
        self.requested: str | Policy = "auto"
        self.settings: dict[str, Any] = {}
        self.intervals = Intervals()
        self.exact: Mapping[torch.Tensor, torch.Tensor] = {}
        self.kept: weakref.ref[nn.Module] | None = None
        self.prepared: tuple[Any] | None = None
        self.staging: Staging | None = None
