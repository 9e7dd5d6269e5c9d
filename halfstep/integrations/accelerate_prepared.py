"""What an Accelerator has prepared: models that open regions, and a Stepper for each optimizer that trains them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import accelerate
import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from halfstep.errors import HalfstepError
from halfstep.events import RunInfo
from halfstep.hardware import detect
from halfstep.integrations.accelerate_optimizer import Optimizer
from halfstep.integrations.accelerate_request import (
    check_handlers,
    check_model,
    check_promotion,
    check_state,
    info_without_replay,
    requested_policy,
)
from halfstep.integrations.accelerate_shards import own_sharding, use_shards
from halfstep.integrations.accelerate_state import LoopState
from halfstep.integrations.accelerate_zero import (
    EngineOptimizer,
    EngineStepper,
    info_of_engine,
    own_optimizers,
    refuse,
    write_policy,
)
from halfstep.integrations.regions import OpenRegions
from halfstep.integrations.skipping import without_replay
from halfstep.policy import Policy
from halfstep.ranks.contract import DEFAULT, Contract
from halfstep.region import Region, device_of
from halfstep.stepper import Event, Stepper
from halfstep.watch.settings import Watch


class PreparingAccelerator(accelerate.Accelerator):
    """The half of :class:`halfstep.integrations.accelerate.Accelerator` that prepares, saves and frees."""

    def __init__(
        self,
        *args: Any,
        policy: str | Policy | None = None,
        opens_regions: bool = True,
        keep_casts: bool = False,
        log: str | os.PathLike[str] | None = None,
        watch: Watch | str | os.PathLike[str] | bool = True,
        sinks: Sequence[Callable[[Event], None]] = (),
        contract: Contract = DEFAULT,
        mixed_precision: str | None = None,
        **kwargs: Any,
    ) -> None:
        self._policy = Policy.parse(requested_policy(policy, mixed_precision))
        check_handlers(kwargs.get("kwargs_handlers") or ())
        check_state()
        # Not None, which would ask the environment that a launcher has set.
        super().__init__(*args, **kwargs, mixed_precision="no")
        use_shards(self.state, kwargs.get("fsdp_plugin"))
        self._opens_regions = opens_regions
        if self._has_engine:
            if keep_casts:
                refuse("keep_casts=True", "its engine may move the weights between two micro-batches")
            write_policy(self.deepspeed_plugin, self._without_replay(self.device))
        self._settings: dict[str, Any] = {
            "keep_casts": keep_casts,
            "watch": watch,
            "sinks": sinks,
            "contract": contract,
        }
        self._log = log
        self._custom_objects.append(LoopState(self))
        self._held: list[torch.Tensor] | None = None
        self._forget()

    def _forget(self) -> None:
        self._prepared: list[nn.Module] = []
        self._regions: dict[nn.Module, OpenRegions] = {}
        self._trained: tuple[nn.Module, ...] = ()
        self._steppers: dict[Any, Any] = {}  # of an EngineStepper too
        self._evaluation: Region | None = None
        self._is_open = False
        self.num_in_window = 0
        self.begins = True

    # What is prepared.

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        for each in args:
            if isinstance(each, nn.Module) and each not in self._regions:
                check_model(each)
        own = own_optimizers() if self._has_engine else own_sharding(self._policy) if self.is_fsdp2 else nullcontext()
        with own:
            prepared = super().prepare(*args, **kwargs)
        results = prepared if isinstance(prepared, list | tuple) else [prepared]
        for each in results:
            if isinstance(each, nn.Module):
                self._adopt(each)
            if isinstance(each, EngineOptimizer):
                self._drive(each)
        if self.num_processes > 1:
            self._build()  # all ranks compare what they hold, here and not where one of them looks first
        return prepared

    @property
    def _has_engine(self) -> bool:
        return bool(self.distributed_type == DistributedType.DEEPSPEED)

    def _drive(self, optimizer: EngineOptimizer) -> None:
        """A stepper for DeepSpeed's engine, which accumulates, clips and steps by itself."""
        settings = {name: value for name, value in self._settings.items() if name != "keep_casts"}
        optimizer.stepper = stepper = EngineStepper(self.deepspeed_engine_wrapped.engine, log=self._log, **settings)
        stepper.region.info = info_of_engine(stepper.region.info, self._policy)
        self._steppers[optimizer] = stepper

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        prepared: nn.Module = super().prepare_model(model, device_placement, evaluation_mode)
        self._adopt(prepared)
        return prepared

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None) -> Any:
        if not isinstance(optimizer, AcceleratedOptimizer):
            placement = self.device_placement if device_placement is None else device_placement
            optimizer = Optimizer(optimizer, placement, self)
        elif not isinstance(optimizer, Optimizer):
            raise HalfstepError(
                "prepare() of an optimizer that another Accelerator has prepared",
                "its step() is that of the other one",
                "Pass optimizer.optimizer, the one inside.",
            )
        optimizer.accelerator = self
        if optimizer not in self._optimizers:
            self._optimizers.append(optimizer)
        return optimizer

    def _adopt(self, model: nn.Module) -> None:
        """A model that was prepared, as it is to be called, and what a wrapper for ranks has inside."""
        if model not in self._prepared:
            self._prepared.append(model)
        if not self._opens_regions or model in self._regions:
            return
        self._regions[model] = OpenRegions(model, self._region)
        if isinstance(model, DistributedDataParallel):
            self._regions[model.module] = OpenRegions(model.module, self._region)

    def _build(self) -> None:
        """A Stepper for each optimizer that has none, over the models that the optimizers train."""
        waiting = [optimizer for optimizer in self._optimizers if optimizer not in self._steppers]
        if not waiting:
            return
        wanted = {id(p) for optimizer in self._optimizers for group in optimizer.param_groups for p in group["params"]}
        trained = tuple(m for m in self._prepared if any(id(p) in wanted for p in m.parameters()))
        if not trained:
            return
        if self._steppers and trained != self._trained:
            raise HalfstepError(
                "prepare() of another model to train, where a Stepper is at work",
                "module rules and running statistics belong to the models that were there when it was built",
                "Pass all models and optimizers to one prepare(), or call free_memory() between two trainings.",
            )
        self._trained = trained
        model = trained[0] if len(trained) == 1 else nn.ModuleList(trained)
        policy = self._without_replay(device_of(model)) if self._opens_regions else self._policy  # closures, else
        is_first = not self._steppers
        for optimizer in waiting:
            beside = next(iter(self._steppers.values()), None)
            self._steppers[optimizer] = Stepper(
                model,
                optimizer.optimizer,
                policy,
                accumulate=None,
                beside=beside,
                log=None if beside else self._log,
                **self._settings,
            )
        if is_first:
            region = self.stepper.region
            region.info = info_without_replay(region.info, self._policy)

    def _without_replay(self, device: torch.device) -> Policy:
        check_promotion(self._policy)
        return without_replay(self._policy, detect(str(device)), self.num_processes == 1)

    @property
    def steppers(self) -> list[Stepper]:
        """One for each prepared optimizer, in their order. All share the policy and the loss scale of the first."""
        self._build()
        return list(self._steppers.values())

    @property
    def stepper(self) -> Stepper:
        """The Stepper of the first optimizer. Under DeepSpeed it is a DeepSpeedStepper."""
        self._build()
        if not self._steppers:
            raise HalfstepError(
                "an Accelerator without a model and an optimizer",
                "a Stepper belongs to both",
                "Call accelerator.prepare(model, optimizer) first.",
            )
        first: Stepper = next(iter(self._steppers.values()))
        return first

    def stepper_of(self, optimizer: Optimizer) -> Stepper:
        """The Stepper of a prepared optimizer."""
        self._build()
        if optimizer not in self._steppers:
            raise HalfstepError(
                "an optimizer without a model",
                "none of the prepared models has its parameters",
                "Call accelerator.prepare(model, optimizer) with both.",
            )
        stepper: Stepper = self._steppers[optimizer]
        return stepper

    @property
    def info(self) -> RunInfo:
        """The policy asked for, the one in effect, why they differ, and the device."""
        return self._formats().info

    def _formats(self) -> Region:
        """The region of the Steppers; one of its own while nothing is trained."""
        self._build()
        if self._steppers:
            return self.stepper.region
        if self._evaluation is None:
            if not self._prepared:
                raise HalfstepError(
                    "an Accelerator without a model",
                    "a policy takes effect on a device, which is the model's",
                    "Call accelerator.prepare(model, optimizer) first.",
                )
            self._evaluation = Region(self._prepared[0], self._policy)
        return self._evaluation

    def _region(self) -> AbstractContextManager[Any]:
        """The region of a call that begins now."""
        raise NotImplementedError

    # State.

    def save_state(self, *args: Any, **kwargs: Any) -> Any:
        """As Accelerate's, with the state of the Steppers."""
        with self._plain_optimizers():
            return super().save_state(*args, **kwargs)

    def load_state(self, *args: Any, **kwargs: Any) -> None:
        """As Accelerate's; the Steppers go on where they were, in the middle of a window too."""
        with self._plain_optimizers():
            super().load_state(*args, **kwargs)

    @contextmanager
    def _plain_optimizers(self) -> Iterator[None]:
        self._build()
        with ExitStack() as stack:
            for optimizer in self._optimizers:
                if isinstance(optimizer, Optimizer):
                    stack.enter_context(optimizer.plain())
            yield

    def unwrap_model(self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True) -> Any:
        """As Accelerate's: with ``keep_fp32_wrapper=False`` a model that opens no region, and can be pickled."""
        inner = super().unwrap_model(model, keep_fp32_wrapper, keep_torch_compile)
        if not keep_fp32_wrapper and (regions := self._regions.pop(inner, None)):
            regions.remove()
        return inner

    def free_memory(self, *objects: Any) -> Any:
        """As Accelerate's. The models are as they were before, and the logs are complete."""
        for regions in self._regions.values():
            regions.remove()
        for stepper in self._steppers.values():
            stepper.close()
        self._forget()
        return super().free_memory(*objects)
