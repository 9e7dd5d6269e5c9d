"""The 16-bit formats that a region computes in, as torch dtypes; ``formats`` itself does without torch."""

from __future__ import annotations

from halfstep.formats import FORMATS, SIXTEEN_BIT

LOW_DTYPES = frozenset(FORMATS[name].dtype for name in SIXTEEN_BIT)
"""fp16 and bf16."""
