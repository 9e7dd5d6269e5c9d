"""The 16-bit formats that a region computes in, as torch dtypes; ``formats`` itself does without torch."""

from __future__ import annotations

from halfstep.formats import FORMATS, SIXTEEN_BIT

LOW_DTYPES = frozenset(FORMATS[name].dtype for name in SIXTEEN_BIT)
"""fp16 and bf16."""

FORMAT_OF = {format.dtype: format for name, format in FORMATS.items() if name != "tf32"}
"""The format that a dtype stores; tf32 is stored as fp32."""
