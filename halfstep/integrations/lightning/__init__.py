"""halfstep in Lightning: one precision plugin, for the Trainer and for Fabric.

trainer = Trainer(plugins=halfstep.integrations.lightning.Precision("auto"))
fabric = Fabric(plugins=halfstep.integrations.lightning.Precision("bf16"))
"""

from __future__ import annotations

from halfstep.errors import HalfstepError

try:
    import lightning as lightning  # the framework: imports of this package are absolute
except ImportError:
    raise HalfstepError(
        "halfstep.integrations.lightning",
        "it needs lightning, which is not installed",
        "Run: pip install 'halfstep[lightning]'.",
    ) from None

from halfstep.integrations.lightning.precision import Precision

__all__ = ["Precision"]
