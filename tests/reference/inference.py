"""Slow plain twin of a cast model: the region over fp32 weights that are rounded by hand."""

from __future__ import annotations

import copy

import torch
from reference.inference_nets import Output
from reference.nets import LOW

from halfstep.region import Region


def tensors(output):
    if isinstance(output, Output):
        return [output.logits, output.hidden]
    if isinstance(output, dict):
        return list(output.values())
    return list(output) if isinstance(output, tuple) else [output]


def by_region(model, x, policy, hardware):
    """What the region gives for the fp32 model, without torch's fused layers, which follow no lists."""
    region = Region(model, policy, hardware)
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with region.inference():
            return [tensor.clone() for tensor in tensors(model(x))]
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def rounded(model, report):
    """The model in fp32, with the weights that ``report`` says were cast rounded by hand."""
    twin = copy.deepcopy(model)
    named = dict(twin.named_parameters())
    with torch.no_grad():
        for name, format in report.cast.items():
            named[name].copy_(named[name].to(LOW[format]))
    return twin


def assert_same(results, expected):
    assert [t.dtype for t in results] == [t.dtype for t in expected]
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))
