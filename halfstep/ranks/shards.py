"""Ranks that each hold a shard of every parameter: fully_shard (FSDP2), whose parameters are DTensors."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from halfstep.errors import HalfstepError
from halfstep.gradients import Gradients
from halfstep.kernels import untraced
from halfstep.policy import Policy
from halfstep.ranks.gathers import check_gathers, formats_in_words
from halfstep.ranks.group import Group
from halfstep.ranks.one import Copies


class Shards(Group):
    """A model under ``fully_shard``: forward gathers weights and backward reduces gradients, in every micro-batch.

    So a rank can repeat nothing alone, and all decide on each micro-batch together. A parameter outside the shards is
    not reduced by anybody, and refused.
    """

    def __init__(self, model: nn.Module) -> None:
        meshes = {p.device_mesh for p in model.parameters() if isinstance(p, DTensor)}
        largest = max(meshes, key=DeviceMesh.size)
        super().__init__(model, group_of(largest))
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and not isinstance(parameter, DTensor):
                raise HalfstepError(
                    f"parameter {name} outside the shards of fully_shard",
                    "nobody adds up its gradient over the ranks, so that the replicas would part",
                    "Call fully_shard(model) on the outermost module last, without ignored_params.",
                )
        # Frozen ones too, since they may be trained later.
        parameters = [p for p in model.parameters() if isinstance(p, DTensor)]
        self._places = {id(p): place for place, p in enumerate(parameters)}
        self._indices: dict[tuple[int, ...], torch.Tensor] = {}
        self._copies = torch.tensor(
            [float(self.num) / _num_shards(p) for p in parameters], dtype=torch.float64, device=self.device
        )
        sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
        weakref.finalize(self, model.register_forward_hook(partial(_reshard_after_evaluation, sharded)).remove)

    def check(self, policy: Policy) -> None:
        if policy.master != "fp32":
            raise HalfstepError(
                f"master={policy.master} for weights that are shards",
                "fully_shard keeps the fp32 weights as shards already, and computes with 16-bit copies of them",
                "Leave master out of the policy, and build the shards by halfstep.distributed.shard(model, policy).",
            )
        check_gathers(self.module, policy, warns=self.rank == 0)

    def begin(self, is_last: bool) -> None:
        self._pace.clock.stop()  # forward waits for the others in its first layer

    def is_alone(self, is_last: bool) -> bool:
        return False

    @property
    def looks_alone(self) -> bool:
        return False

    def _part(self, gradients: Gradients, norms: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
        # Squares, of all parameters, so that they are as many on every rank. What several ranks hold is counted once.
        squares = torch.zeros_like(self._copies)
        squares[self._index(gradients)] = norms.double().square()
        return squares / self._copies

    def _norms(
        self, gradients: Gradients, norms: torch.Tensor, parts: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return parts[self._index(gradients)].sqrt().float(), parts.sum().sqrt().float()

    def _index(self, gradients: Gradients) -> torch.Tensor:
        """The places of these gradients, which come in the optimizer's order; on the device, once."""
        places = tuple(self._places[id(parameter)] for parameter in gradients)
        if places not in self._indices:
            self._indices[places] = torch.tensor(places, device=self.device)
        return self._indices[places]

    def copies(self) -> Sequence[Copies]:
        # Those that are cut along the same dimensions of the mesh have the same places.
        alike: dict[tuple[bool, ...], Copies] = {}
        for name, parameter in self.module.named_parameters():
            if isinstance(parameter, DTensor) and parameter.device_mesh.size() == self.num:
                kind = tuple(placement.is_replicate() for placement in parameter.placements)
                if any(kind):
                    copies = alike.setdefault(kind, Copies(_place_of(parameter), _num_shards(parameter), {}))
                    copies.parameters[name] = parameter
        return list(alike.values())

    def describe(self) -> Mapping[str, Any]:
        return {"engine": "fully_shard", **formats_in_words(self.module)}


@untraced
def _reshard_after_evaluation(sharded: Sequence[FSDPModule], *_: Any) -> None:
    """Where no backward pass follows that would do it, let the outer groups' weights go, and the shards be parameters.

    Else ``named_parameters()`` names gathered copies after an evaluation, which the optimizer does not know.
    """
    if not torch.is_grad_enabled():
        for module in sharded:
            module.reshard()


def group_of(mesh: DeviceMesh) -> distributed.ProcessGroup:
    """All ranks of a mesh, over its dimensions."""
    if mesh.size() == distributed.get_world_size():
        return distributed.distributed_c10d._get_default_group()
    if mesh.ndim == 1:
        return mesh.get_group()
    return mesh._flatten().get_group()


def _num_shards(parameter: torch.Tensor) -> int:
    """Into how many different parts it is cut."""
    assert isinstance(parameter, DTensor)
    mesh, num = parameter.device_mesh, 1
    for dimension, placement in enumerate(parameter.placements):
        num *= 1 if placement.is_replicate() else mesh.size(dimension)
    return num


def _place_of(parameter: torch.Tensor) -> int:
    """Which of these parts is here."""
    assert isinstance(parameter, DTensor)
    mesh, place = parameter.device_mesh, 0
    for dimension, placement in enumerate(parameter.placements):
        if not placement.is_replicate():
            place = place * mesh.size(dimension) + mesh.get_local_rank(dimension)
    return place
