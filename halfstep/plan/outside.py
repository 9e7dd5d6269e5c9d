"""What a training process holds on its card besides the tensors of the step: workspaces of libraries, CUDA's context.

Two kinds, which must not be added up twice. A workspace of cuBLAS is a block of torch's caching allocator: it is part
of what the allocator reserves, and goes into :func:`halfstep.plan.allocator.simulate` as ``before``. The context is not
the allocator's: it comes on top, and leaves less of the card to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version

from halfstep.errors import HalfstepError
from halfstep.hardware import find_card
from halfstep.plan.policy_plan import Outside
from halfstep.plan.step_trace import BACKWARD, StepTrace
from halfstep.plan.target import Target

MIB = 1 << 20
PRODUCTS = frozenset(
    f"aten.{name}" for name in ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "vdot", "_addmm_activation")
)
"""Operations that torch gives to cuBLAS."""
WITH_BIAS = frozenset({"aten.addmm", "aten._addmm_activation"})
"""Those of them that go through cublasLt, which adds the bias."""

WORKSPACE = 2 * 4096 * 1024 + 8 * 16 * 1024
LARGE_WORKSPACE = 32 * MIB
LT_WORKSPACE = 1 * MIB

CONTEXTS = {
    "T4": (135 * MIB, "measured on a T4 with torch 2.11 by the torch-preflight project, with cuBLAS and cuDNN loaded"),
    "RTX 6000 Ada": (426 * MIB, "measured on an RTX 6000 Ada with torch 2.10 in unslothai/unsloth-zoo#1053"),
}
"""Bytes of a CUDA context that somebody measured, and who."""


def workspaces_of(target: Target, trace: StepTrace) -> tuple[Outside, ...]:
    """The blocks that cuBLAS takes from torch's allocator for the products of ``trace``, and keeps.

    From ``aten/src/ATen/cuda/CublasHandlePool.cpp``, with no CUBLAS_WORKSPACE_CONFIG or CUBLASLT_WORKSPACE_SIZE set: a
    workspace for each handle and stream, and each thread that computes has a handle. A backward pass on CUDA runs in a
    thread of its own. torch 2.11 has one more for cublasLt, from 2.12 on both share theirs.

    None for a CPU, and none where the compute capability is not known, which :func:`not_counted` says.
    """
    if not target.is_cuda or target.capability is None:
        return ()
    release = _torch_release()
    nbytes = _workspace_nbytes(target.capability, release)
    found = []
    for thread, is_backward in (("the forward pass", False), ("the backward pass", True)):
        ops = {_name(storage.op) for storage in trace.storages if (storage.phase == BACKWARD) == is_backward}
        how = f"stated by the source of torch {release[0]}.{release[1]} for capability {_dotted(target.capability)}"
        if ops & PRODUCTS:
            found.append(Outside(f"cuBLAS workspace of {thread}", nbytes, how))
        if ops & WITH_BIAS and release < (2, 12):
            found.append(Outside(f"cublasLt workspace of {thread}", LT_WORKSPACE, how))
    return tuple(found)


def outside_of(target: Target, measured: Mapping[str, int] | None = None) -> tuple[Outside, ...]:
    """What the card holds besides all that torch's allocator reserves: the CUDA context.

    measured: bytes by the name of a card, as torch reports it or as the catalogue has it. For a card that nobody
              measured the largest context that is known is assumed; for one that is not NVIDIA's nothing is known. A
              CPU has none.
    """
    if not target.is_cuda:
        return ()
    for name, nbytes in (measured or {}).items():
        if _is_card(name, target):
            return (Outside("CUDA context", nbytes, f"measured on {name}"),)
    if target.capability is None:
        return ()
    nbytes, source = CONTEXTS.get(target.name) or max(CONTEXTS.values())
    if target.name in CONTEXTS:
        how = f"assumed: {source}"
    else:
        card = f"no figure for the {target.name}" if target.is_named else "no card was named"
        how = f"assumed: {card}, so the largest that is known; {source}"
    return (Outside("CUDA context", nbytes, how),)


def not_counted(target: Target, trace: StepTrace) -> tuple[str, ...]:
    """Sentences about memory of the card that neither figure holds, since nothing says how much it is."""
    if not target.is_cuda:
        return ()
    ops = {_name(storage.op) for storage in trace.storages}
    notes = ["Not counted: code of kernels, which the driver loads beside the context at the first call of each."]
    if target.capability is None:
        notes.append(f"Not counted: the context of the {target.name} and workspaces for its matrix products.")
    if any("convolution" in op for op in ops):
        notes.append(
            "Not counted: workspaces of cuDNN, taken from the allocator while a convolution runs; cuDNN chooses the "
            "algorithm on the card, and with it the size."
        )
    return tuple(notes)


def _workspace_nbytes(capability: tuple[int, int], release: tuple[int, int]) -> int:
    """32 MiB for Hopper, from torch 2.12 on for Blackwell as well; else 2 x 4096 KiB and 8 x 16 KiB."""
    is_large = capability == (9, 0) if release < (2, 12) else capability[0] in (9, 10, 12)
    return LARGE_WORKSPACE if is_large else WORKSPACE


def _torch_release() -> tuple[int, int]:
    major, minor = version("torch").split(".")[:2]  # of the installed one, which need not be imported for it
    return int(major), int(minor)


def _name(op: str | None) -> str:
    """``aten.mm`` of ``aten.mm.default``."""
    return (op or "").rpartition(".")[0]


def _is_card(name: str, target: Target) -> bool:
    if name == target.name:
        return True
    try:
        card = find_card(name)
    except HalfstepError:  # the name fits several cards
        return False
    return card is not None and card == target.card


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
