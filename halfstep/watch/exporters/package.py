"""The optional package behind an exporter."""

from __future__ import annotations

import importlib
from typing import Any

from halfstep.errors import HalfstepError


def load(module: str, package: str) -> Any:
    """``module`` of ``package``; HalfstepError with what to install where it cannot be imported."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise HalfstepError(f"exporter to {package}", f"{error}", f"Run: pip install {package}") from None
