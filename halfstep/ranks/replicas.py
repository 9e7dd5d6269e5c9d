"""Ranks that each hold the whole model: DistributedDataParallel."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from halfstep.dtypes import LOW_DTYPES
from halfstep.errors import HalfstepError
from halfstep.policy import Policy
from halfstep.ranks.group import Group
from halfstep.ranks.one import Copies


class Replicas(Group):
    """A model under DDP, whose backward averages gradients while it runs, in the last micro-batch of a window.

    Earlier ones stay local. DDP's buckets have the format that the weights had when it was built, so that 16-bit
    weights of a layout, whose gradients are summed in fp32, are brought together at the window's end instead.
    """

    def __init__(self, model: nn.Module, wrapped: Sequence[DistributedDataParallel]) -> None:
        if len({id(each.process_group) for each in wrapped}) > 1:
            raise HalfstepError(
                "a model with DistributedDataParallel over different process groups",
                "its ranks would have to agree on one verdict in each of them",
                "Give every DistributedDataParallel of the model the same process_group.",
            )
        super().__init__(model, wrapped[0].process_group)
        if model is wrapped[0]:
            self.module = wrapped[0].module
        self._wrapped = tuple(wrapped)
        self._overlaps = True
        self._talks_in_forward = any(isinstance(module, nn.SyncBatchNorm) for module in model.modules())
        self._is_local = False
        self._num_calls = 0.0

    def check(self, policy: Policy) -> None:
        self._overlaps = policy.master == "fp32"

    def begin(self, is_last: bool) -> None:
        for wrapped in self._wrapped:
            if wrapped._join_config.enable:
                raise HalfstepError(
                    "a step inside DistributedDataParallel.join()",
                    "a rank without data cannot take part in the verdict, which is a collective of every step",
                    "Give every rank as many micro-batches; one without data returns (0 * model(x).sum(), 0), which "
                    "weighs nothing.",
                )
            # Buffers are sent in the forward pass of the last micro-batch, so that the others are this rank's alone.
            wrapped.require_backward_grad_sync = wrapped.require_forward_param_sync = is_last and self._overlaps
        self._is_local = not (is_last and self._overlaps)
        self._num_calls = _num_calls() - self.num_own

    def is_alone(self, is_last: bool) -> bool:
        return not self._talks_in_forward and not (is_last and self._overlaps)

    def sums_travel(self, is_last: bool) -> bool:
        return is_last and self._overlaps

    @property
    def has_talked(self) -> bool:
        return math.isnan(self._num_calls) or _num_calls() - self.num_own != self._num_calls

    @property
    def is_pending(self) -> bool:
        return self._is_local

    @torch.no_grad()
    def bring_together(self, parameters: Sequence[torch.Tensor]) -> None:
        self._is_local = False
        for wrapped in self._wrapped:
            if wrapped.broadcast_buffers and wrapped.modules_buffers:
                wrapped._sync_buffers()
        has = torch.tensor([float(p.grad is not None) for p in parameters], device=self.device)
        used = [p for p, is_used in zip(parameters, self.highest(has).tolist(), strict=True) if is_used]
        if not used:
            return
        # As one tensor in fp32, whatever the weights are in. A rank that had no use for a parameter adds nothing.
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1).float() for p in used])
        self._all_reduce(flat, distributed.ReduceOp.SUM).div_(self.num)
        for parameter, mean in zip(used, flat.split([p.numel() for p in used]), strict=True):
            is_narrow = parameter.dtype in LOW_DTYPES
            parameter.grad = mean.view_as(parameter) if is_narrow else mean.view_as(parameter).to(parameter.dtype)

    def quietly(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            saved = [(each, each.require_backward_grad_sync, each.require_forward_param_sync) for each in self._wrapped]
            for each in self._wrapped:
                each.require_backward_grad_sync = each.require_forward_param_sync = False
            try:
                return closure()
            finally:
                for each, backward, forward in saved:
                    each.require_backward_grad_sync, each.require_forward_param_sync = backward, forward

        return run

    def copies(self) -> Sequence[Copies]:
        ignored = {
            parameter
            for each in self._wrapped
            for name, parameter in each.module.named_parameters()
            if name in each.parameters_to_ignore
        }
        named = {name: parameter for name, parameter in self.module.named_parameters() if parameter not in ignored}
        return [Copies(0, 1, named)]

    def describe(self) -> Mapping[str, Any]:
        return {"engine": "DistributedDataParallel", "reduction": "fp32"}


def _num_calls() -> float:
    """How many collectives this process has begun, in all groups; NaN where a backend does not count them."""
    groups: Iterable[Any] = distributed.distributed_c10d._world.pg_map
    try:
        return float(sum(group._get_sequence_number_for_group() for group in groups))
    except RuntimeError:
        return math.nan
