"""Which parameters of a model are gathered together, and in which format."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from halfstep.distributed.blocks import block_around
from halfstep.formats import SIXTEEN_BIT
from halfstep.policy import Policy
from halfstep.weights import formats_of

MOST_FP32 = 1 / 8
"""Share of a block's weights up to which those in fp32 are gathered once for the whole model, beside the norms.

Above it all of the block is gathered in fp32, and autocast rounds what it would round on one device: up to twice the
bytes, where the other way would keep that share of the model gathered through the pass.
"""

PRODUCTS = (nn.Linear, _ConvNd, nn.MultiheadAttention)
"""Modules that hand their weights to operations that autocast runs in 16 bit, so that it is all one who rounds them."""


@dataclass(frozen=True)
class Bundle:
    """Parameters that one collective gathers, in one format, when the first of ``modules`` runs."""

    format: str
    modules: list[nn.Module]
    parameters: set[nn.Parameter]
    is_block: bool

    def tables(self) -> list[nn.Embedding]:
        """The embeddings whose fp32 table is gathered in 16 bit."""
        parts = (part for module in self.modules for part in module.modules())
        tables = {part: part.weight for part in parts if isinstance(part, nn.Embedding)}
        is_low = self.format in SIXTEEN_BIT
        return [e for e, w in tables.items() if is_low and w in self.parameters and w.dtype == torch.float32]


def bundles_of(model: nn.Module, policy: Policy, blocks: dict[str, nn.Module]) -> list[Bundle]:
    """What is gathered together, block by block, and beside them the 16-bit weights outside the blocks.

    The rest is the model's own group, gathered in fp32 for the whole pass: vectors and whatever else stays fp32 in a
    16-bit block, weights that two blocks share, and weights of the outermost module itself.
    """
    places: defaultdict[nn.Parameter, list[tuple[str, nn.Module]]] = defaultdict(list)
    for path, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                places[parameter].append((block_around(path, blocks), module))
    held: defaultdict[str, list[nn.Parameter]] = defaultdict(list)
    for parameter, owners in places.items():
        if len({block for block, _ in owners}) == 1 and all(module is not model for _, module in owners):
            held[owners[0][0]].append(parameter)
    formats, unsure = _formats(model, policy)
    bundles = []
    for path, block in blocks.items():
        format, own = _of_block(held[path], formats, unsure)
        if own:
            bundles.append(Bundle(format, [block], set(own), is_block=True))
    for format in sorted(SIXTEEN_BIT):
        own = [p for p in held[""] if formats[p] == format and p not in unsure]
        if own:
            modules = dict.fromkeys(module for p in own for _, module in places[p])
            bundles.append(Bundle(format, list(modules), set(own), is_block=False))
    return bundles


def _formats(model: nn.Module, policy: Policy) -> tuple[dict[torch.Tensor, str], set[torch.Tensor]]:
    """The format that each parameter is gathered in, fp32 or one of 16 bit; and those that autocast may not cast.

    As master weights are held, but for tables that are looked up: autocast leaves them in fp32, and the gradient of one
    in 16 bit is summed up in 16 bit on a CPU, where it stops growing. A rule that asks for 16 bit is followed.
    """
    formats = {p: format if format in SIXTEEN_BIT else "fp32" for p, format in formats_of(model, policy).items()}
    unsure: set[torch.Tensor] = set()
    for path, module in model.named_modules():
        if policy.rule_of(path) in SIXTEEN_BIT or isinstance(module, PRODUCTS):
            continue
        for parameter in module._parameters.values():
            if parameter is not None and formats[parameter] in SIXTEEN_BIT:
                if isinstance(module, nn.Embedding):
                    formats[parameter] = "fp32"
                else:
                    unsure.add(parameter)
    # What is fp64 stays so, as under autocast.
    return {p: "fp32" if p.dtype == torch.float64 else format for p, format in formats.items()}, unsure


def _of_block(
    parameters: list[nn.Parameter], formats: dict[torch.Tensor, str], unsure: set[torch.Tensor]
) -> tuple[str, list[nn.Parameter]]:
    """The format that a block is gathered in, and what of it.

    Weights that autocast may not cast are gathered in fp32 while they are few. If not, they are what the block is for.
    """
    weights = [p for p in parameters if p.dim() > 1]
    most = MOST_FP32 * sum(p.numel() for p in weights)
    low = {formats[p] for p in weights} & SIXTEEN_BIT
    num_fp32 = sum(p.numel() for p in weights if formats[p] == "fp32")
    if len(low) != 1 or num_fp32 > most:
        return "fp32", parameters
    num_unsure = sum(p.numel() for p in weights if p in unsure and formats[p] != "fp32")
    are_few = num_fp32 + num_unsure <= most
    return low.pop(), [p for p in weights if formats[p] != "fp32" and not (are_few and p in unsure)]
