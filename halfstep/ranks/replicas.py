"""Ranks that each hold the whole model: DistributedDataParallel."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from halfstep.dtypes import LOW_DTYPES
from halfstep.errors import HalfstepError
from halfstep.gradients import Gradients
from halfstep.policy import Policy
from halfstep.ranks.group import Group
from halfstep.ranks.one import Copies, Total
from halfstep.ranks.progress import num_calls
from halfstep.ranks.wire import BUCKET_NUMEL, MEANS, Bf16Hook, Lane


class Replicas(Group):
    """A model under DDP, whose backward averages gradients while it runs, in the last micro-batch of a window.

    Earlier ones stay local. DDP's buckets have the format that the weights had when it was built, so that 16-bit
    weights of a layout, whose gradients are summed in fp32, are brought together at the window's end instead.

    wire: format that gradients travel in; ``unknown`` where a communication hook that is not ours sends them.
    """

    def __init__(self, model: nn.Module, wrapped: Sequence[DistributedDataParallel]) -> None:
        if len({id(each.process_group) for each in wrapped}) > 1:
            raise HalfstepError(
                "a model with DistributedDataParallel over different process groups",
                "its ranks would have to agree on one verdict in each of them",
                "Give every DistributedDataParallel of the model the same process_group.",
            )
        super().__init__(model, wrapped[0].process_group)
        if getattr(model, "_orig_mod", model) is wrapped[0]:  # torch.compile wraps too
            self.module = wrapped[0].module
        _check_parameters(self.module, wrapped)
        wires = {_wire_of(each) for each in wrapped}
        self.wire = wires.pop() if len(wires) == 1 else "unknown"
        is_static = any(each.static_graph for each in wrapped)
        self._wrapped = tuple(wrapped)
        self._overlaps = True
        self._talks_in_forward = any(isinstance(module, nn.SyncBatchNorm) for module in model.modules())
        self._is_local = self._is_synchronised = False
        self._sends_buffers = any(each.broadcast_buffers and each.modules_buffers for each in wrapped)
        self._num_calls = 0.0
        first = next((p for p in self.module.parameters() if p.requires_grad), None)
        if first is not None:
            # Its gradient is the last of backward, before DDP waits for those of the others.
            stop = partial(_stop, weakref.ref(self))
            weakref.finalize(self, first.register_post_accumulate_grad_hook(stop).remove)
        # DDP learns a static graph in its first backward pass, which aborts the process if it is not synchronised.
        self._has_to_learn, self._learns = is_static, False

    def check(self, policy: Policy) -> None:
        self._overlaps = policy.master == "fp32"
        if not self._overlaps:
            _check_late(self.wire, any(each.static_graph for each in self._wrapped))

    def begin(self, is_last: bool) -> None:
        for wrapped in self._wrapped:
            if wrapped._join_config.enable:
                raise HalfstepError(
                    "a step inside DistributedDataParallel.join()",
                    "a rank without data cannot take part in the verdict, which is a collective of every step",
                    "Give every rank as many micro-batches; one without data returns (0 * model(x).sum(), 0), which "
                    "weighs nothing.",
                )
        self._learns, self._has_to_learn = self._has_to_learn and not is_last, False
        self._is_synchronised = self._learns or (is_last and self._overlaps)
        self._is_local = not (is_last and self._overlaps)
        for wrapped in self._wrapped:
            # Buffers are sent in the forward pass of the last micro-batch, so that the others are this rank's alone.
            wrapped.require_backward_grad_sync = wrapped.require_forward_param_sync = self._is_synchronised
        self._num_calls = num_calls() - self.num_own
        if self._is_synchronised and self._sends_buffers:
            self._pace.clock.stop()

    def is_alone(self, is_last: bool) -> bool:
        return not self._talks_in_forward and not self._learns and not (is_last and self._overlaps)

    def sums_travel(self, is_last: bool) -> bool:
        return is_last and self._overlaps

    @property
    def has_talked(self) -> bool:
        return math.isnan(self._num_calls) or num_calls() - self.num_own != self._num_calls

    @property
    def is_pending(self) -> bool:
        return self._is_local

    @torch.no_grad()
    def bring_together(self, parameters: Sequence[torch.Tensor]) -> None:
        self._is_local = self._is_synchronised = False
        for wrapped in self._wrapped:
            if wrapped.broadcast_buffers and wrapped.modules_buffers:
                wrapped._sync_buffers()
        kinds = torch.tensor([_kind(p.grad) for p in parameters], device=self.device)
        known = self.highest(kinds).tolist()
        if SPARSE in known:
            raise HalfstepError(
                "a sparse gradient that is brought together at a window's end",
                "ranks hold different rows of it",
                "Use sparse=False, fp32 weights, and windows that are as long on every rank.",
            )
        mean_of = MEANS["bf16" if self.wire == "bf16" else "fp32"]
        lane = Lane()
        for bucket in self._buckets(p for p, kind in zip(parameters, known, strict=True) if kind):
            lane.push(mean_of(bucket, self.group))
        lane.drain()

    def _buckets(self, parameters: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
        """Their gradients, a bounded number of elements at a time, and in formats that are the same on every rank."""
        bucket: list[torch.Tensor] = []
        num = 0
        for parameter in parameters:
            # A mean of 16-bit numbers is rounded only where the wire has done that already.
            is_wider = parameter.dtype in LOW_DTYPES and (self.wire, parameter.dtype) != ("bf16", torch.bfloat16)
            # A rank that had no use for a parameter adds nothing.
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            gradient = gradient.to(torch.float32 if is_wider else parameter.dtype)
            pieces: Sequence[torch.Tensor] = [gradient]
            if parameter.numel() > BUCKET_NUMEL and parameter.is_contiguous():
                gradient = gradient.contiguous()
                pieces = gradient.view(-1).split(BUCKET_NUMEL)
            parameter.grad = gradient
            for piece in pieces:
                bucket.append(piece)
                num += piece.numel()
                if num >= BUCKET_NUMEL:
                    yield bucket
                    bucket, num = [], 0
        if num:
            yield bucket

    def total(
        self,
        gradients: Gradients,
        norms: torch.Tensor,
        norm: torch.Tensor,
        loss_sum: torch.Tensor,
        count: torch.Tensor | float,
    ) -> Total:
        if self._is_synchronised:
            self._check_synchronised()
            self._order_buckets()
        return super().total(gradients, norms, norm, loss_sum, count)

    def _order_buckets(self) -> None:
        """Let DDP bring its buckets into the order of its first backward pass, for which it asks the other ranks.

        It would do that in the next forward pass, once, and that one is a rank's own.
        """
        for wrapped in self._wrapped:
            if not wrapped._has_rebuilt_buckets:
                wrapped._has_rebuilt_buckets = wrapped.reducer._rebuild_buckets()

    def _check_synchronised(self) -> None:
        """Refuse gradients that DDP has left as they were on each rank, before ranks part or wait for each other."""
        for wrapped in self._wrapped:
            try:
                wrapped._check_reducer_finalized()
            except RuntimeError:
                raise HalfstepError(
                    "a last micro-batch that leaves out a parameter under DistributedDataParallel",
                    "DDP waits for a gradient of each before it averages any",
                    "Pass find_unused_parameters=True to halfstep.distributed.replicate or DistributedDataParallel.",
                ) from None
        if not self.has_talked:
            raise HalfstepError(
                "a model under DistributedDataParallel that ran without it",
                "nothing brought the gradients of the ranks together",
                "Call the wrapper in the closure, model(x) and not model.module(x).",
            )

    def quietly(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            if self._has_to_learn:
                raise HalfstepError(
                    "a look at a micro-batch before the first step, with static_graph=True",
                    "DDP learns the graph in its first backward pass, which has to be one of all ranks",
                    "Look after the first step, or leave static_graph out.",
                )
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
        named: dict[str, torch.Tensor] = {n: p for n, p in self.module.named_parameters() if p not in ignored}
        return [Copies(0, 1, named)]

    def describe(self) -> Mapping[str, Any]:
        return {"engine": "DistributedDataParallel", "reduction": self.wire}


SPARSE = 2.0


def _stop(ranks: weakref.ref[Replicas], parameter: torch.Tensor) -> None:
    if (own := ranks()) is not None and own._is_synchronised:
        own._pace.clock.stop()


def _kind(gradient: torch.Tensor | None) -> float:
    """A number that is higher for what other ranks have to know of."""
    return 0.0 if gradient is None else SPARSE if gradient.is_sparse else 1.0


def _wire_of(wrapped: DistributedDataParallel) -> str:
    hooks = wrapped._comm_hooks
    if not hooks and "comm_hook" not in wrapped._get_ddp_logging_data():
        return "fp32"
    return "bf16" if len(hooks) == 1 and isinstance(hooks[0][1], Bf16Hook) else "unknown"


def _check_parameters(model: nn.Module, wrapped: Sequence[DistributedDataParallel]) -> None:
    """Every trainable parameter has to be one that DDP reduces."""
    reduced = {
        parameter
        for each in wrapped
        for name, parameter in each.module.named_parameters()
        if name not in each.parameters_to_ignore
    }
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter not in reduced:
            raise HalfstepError(
                f"parameter {name} outside DistributedDataParallel",
                "nobody adds up its gradient over the ranks, so that the replicas would part",
                "Wrap the whole model, or freeze the parameter before that (requires_grad_(False)).",
            )


def _check_late(wire: str, is_static: bool) -> None:
    """Refuse what is part of DDP's own reduction, where there is none."""
    for is_so, what in ((wire == "unknown", "a communication hook"), (is_static, "static_graph=True")):
        if is_so:
            raise HalfstepError(
                f"DistributedDataParallel with {what} and master weights in 16 bit",
                "their gradients are brought together at the window's end, not in a backward pass of DDP",
                "Leave it out, or leave master out of the policy. (wire='bf16' of halfstep.distributed.replicate may "
                "stay.)",
            )
