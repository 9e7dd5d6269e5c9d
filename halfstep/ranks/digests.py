"""Digests: numbers by which ranks compare what they hold, in one small collective.

A text is hashed, and a tensor is summed: its bits as 64-bit integers, modulo 2^64, every bit of it in one pass. So a
single flipped bit always changes the sum, by a power of two, and any other difference goes unseen once in 2^64; what
only changes the order of the words does too. Two digests are equal on all ranks if their largest is their smallest, and
the smallest is minus the largest of the negatives, so that one MAX answers for all of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch

from halfstep.ranks.one import Ranks

_LOW_HALF = 0xFFFFFFFF
_ABSENT = -(1 << 40)
"""Below every half of a digest, and so is it in the negatives: a rank that has no say does not change a maximum."""


def digest_of(texts: Mapping[str, str]) -> int:
    """A signed 64-bit hash of texts by name, in any order."""
    lines = "\n".join(f"{name}\t{texts[name]}" for name in sorted(texts))
    return int.from_bytes(hashlib.blake2b(lines.encode(), digest_size=8).digest(), signed=True)


def sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of ``tensor``, in the order of its elements and 8 bytes at a time, added up: an int64 on its device.

    What is left of the last 8 bytes is added as numbers of the element's width.
    """
    if hasattr(tensor, "__tensor_flatten__"):
        return fold([sum_of_bits(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0]])
    flat = tensor.detach().contiguous().view(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).view(-1)
    width = flat.element_size()
    if flat.storage_offset() * width % 8 or flat.stride(0) != 1:  # of a single element it may be anything
        flat = flat.clone(memory_format=torch.contiguous_format)
    integers = flat.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[width])
    num_whole = integers.numel() * width // 8 * 8 // width
    total = integers[:num_whole].view(torch.int64).sum()
    return total if num_whole == integers.numel() else total + integers[num_whole:].sum(dtype=torch.int64)


def fold(numbers: Sequence[torch.Tensor]) -> torch.Tensor:
    """One int64 from several. A change of any of them changes it, since an odd factor has an inverse modulo 2^64."""
    stacked = torch.stack(list(numbers))
    places = torch.arange(len(numbers), dtype=torch.int64, device=stacked.device)
    return (stacked * (places * 2 + 1)).sum()


def differing(ranks: Ranks, digests: Sequence[int | torch.Tensor | None]) -> list[bool]:
    """Which digests, signed 64-bit numbers, are not the same on all ranks: one collective, and one read of its answer.

    Those on the device need not be read for it. None is the digest of a rank that has no say; some rank has one.
    """
    known = [0 if digest is None or isinstance(digest, torch.Tensor) else digest for digest in digests]
    whole = torch.tensor(known, dtype=torch.int64, device=ranks.device)
    on_device = [place for place, digest in enumerate(digests) if isinstance(digest, torch.Tensor)]
    if on_device:
        whole[on_device] = torch.stack([digest for digest in digests if isinstance(digest, torch.Tensor)])
    # In halves, so that none is the number that has no negative.
    halves = torch.stack([whole >> 32, whole & _LOW_HALF])
    both = torch.stack([halves, -halves])
    absent = [place for place, digest in enumerate(digests) if digest is None]
    if absent:
        both[:, :, absent] = _ABSENT
    highest, highest_of_negatives = ranks.highest(both)
    differs: list[bool] = (highest != -highest_of_negatives).any(0).tolist()
    return differs
