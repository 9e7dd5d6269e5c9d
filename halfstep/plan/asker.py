"""Who asks a fake tensor for its values: torch or the user's code, and the line of the user's that it is for."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch

from halfstep.record.walk import is_users


class Asker(NamedTuple):
    """frame: what asks, None if nothing is left. place: ``file:line`` of the user's code, None if halfstep asks."""

    frame: FrameType | None
    place: str | None

    @property
    def is_users(self) -> bool:
        """Whether the user's own code asks, not torch on the way from it."""
        return self.frame is not None and is_users(self.frame.f_code.co_filename)


_TORCH = f"{Path(torch.__file__).parent}{os.sep}"
_OWN = f"{Path(__file__).parent.parent}{os.sep}"
_BETWEEN = (
    *(f"{_OWN}{name}{os.sep}" for name in ("plan", "record")),
    *(
        f"{_TORCH}{name}"
        for name in (
            "_tensor.py",
            "overrides.py",
            "_ops.py",
            "_subclasses",
            "_compile.py",
            "_dynamo",
            f"utils{os.sep}_",
        )
    ),
)
"""Files between who asks and the answer."""


def asker() -> Asker:
    """Who has called into this plan."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_BETWEEN):
        frame = frame.f_back
    asking = frame
    while frame is not None:
        name = frame.f_code.co_filename
        if is_users(name):
            return Asker(asking, f"{Path(name).name}:{frame.f_lineno}")
        if name.startswith(_OWN) and not name.startswith(_BETWEEN):
            break
        frame = frame.f_back
    return Asker(asking, None)
