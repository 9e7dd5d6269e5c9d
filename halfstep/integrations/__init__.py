"""halfstep in the frameworks that own the loop: Lightning, Accelerate, Transformers and TRL.

A module loads when it is first used, and its framework with it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from halfstep.errors import HalfstepError

if TYPE_CHECKING:
    from halfstep.integrations import accelerate, lightning, transformers

_EXTRAS = {"accelerate": "train", "lightning": "lightning", "transformers": "train"}

__all__ = ["accelerate", "lightning", "transformers"]


def __getattr__(name: str) -> Any:
    if name not in _EXTRAS:
        raise AttributeError(f"module 'halfstep.integrations' has no attribute {name!r}")
    try:
        return importlib.import_module(f"halfstep.integrations.{name}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("halfstep"):
            raise
        raise HalfstepError(
            f"halfstep.integrations.{name}",
            f"it needs {error.name}, which is not installed",
            f"Run: pip install 'halfstep[{_EXTRAS[name]}]'",
        ) from None


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
