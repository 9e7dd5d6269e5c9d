"""autocast: that of ``torch.amp``, with CUDA's op lists and usable 16-bit products on a CPU too.

    with halfstep.autocast("cuda", dtype=torch.float16):
        loss = loss_fn(model(x), y)

Names, arguments and behaviour are torch's. The backward pass of such a loop runs outside any region, a checkpoint
recomputes there under a ``torch.autocast`` of its own, and a compiled function is entered without a call of ours. So
what a CPU needs is not bound to a block: from the first enabled ``autocast("cpu")`` of a process on, every CPU autocast
region in it follows CUDA's lists, and 16-bit products go through cpu16 where the CPU has no instructions for them.
"""

from __future__ import annotations

import contextlib
import threading
import warnings

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from halfstep import region
from halfstep.errors import HalfstepError

_LOW = {torch.float16: "fp16", torch.bfloat16: "bf16"}

_standing = contextlib.ExitStack()
"""What stands by from the first use on; closing it gives back what torch had, for a test that compares the two."""
_stands_for: set[tuple[str, torch.dtype]] = set()
_lock = threading.Lock()


def autocast(
    device_type: str,
    dtype: torch.dtype | None = None,
    enabled: bool = True,
    cache_enabled: bool | None = None,
) -> torch.autocast:
    """A drop-in for ``torch.autocast``: what it returns is one, a context manager and a decorator.

    Raises HalfstepError for a dtype that no region computes in (float64, float8, integers), where torch warns at most
    and leaves the run as it is. On a CPU, float32 is what runs without autocast: it says so and switches itself off.
    Casts of weights that an optimizer has stepped inside the region are dropped.
    """
    if enabled and dtype is not None and dtype not in _LOW:
        enabled = _computes_in(device_type, dtype)
    # No class of ours, since torch.compile knows torch's alone.
    made = torch.autocast(device_type, dtype, enabled, cache_enabled)
    if enabled:
        _stand_by(device_type, torch.get_autocast_dtype(device_type) if dtype is None else dtype)
    return made


def _computes_in(device_type: str, dtype: torch.dtype) -> bool:
    """Whether a region computes in this format that is not 16 bit: fp32 on CUDA does, and nothing does on a CPU."""
    if device_type == torch._C._get_privateuse1_backend_name():
        return True  # that backend has a list of its own, which torch asks
    name = str(dtype).removeprefix("torch.")
    if dtype != torch.float32:
        raise HalfstepError(
            f"autocast({device_type!r}, dtype=torch.{name})",
            "autocast casts to a 16-bit format, and operations have none in this one",
            "Use dtype=torch.bfloat16 or torch.float16, or enabled=False to compute in the inputs' format.",
        )
    if device_type == "cpu":
        warnings.warn(
            "autocast('cpu', dtype=torch.float32) is off: operations run in the format of their inputs. "
            "enabled=False says the same without this warning.",
            stacklevel=3,
        )
    return device_type != "cpu"


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # a compiled function may call autocast
def _stand_by(device_type: str, dtype: torch.dtype) -> None:
    """Put in place what regions of this format need, once a process."""
    if (device_type, dtype) in _stands_for:
        return
    with _lock:
        if not _stands_for:
            # Autocast would go on using its casts of weights that have changed since.
            hook = register_optimizer_step_post_hook(lambda *_: torch.clear_autocast_cache())
            _standing.callback(hook.remove)
            _standing.callback(_stands_for.clear)
        if device_type == "cpu" and (device_type, dtype) not in _stands_for:
            _open_for_good(region.Region(nn.Identity(), _LOW[dtype]))
        _stands_for.add((device_type, dtype))


def _open_for_good(base: region.Region) -> None:
    """Open a region around all others: theirs are the rules while they are open, and this one's are left after them."""
    opened = region._opened
    # Of two formats, the one that needs cpu16 decides.
    num_bases = sum(kind == "cpu" for kind, _ in _stands_for)
    opened.insert(num_bases if base._needs_cpu16 else 0, base)
    _standing.callback(base._finish, None)
    opened[-1]._switch_on()
