"""Sizes of memory."""

from __future__ import annotations

MIB, GIB = 2**20, 2**30


def mib(nbytes: float) -> float:
    """Bytes in MiB."""
    return nbytes / MIB


def size_text(nbytes: float) -> str:
    """Bytes for a reader, in three digits and the unit that suits them: B, KiB, MiB, GiB."""
    value, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.3g} {unit}" if abs(value) < 999.5 else f"{value:,.0f} {unit}"
